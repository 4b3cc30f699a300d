"""``layer``: the operators that a layer is made of, in one call, with the same bits."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gptkernels.rules import ops

B, T, C, HEADS, F = 2, 5, 32, 2, 64
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The stream's dtype, and that of products.
PAIRS = [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
FORMS = ["tanh", "none"]


def tensor(*shape, dtype, device):
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def arguments(wide, low, device, values=True, biases=True, transposed=False):
    """Of the forward, up to the options."""
    torch.manual_seed(3)

    def vector(n, dtype, given=True):
        return tensor(n, dtype=dtype, device=device) if given else None

    def matrix(rows, columns):
        t = tensor(columns, rows, dtype=low, device=device).t() if transposed else None
        return tensor(rows, columns, dtype=low, device=device) if t is None else t

    return (
        tensor(B, T, C, dtype=wide, device=device),
        tensor(B, T, C, dtype=low, device=device) if values else None,
        vector(C, wide, values and biases),
        *(vector(C, wide), vector(C, wide, biases)),
        *(matrix(3 * C, C), vector(3 * C, low, biases)),
        *(matrix(C, C), vector(C, wide, biases)),
        *(vector(C, wide), vector(C, wide, biases)),
        *(matrix(F, C), vector(F, low, biases), matrix(C, F)),
    )


def options(approximate):
    return HEADS, None, 1e-5, 1e-6, approximate


def dropouts(device, *probabilities):
    """Of values, attention and its output, with numbers of their own."""
    numbers = torch.randint(2**40, (len(probabilities), 2), generator=torch.Generator().manual_seed(6)).to(device)
    return [x for p, pair in zip(probabilities, numbers, strict=True) for x in (p, *(pair if p else (None, None)))]


NONE = dropouts("cpu", 0.0, 0.0, 0.0)
PROBABILITIES = [(0.1, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 0.1), (0.1, 0.2, 0.3), (1.0, 0.5, 1.0)]


def by_operators(
    stream, values, values_bias, n1w, n1b, qkv_w, qkv_b, out_w, out_b, n2w, n2b, fc_w, fc_b, proj_w, heads, scale,
    eps_1, eps_2, approximate, *dropped,
):  # fmt: skip
    """The forward's outputs."""
    first, second, third = (dropped or NONE)[:3], (dropped or NONE)[3:6], (dropped or NONE)[6:]
    if values is None:
        normed_1, mean_1, rstd_1 = ops.layernorm(stream, n1w, n1b, eps_1)
        normed_1, sum_1 = normed_1.to(qkv_w.dtype), stream
    else:
        normed_1, sum_1, mean_1, rstd_1 = ops.residual_layernorm(values, stream, n1w, n1b, eps_1, values_bias, *first)
    qkv = ops.linear(normed_1, qkv_w, qkv_b)
    attended, logsumexp = ops.attention(qkv, heads, scale, *second)
    added = ops.linear(attended, out_w)
    normed_2, sum_2, mean_2, rstd_2 = ops.residual_layernorm(added, sum_1, n2w, n2b, eps_2, out_b, *third)
    if approximate == "tanh":
        out, pre, post = ops.mlp(normed_2, fc_w, fc_b, proj_w, None)
    else:
        pre = ops.linear(normed_2, fc_w, fc_b)
        post = ops.gelu(pre, approximate="none")
        out = ops.linear(post, proj_w)
    kept = mean_1, rstd_1, normed_1, qkv, attended, logsumexp, sum_2, mean_2, rstd_2, normed_2, pre, post
    return (out, sum_1[:0].reshape(0) if values is None else sum_1, *kept)


def add_and_norm_backward(dout, dsum, sum, weight, mean, rstd, dropout):
    """Gradients of the addend, weight, bias, addend's bias and stream."""
    inputs = dout, dsum, sum, weight, mean, rstd
    if dout.dtype != sum.dtype or dropout[0]:
        return ops.residual_layernorm_dropout_backward(*inputs, *dropout, [True] * 5)
    dx, *rest = ops.residual_layernorm_bias_backward(*inputs, [True] * 4)
    return dx, *rest, dx


