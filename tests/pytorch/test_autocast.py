"""Tests that under autocast a weight is cast as often as torch casts it, and that results have torch's dtypes."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gptkernels import functional, nn
from gptkernels.rules import _autocast, residual_layernorm

ops = torch.ops.gptkernels


class CountCasts(TorchDispatchMode):
    def __init__(self, shape):
        super().__init__()
        self.shape, self.casts = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.casts += 1
        return func(*args, **(kwargs or {}))


def count_casts(weight, function, device, **options):
    with CountCasts(weight.shape) as counted, torch.autocast(device.type, torch.bfloat16, **options):
        function()
    return counted.casts


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_weight_is_cast_once_per_context(mode, device):
    weight = torch.randn(7, 5, device=device, requires_grad=True)
    bias = torch.randn(7, device=device, requires_grad=True)
    x = torch.randn(3, 5, device=device)

    def use(linear, times=3):
        with mode():
            for _ in range(times):
                linear(x, weight, bias)

    for t in (weight, bias):
        assert count_casts(t, lambda: use(functional.linear), device) == 1
        assert count_casts(t, lambda: use(F.linear), device) == 1
    assert count_casts(weight, lambda: use(functional.linear), device, cache_enabled=False) == 3

    def nested():
        for _ in range(2):
            with torch.autocast(device.type, torch.bfloat16):
                use(functional.linear, 2)

    assert count_casts(weight, nested, device) == 1  # the cache keeps a cast until the outermost context ends


def test_casts_are_freed_with_torchs_cache(device):
    weight = torch.randn(7, 5, device=device, requires_grad=True)
    x = torch.randn(3, 5, device=device)
    gc.disable()
    try:
        with torch.autocast(device.type, torch.bfloat16):
            functional.linear(x, weight)
            assert len(_autocast._casts()) == 1
            torch.clear_autocast_cache()
            assert _autocast._casts() is None
            functional.linear(x, weight)
            assert len(_autocast._casts()) == 1
        assert _autocast._casts() is None
    finally:
        gc.enable()


def test_a_cached_cast_follows_updates_and_records_gradients(device):
    """A cast made under no_grad is made again when a gradient is needed. torch's cache would return the first cast,
    which has no gradient.
    """
    weight = torch.randn(7, 5, device=device, requires_grad=True)
    x = torch.randn(3, 5, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        with torch.no_grad():
            first = functional.linear(x, weight)
            weight.mul_(2)
            torch.testing.assert_close(functional.linear(x, weight), 2 * first)
        functional.linear(x, weight).sum().backward()
        functional.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.bfloat16().float().sum(0).expand(7, 5), rtol=1e-2, atol=1e-2)


def test_the_cache_leaves_gradients_unchanged(device):
    torch.manual_seed(0)
    mlp, x = nn.MLP(8).to(device), torch.randn(3, 8, device=device)
    found = []
    for cache in (True, False):
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=cache):
            loss = (mlp(mlp(x)) + mlp(x)).float().square().sum()
        found.append(torch.autograd.grad(loss, list(mlp.parameters())))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_only_float32_leaf_parameters_are_cached(device):
    x = torch.randn(3, 5, device=device)
    weight = torch.randn(7, 5, device=device, requires_grad=True)
    for w in (weight.detach(), weight * 1, weight[:4], weight.double().detach().requires_grad_()):
        with torch.autocast(device.type, torch.bfloat16):
            functional.linear(x.to(torch.float64) if w.dtype == torch.float64 else x, w)
            assert _autocast._casts() is None


def test_float64_results_stay_float64(device):
    x, weight, bias = (torch.randn(s, dtype=torch.float64, device=device) for s in [(3, 4, 12), (4, 12), (4,)])
    square = torch.randn(2, 4, 4, dtype=torch.float64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        for out in (
            functional.linear(x, weight, bias),
            functional.layer_norm(x, (12,)),
            functional.residual_layer_norm(x, x, (12,))[0],
            functional.softmax(x, -1),
            functional.causal_softmax(square),
            functional.causal_attention(x, 2),
            functional.mlp(x, weight, bias, weight.T, None),
            functional.gelu(x),
        ):
            assert out.dtype == torch.float64


def test_threads_have_their_own_contexts(device):
    weight, x = torch.randn(7, 5, device=device, requires_grad=True), torch.randn(3, 5, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        first = functional.linear(x, weight)

        def other():
            with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
                functional.linear(x, weight)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert torch.equal(functional.linear(x, weight), first)


def test_saved_tensor_hooks_see_only_the_ops_tensors(device):
    weight = torch.nn.Parameter(torch.randn(3, 4, device=device))
    x = torch.randn(5, 4, device=device)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t)
    with hooks, torch.autocast(device.type):
        out = functional.linear(x, weight)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    assert set(saved) <= {x.shape, weight.shape}
    with torch.autocast(device.type):
        expected = functional.linear(x, weight)
    grads = [torch.autograd.grad(result.float().square().sum(), weight)[0] for result in (out, expected)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_residual_layernorm_has_the_dtypes_of_torchs_steps(residual_dtype, x_dtype, dropout_p, device):
    x, residual = torch.randn(3, 8, device=device).to(x_dtype), torch.randn(3, 8, device=device).to(residual_dtype)
    weight, bias = torch.randn(8, device=device), torch.randn(8, device=device)
    dropout = (dropout_p, torch.tensor(3, device=device), torch.tensor(4, device=device)) if dropout_p else ()
    args = x, residual, weight, bias, 1e-5, None, *dropout
    if device.type == "cuda":
        with torch.autocast("cuda", torch.bfloat16):
            out, total, _, _ = ops.residual_layernorm(*args)
    else:
        cast = lambda t, dtype: None if t is None else t.to(dtype)  # noqa: E731
        out, total, _, _ = residual_layernorm.as_torchs_steps(ops.residual_layernorm, cast, *args)
    dropped = 2 * x * ops.dropout_mask(24, *dropout).view(3, 8) if dropout_p else x
    expected = F.layer_norm((dropped + residual).float(), (8,), weight, bias)
    assert (total.dtype, out.dtype) == ((x + residual).dtype, expected.dtype)
    assert torch.equal(total, dropped + residual)
    torch.testing.assert_close(out, expected)
