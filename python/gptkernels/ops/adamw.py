"""One step of AdamW on a list of tensors, in place (Loshchilov and Hutter, 2019); shaped as torch's _fused_adamw_."""

from gptkernels.ops._register import _registrations, fake, mutates, without_derivative


def _fake(params, grads, exp_avgs, exp_avg_sqs, steps, **options):
    return None


def _without_kernel(params, grads, exp_avgs, exp_avg_sqs, steps, **options):
    """A step on empty lists, which the dispatcher knows no device for; and devices that have no kernel."""
    if params:
        raise RuntimeError(f"gptkernels::adamw_: params[0] is on {params[0].device}, which has no kernel")


fake("adamw_", _fake)
mutates("adamw_")
without_derivative("adamw_")
_registrations.impl("adamw_", _without_kernel, "CompositeExplicitAutograd")