def by_operators_backward(dout, dsum, args, kept, approximate, *dropped, adds_past=True):
    """All gradients."""
    first, second, third = (dropped or NONE)[:3], (dropped or NONE)[3:6], (dropped or NONE)[6:]
    n1w, qkv_w, out_w, n2w, fc_w, proj_w = (args[i] for i in (3, 5, 7, 9, 11, 13))
    sum_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp, sum_2, mean_2, rstd_2, normed_2, pre, post = kept
    if approximate == "tanh":
        mask = [True] * 4 + [False]
        dnormed, dfc_w, dfc_b, dproj_w, _ = ops.mlp_backward(dout, normed_2, fc_w, proj_w, pre, post, mask)
    else:
        dpost, dproj_w, _ = ops.linear_backward(dout, post, proj_w, [True, True, False])
        dpre = ops.gelu_backward(dpost, pre, approximate="none")
        dnormed, dfc_w, dfc_b = ops.linear_backward(dpre, normed_2, fc_w, [True] * 3)
    dadded, dn2w, dn2b, dout_b, dstream = add_and_norm_backward(dnormed, dsum, sum_2, n2w, mean_2, rstd_2, third)
    dattended, dout_w, _ = ops.linear_backward(dadded, attended, out_w, [True, True, False])
    dqkv = ops.attention_backward(dattended, qkv, attended, logsumexp, HEADS, None, *second)
    dnormed, dqkv_w, dqkv_b = ops.linear_backward(dqkv, normed_1, qkv_w, [True] * 3)
    if args[1] is None:
        dnormed = dnormed.to(sum_1.dtype)
    inputs = dnormed, dstream if adds_past else None, sum_1, n1w, mean_1, rstd_1, first
    dvalues, dn1w, dn1b, dvalues_b, dsum_1 = add_and_norm_backward(*inputs)
    apart = dout.new_empty(0) if dvalues is dsum_1 and adds_past else dvalues
    dstream = dsum_1 if adds_past else dstream
    return (
        *(dstream, apart, dvalues_b, dn1w, dn1b, dqkv_w, dqkv_b, dout_w, dout_b, dn2w, dn2b),
        *(dfc_w, dfc_b, dproj_w),
    )


def backward_arguments(args, outputs, approximate, mask, dsum=True):
    """Of the backward, with the gradients that come in drawn."""
    stream, out, kept = args[0], outputs[0], [*outputs[1:]]
    if args[1] is None:
        kept[0] = stream
    torch.manual_seed(5)
    dout, dsum = torch.randn_like(out), torch.randn_like(stream) if dsum else None
    weights = (args[i] for i in (3, 5, 7, 9, 11, 13))
    return dout, dsum, *kept, *weights, HEADS, None, approximate, mask


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype, i
        assert a.stride() == b.stride(), i
        assert torch.equal(a, b), i


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("wide", "low"), PAIRS, ids=str)
def test_the_same_bits(wide, low, transposed, approximate, device):
    """Of all outputs and all gradients."""
    args = arguments(wide, low, device, transposed=transposed)
    outputs = ops.layer(*args, *options(approximate))
    assert_equal(outputs, by_operators(*args, *options(approximate)))
    given = backward_arguments(args, outputs, approximate, [True] * 14)
    assert_equal(ops.layer_backward(*given), by_operators_backward(*given[:2], args, given[2:15], approximate))


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize(("wide", "low"), [PAIRS[1], PAIRS[-2]], ids=str)
def test_a_gelu_that_is_computed_again(wide, low, approximate, device):
    """The other outputs have the same bits, and the gradients those from the GELU as an operator of its own."""
    args = arguments(wide, low, device)
    *outputs, post = ops.layer(*args, *options(approximate), keep_post_gelu=False)
    assert post.shape == (0,)
    assert_equal(outputs, ops.layer(*args, *options(approximate))[:-1])
    again = [*outputs, ops.gelu(outputs[-1], approximate=approximate)]
    every = [True] * 14
    found = ops.layer_backward(*backward_arguments(args, [*outputs, post], approximate, every))
    assert_equal(found, ops.layer_backward(*backward_arguments(args, again, approximate, every)))
    torch.library.opcheck(ops.layer, (*args, *options(approximate)), {"keep_post_gelu": False})


@pytest.mark.parametrize("probabilities", PROBABILITIES, ids=str)
@pytest.mark.parametrize(("wide", "low"), [PAIRS[0], PAIRS[2], PAIRS[-2]], ids=str)
def test_dropout(wide, low, probabilities, device):
    args, dropped = arguments(wide, low, device), dropouts(device, *probabilities)
    outputs = ops.layer(*args, *options("tanh"), *dropped)
    assert_equal(outputs, by_operators(*args, *options("tanh"), *dropped))
    assert any(not torch.equal(a, b) for a, b in zip(outputs, ops.layer(*args, *options("tanh")), strict=True))
    *given, mask = backward_arguments(args, outputs, "tanh", [True] * 14)
    expected = by_operators_backward(*given[:2], args, given[2:15], "tanh", *dropped)
    assert_equal(ops.layer_backward(*given, mask, *dropped), expected)
    without_bias = [*[True] * 8, False, *[True] * 5]
    found = ops.layer_backward(*given, without_bias, *dropped)
    assert all(torch.equal(a, b) for a, b, need in zip(found, expected, without_bias, strict=True) if need)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("adds_past", [True, False])
