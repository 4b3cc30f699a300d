"""One step of AdamW (Loshchilov and Hutter, 2019) on lists of tensors, in place."""

from typing import Any

import torch

from gptkernels.rules import _register as register
from gptkernels.rules._register import _registrations, _version_counter, ops


def _without_kernel(params, grads, exp_avgs, exp_avg_sqs, steps, **options):
    """Accept empty lists, for which the dispatcher knows no device; refuse devices without a kernel."""
    if params:
        raise RuntimeError(f"gptkernels::adamw_: params[0] is on {params[0].device}, which has no kernel")


register.fake("adamw_", lambda *lists, **options: None)
register.mutates("adamw_")
register.without_derivative("adamw_")
_registrations.impl("adamw_", _without_kernel, "CompositeExplicitAutograd")


_count_versions = _version_counter(ops.adamw_.default)


def step(*lists: Any, **options: Any) -> None:
    """Call ``adamw_`` without the rules above, which would pass lists of hundreds of tensors through Python again.

    The caller ensures that no gradients are recorded. Versions are incremented here.
    """
    if torch.compiler.is_compiling():
        ops.adamw_.default(*lists, **options)
        return
    with torch._C._AutoDispatchBelowADInplaceOrView():
        ops.adamw_.default(*lists, **options)
    _count_versions(lists, options)
