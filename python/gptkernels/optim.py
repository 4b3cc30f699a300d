"""AdamW (Loshchilov and Hutter, 2019) and gradient clipping with this package's kernels."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels import _dtensor
from gptkernels._dtensor import Place
from gptkernels.rules import adamw, ops
from gptkernels.rules._register import below_autograd

__all__ = ["AdamW", "clip_grad_norm_"]


class AdamW(torch.optim.AdamW):
    """:class:`torch.optim.AdamW` with one launch for up to 160 parameters of a group with the same dtype and device.

    The arguments, param groups and state dict are torch's; either optimizer can load the other's state dict. A step
    does not synchronise with the device. Parameters may have any dense layout. For FSDP2's DTensors each process
    updates its own part.

    A float16 or bfloat16 parameter may have a float32 master copy (state key ``master_param``): the update is applied
    to the copy and rounded into the parameter, and the moments are float32. If an element of the parameter does not
    equal its rounded copy, other code has changed the parameter, and the element's update starts from the parameter.

    With :class:`torch.amp.GradScaler` the kernel itself divides the gradients by the scale, and skips the step if a
    gradient is not finite.

    Args:
        params: parameters, or groups of parameters with their own options.
        lr: learning rate, a float or a tensor of one element. A CUDA graph reads a tensor on the parameters' device at
            each replay.
        betas: decay of the two moments, floats.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay: each step multiplies a parameter by 1 - lr * weight_decay.
        amsgrad, differentiable: must be False; not supported.
        maximize: maximise the objective instead of minimising it.
        foreach, capturable, fused: kept for state dicts; have no effect.
        master_weights: keep float32 copies of the float16 and bfloat16 parameters.
        max_grad_norm: clip the gradients of all groups together to this Euclidean norm, without writing them. None
            neither clips nor computes the norm; ``math.inf`` only computes it.
        rounding_seed: round bfloat16 parameters and their moments stochastically, so that small updates are right on
            average. The same seed and step give the same bits. None rounds to nearest. A seed cannot be combined with
            ``master_weights``.

    Attributes:
        max_grad_norm: may be set between steps. It is not part of the state dict.
        found_inf: None, or a float32 tensor of one element on the parameters' device; if it is not 0, the step is
            skipped. A GradScaler sets it, and other code may.
        gathers_norm: False, or True to compute the norm of DTensors' gradients from the whole gradients, which each
            process gathers and must have memory for. The norm then has the bits of one process's.
        grad_norm: with ``max_grad_norm``, the norm of the last step's gradients before clipping (and after division by
            a GradScaler's scale), 0-dim float32 on the gradients' device; otherwise None.

    Raises:
        ValueError: if an option is out of range or not supported.
    """

    _step_supports_amp_scaling = True  # GradScaler then sets grad_scale and found_inf before it calls step
    max_grad_norm: float | None = None
    found_inf: Tensor | None = None
    gathers_norm: bool = False
    grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        rounding_seed: int | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        own = {"master_weights": master_weights, "rounding_seed": rounding_seed}
        self.defaults.update(own)
        for group in self.param_groups:
            for name, value in own.items():
                group.setdefault(name, value)
            _check_options(group)
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"Invalid max_grad_norm: {max_grad_norm}")
        self.max_grad_norm = max_grad_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters as torch does; raise a ValueError if an option is not supported."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "grad_norm": self.grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state, and add the options that torch's AdamW and earlier versions of this class lack."""
        for group in state["param_groups"]:
            _check_options(group)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("master_weights", self.defaults.get("master_weights", False))
            group.setdefault("rounding_seed", self.defaults.get("rounding_seed"))
        for parameter, state in self.state.items():
            if "step" in state:  # torch stores it on the CPU unless the optimizer is fused or capturable
                state["step"] = state["step"].to(parameter.device, torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does, but keep a master copy and its moments in float32.

        Torch would round them to the parameter's dtype.

        Raises:
            ValueError: if an option in the state is not supported. Then nothing is loaded.
        """
        super().load_state_dict(state_dict)
        saved_ids = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for i, parameter in zip(saved_ids, parameters, strict=True):
            saved, loaded = state_dict["state"].get(i, {}), self.state.get(parameter, {})
            for name in ("master_param", "exp_avg", "exp_avg_sq"):
                if name in loaded:
                    value = saved[name].float() if "master_param" in saved else loaded[name]
                    loaded[name] = _like(value, parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        If ``closure`` is given, it is called first. It computes the loss and the gradients again, and ``step`` returns
        this loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(alike, group) for group in self.param_groups for alike in _alike(group["params"])]
        self.grad_norm = self._norm([alike for alike, _ in groups])
        for i, (alike, group) in enumerate(groups):
            self._update(alike, group, i)
        return loss

    def _norm(self, groups: "list[_Alike]") -> Tensor | None:
        if self.max_grad_norm is None:
            return None
        if self.gathers_norm:
            parameters = (p for group in self.param_groups for p in group["params"])
            norm = gradient_norm([p.grad for p in parameters if p.grad is not None], gather=True)
        else:
            norm = _total_norm(_by_place((alike.place, alike.grads) for alike in groups))
        scale = getattr(self, "grad_scale", None)
        return norm if scale is None else norm / scale.to(norm.device)

    def _update(self, alike: "_Alike", group: dict[str, Any], number: int) -> None:
        parameters, place = alike.parameters, alike.place
        device = parameters[0].device
        seed = group["rounding_seed"] if parameters[0].dtype == torch.bfloat16 else None
        masters = group["master_weights"] and parameters[0].dtype in (torch.float16, torch.bfloat16)
        states = [self.state[parameter] for parameter in parameters]
        newest = "master_param" if masters else "exp_avg"
        if any(newest not in state for state in states):
            states = [self._state(parameter, masters) for parameter in parameters]
        steps = [state["step"] for state in states]
        numbers = (getattr(self, "grad_scale", None), getattr(self, "found_inf", None), self.grad_norm)
        grad_scale, found_inf, grad_norm = (None if t is None else t.to(device) for t in numbers)
        _count(steps, found_inf)
        beta1, beta2 = group["betas"]

        def local(tensors: list[Tensor]) -> list[Tensor]:
            return tensors if place is None else [_dtensor.local(t, place) for t in tensors]

        adamw.step(
            local(parameters),
            alike.grads,
            local([state["exp_avg"] for state in states]),
            local([state["exp_avg_sq"] for state in states]),
            steps,
            lr=_learning_rate(group["lr"], device),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=grad_scale,
            found_inf=found_inf,
            maximize=group["maximize"],
            master_params=local([state["master_param"] for state in states]) if masters else None,
            grad_norm=grad_norm,
            max_grad_norm=self.max_grad_norm,
            rounding_seed=None if seed is None else seed + number,
        )

    def _state(self, parameter: Tensor, master: bool) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            dtype = torch.float32 if master else parameter.dtype
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        if master and "master_param" not in state:
            state["master_param"] = parameter.detach().float()
            for name in ("exp_avg", "exp_avg_sq"):  # 16-bit if they are loaded from a run without master weights
                state[name] = state[name].float()
        return state


def _check_options(options: dict[str, Any]) -> None:
    for name in ("amsgrad", "differentiable"):
        if options.get(name):
            raise ValueError(f"AdamW: {name}=True is not supported: gptkernels has no kernel for it")
    if options.get("master_weights") and options.get("rounding_seed") is not None:
        raise ValueError("AdamW: master_weights and rounding_seed exclude each other")
    if any(isinstance(beta, Tensor) for beta in options["betas"]):
        raise ValueError("AdamW: betas must be floats, got a tensor")


def _learning_rate(lr: float | Tensor, device: torch.device) -> Tensor:
    """Convert a learning rate to a tensor for the op ``adamw_``.

    A float becomes a CPU tensor, and a CPU tensor stays on the CPU. Any other tensor is moved to ``device``, where the
    kernel reads it.
    """
    if not isinstance(lr, Tensor):
        if torch.compiler.is_compiling():  # the multiplication prevents a recompilation for another lr
            return torch.ones((), dtype=torch.float64, device="cpu") * lr
        return torch.tensor(lr, dtype=torch.float64, device="cpu")  # on the CPU, even with torch.set_default_device
    if lr.is_cpu:
        return lr.double()
    return lr.to(device, lr.dtype if lr.dtype == torch.float64 else torch.float32)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    value = value.to(parameter.device)
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _count(steps: list[Tensor], found_inf: Tensor | None) -> None:
    # Without alpha, torch would wait for the value of found_inf, and on the CPU convert 1 to a tensor for each step
    # count.
    if found_inf is not None:
        torch._foreach_add_(steps, 1 - found_inf.view(()), alpha=1.0)
    elif steps[0].is_cpu:
        torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)


class _Alike(NamedTuple):
    """Parameters of one device, dtype and distribution, and their gradients (for DTensors, this process's parts)."""

    parameters: list[Tensor]
    grads: list[Tensor]
    place: Place | None


_PLAIN = {*_dtensor.PLAIN}


def _alike(parameters: Iterable[Tensor]) -> Iterable[_Alike]:
    parameters = list(parameters)
    grads: list[Any] = [parameter.grad for parameter in parameters]
    if type(None) in set(map(type, grads)):
        parameters = [parameter for parameter, grad in zip(parameters, grads, strict=True) if grad is not None]
        grads = [grad for grad in grads if grad is not None]
    # Usually all parameters are plain tensors of one dtype and device. This test is faster than grouping.
    if (
        set(map(type, parameters)) <= _PLAIN
        and {grad.layout for grad in grads} == {torch.strided}
        and len({parameter.dtype for parameter in parameters}) == 1
        and len({parameter.device for parameter in parameters}) == 1
    ):
        return [_Alike(parameters, grads, None)]
    return _sorted(parameters)


def _sorted(parameters: Iterable[Tensor]) -> Iterable[_Alike]:
    alike: dict[tuple[torch.device, torch.dtype, Place | None], _Alike] = {}
    for parameter in parameters:
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("AdamW: sparse gradients are not supported: gptkernels has no kernel for them")
        place = None if type(parameter) in _dtensor.PLAIN else _dtensor.place_of(parameter)
        key = (parameter.device, parameter.dtype, place)
        found = alike.get(key)
        if found is None:
            found = alike[key] = _Alike([], [], place)
        found.parameters.append(parameter)
        found.grads.append(grad if place is None else _dtensor.local(grad, place))
    return alike.values()


_ByPlace = dict[tuple[torch.device, Place | None], list[Tensor]]


def _by_place(lists: Iterable[tuple[Place | None, list[Tensor]]]) -> _ByPlace:
    found: _ByPlace = {}
    for place, tensors in lists:
        found.setdefault((tensors[0].device, place), []).extend(tensors)
    return found


def _total_norm(by_place: _ByPlace) -> Tensor:
    norms = [_dtensor.norm_of_all(_norm_of(group), place) for (_, place), group in by_place.items()]
    if not norms:
        return torch.zeros((), device="cpu")
    if len(norms) == 1:
        return norms[0]
    return _norm_of([norm.to(norms[0].device) for norm in norms])


def _norm_of(tensors: list[Tensor]) -> Tensor:
    if torch.compiler.is_compiling():
        return ops.global_norm.default(tensors)
    return below_autograd(ops.global_norm.default, tensors)  # type: ignore[no-any-return]


def gradient_norm(grads: Sequence[Tensor], gather: bool = False) -> Tensor:
    """Return the norm of all gradients together, 0-dim float32; DTensors count as whole tensors.

    With ``gather`` each process gathers all DTensors, and the norm has the bits of one process's.
    """
    if gather:
        grads = [*map(_dtensor.whole, grads)]
    places = [_dtensor.place_of(grad) for grad in grads]
    return _total_norm(
        _by_place((place, [_dtensor.local(grad, place)]) for place, grad in zip(places, grads, strict=True))
    )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients as :func:`torch.nn.utils.clip_grad_norm_` does for the 2-norm; :class:`AdamW` can clip faster.

    A deterministic kernel computes the norm, which for DTensors is that of the whole tensors.

    Args:
        parameters: one or several parameters; parameters without a gradient are ignored.
        max_norm: the largest norm of all gradients together after clipping.
        norm_type: must be 2.
        error_if_nonfinite: raise an error if the norm is nan or infinite. For this check the host waits for the device.
        foreach: has no effect.

    Returns:
        The norm before clipping, 0-dim float32.

    Raises:
        ValueError: if ``norm_type`` is not 2.
        RuntimeError: if the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    if norm_type != 2:
        raise ValueError(f"clip_grad_norm_: norm_type must be 2, got {norm_type}: gptkernels has no kernel for it")
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [p.grad for p in parameters if p.grad is not None]
    total = gradient_norm(grads)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the gradients' norm is {total.item()}, so they cannot be clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    held = ((None, [_dtensor.held(grad)]) for grad in grads)
    for (device, _), group in _by_place(held).items():
        torch._foreach_mul_(group, scale.to(device))
    return total