@pytest.mark.parametrize(("wide", "low"), PAIRS, ids=str)
def test_the_first_layer(wide, low, adds_past, approximate, device):
    """Without values; and without biases."""
    args = arguments(wide, low, device, values=False, biases=False)
    outputs = ops.layer(*args, *options(approximate))
    assert_equal(outputs, by_operators(*args, *options(approximate)))
    given = backward_arguments(args, outputs, approximate, [True] * 14)
    expected = by_operators_backward(*given[:2], args, given[2:15], approximate, adds_past=adds_past)
    assert_equal(ops.layer_backward(*given, has_values=False, adds_past=adds_past), expected)


@pytest.mark.parametrize(("wide", "low"), [PAIRS[1], PAIRS[-2]], ids=str)
def test_masks(wide, low, device):
    """What is not wanted has no elements, and the rest has the same bits."""
    args = arguments(wide, low, device)
    outputs = ops.layer(*args, *options("tanh"))
    *given, _ = backward_arguments(args, outputs, "tanh", None, dsum=False)
    every = ops.layer_backward(*given, [True] * 14)
    for i in range(14):
        for mask in ([j == i for j in range(14)], [j != i for j in range(14)]):
            found = ops.layer_backward(*given, mask)
            for j, (a, b) in enumerate(zip(found, every, strict=True)):
                if mask[j] or (j == 0 and mask[1] and wide == low):  # one gradient is both
                    assert torch.equal(a, b), (mask, j)
                elif j > 1:
                    assert a.numel() == 0, (mask, j)


@pytest.mark.parametrize("approximate", FORMS)
def test_flops(approximate, device):
    """Those of its operators."""
    args = arguments(torch.float32, torch.float32, device)
    counts = []
    for forward in (ops.layer, by_operators):
        with FlopCounterMode(display=False) as counter:
            outputs = forward(*args, *options(approximate))
        counts.append(counter.get_total_flops())
    given = backward_arguments(args, outputs, approximate, [True] * 14)
    with FlopCounterMode(display=False) as counter:
        ops.layer_backward(*given)
    counts.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        by_operators_backward(*given[:2], args, given[2:15], approximate)
    counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[3] > counts[0]


def test_refuses(device):
    args = arguments(torch.float32, torch.float32, device)
    with pytest.raises(RuntimeError, match="layer: approximate must be 'tanh' or 'none', got 'erf'"):
        ops.layer(*args, *options("erf"))
    with pytest.raises(RuntimeError, match="layer: values_bias"):
        ops.layer(args[0], None, *args[2:], *options("tanh"))
    with pytest.raises(RuntimeError, match="layer: values_bias and values_dropout_p"):
        ops.layer(args[0], None, None, *args[3:], *options("tanh"), *dropouts(device, 0.1))
    with pytest.raises(RuntimeError, match="layer: dropout_p must be"):
        ops.layer(*args, *options("tanh"), *dropouts(device, 1.5))
    with pytest.raises(RuntimeError, match="layer has no derivative"):
        ops.layer(args[0].requires_grad_(), *args[1:], *options("tanh"))
    with pytest.raises(RuntimeError, match="must have shape"):
        ops.layer(args[0].detach()[:1], *args[1:], *options("tanh"))
    args = [t if t is None else t.detach() for t in args]
    given = backward_arguments(args, ops.layer(*args, *options("tanh")), "tanh", [True] * 14)
    with pytest.raises(RuntimeError, match="layer_backward: adds_past must be true where there are values"):
        ops.layer_backward(*given, adds_past=False)


@pytest.mark.parametrize(("wide", "low", "values"), [(*PAIRS[1], True), (*PAIRS[-2], False)], ids=str)
def test_opcheck(wide, low, values, device):
    args = arguments(wide, low, device, values)
    torch.library.opcheck(ops.layer, (*args, *options("tanh")))
    outputs = ops.layer(*args, *options("tanh"))
    for adds_past in {True, values}:
        for mask in ([True] * 14, [False, True] * 7, [False] * 14):
            given = backward_arguments(args, outputs, "tanh", mask)
            which = {"has_values": values, "adds_past": adds_past}
            torch.library.opcheck(ops.layer_backward, given, which)


@pytest.mark.parametrize(("wide", "low"), [PAIRS[1], PAIRS[-2]], ids=str)
def test_opcheck_with_dropout(wide, low, device):
    args, dropped = arguments(wide, low, device), dropouts(device, 0.1, 0.2, 0.3)
    torch.library.opcheck(ops.layer, (*args, *options("tanh"), *dropped))
    outputs = ops.layer(*args, *options("tanh"), *dropped)
    for mask in ([True] * 14, [False, True] * 7):
        torch.library.opcheck(ops.layer_backward, (*backward_arguments(args, outputs, "tanh", mask), *dropped))
