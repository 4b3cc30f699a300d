"""Tests of ``layer`` and ``fp8_layer``. tests/models/test_fused_block.py tests these operators in a model."""

import pytest
import torch

from gptkernels.block.tensors import BlockParameters, FP8LayerSaved, LayerSaved, Weights
from gptkernels.rules import ops
from gptkernels.rules.fp8 import new_history
from helpers import DTYPES, assert_close_in_scale, count_flops, raises, randn, refused

B, T, C, HEADS, F = 2, 8, 32, 2, 64
# Pairs (dtype of the residual stream, dtype of the matmuls).
PAIRS = [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
SAME, MIXED = (torch.float32, torch.float32), (torch.float32, torch.bfloat16)
EVERY = [True] * 14
FP8_OPTIONS = HEADS, None, 1e-5, 1e-6
both_forms = pytest.mark.parametrize("approximate", ["tanh", "none"])


def arguments(wide, low, device, values=True, biases=True, transposed=False):
    def vector(size, dtype=wide, given=biases):
        return randn(size, dtype=dtype, device=device) if given else None

    def matrix(rows, columns):
        shape = (columns, rows) if transposed else (rows, columns)
        return randn(*shape, dtype=low, device=device).as_strided(
            (rows, columns), (1, rows) if transposed else (columns, 1)
        )

    return (
        randn(B, T, C, dtype=wide, device=device),
        randn(B, T, C, dtype=low, device=device) if values else None,
        vector(C, given=values and biases),
        *(vector(C, given=True), vector(C)),
        *(matrix(3 * C, C), vector(3 * C, low), matrix(C, C), vector(C)),
        *(vector(C, given=True), vector(C)),
        *(matrix(F, C), vector(F, low), matrix(C, F)),
    )


def histories(device):
    return [[new_history(device) for _ in range(4)] for _ in range(2)]


def options(approximate="tanh"):
    return *FP8_OPTIONS, approximate


def dropouts(device, *probabilities):
    """``layer`` has three dropouts: of its argument ``values``, of attention, and of attention's projected output."""
    numbers = torch.randint(2**40, (len(probabilities), 2), generator=torch.Generator().manual_seed(6)).to(device)
    return [x for p, pair in zip(probabilities, numbers, strict=True) for x in (p, *(pair if p else (None, None)))]


NONE = dropouts("cpu", 0.0, 0.0, 0.0)


def by_operators(args, approximate="tanh", dropped=NONE):
    """Compute the outputs of ``layer`` by separate operators, which autograd can differentiate."""
    stream, values, values_bias, *parameters = args
    p, (_, _, eps_1, eps_2) = BlockParameters(*parameters), FP8_OPTIONS
    if values is None:
        normed_1, mean_1, rstd_1 = ops.layernorm(stream, p.norm_1_weight, p.norm_1_bias, eps_1)
        normed_1, residual_1 = normed_1.to(p.qkv_weight.dtype), stream
    else:
        norm_1 = p.norm_1_weight, p.norm_1_bias, eps_1, values_bias, *dropped[:3]
        normed_1, residual_1, mean_1, rstd_1 = ops.residual_layernorm(values, stream, *norm_1)
    qkv = ops.linear(normed_1, p.qkv_weight, p.qkv_bias)
    attended, logsumexp = ops.attention(qkv, HEADS, None, *dropped[3:6])
    norm_2 = p.norm_2_weight, p.norm_2_bias, eps_2, p.attn_proj_bias, *dropped[6:]
    added = ops.linear(attended, p.attn_proj_weight)
    normed_2, residual_2, mean_2, rstd_2 = ops.residual_layernorm(added, residual_1, *norm_2)
    if approximate == "tanh":
        out, pre, post = ops.mlp(normed_2, p.fc_weight, p.fc_bias, p.mlp_proj_weight, None)
    else:
        pre = ops.linear(normed_2, p.fc_weight, p.fc_bias)
        post = ops.gelu(pre, approximate="none")
        out = ops.linear(post, p.mlp_proj_weight)
    kept = mean_1, rstd_1, normed_1, qkv, attended, logsumexp, residual_2, mean_2, rstd_2, normed_2, pre, post
    return (out, residual_1[:0].reshape(0) if values is None else residual_1, *kept)


def backward_arguments(args, outputs, mask, approximate="tanh"):
    out, saved, p = outputs[0], LayerSaved(*outputs[1:]), BlockParameters(*args[3:])
    if args[1] is None:
        saved = saved._replace(residual_1=args[0])
    weights = p.norm_1_weight, p.qkv_weight, p.attn_proj_weight, p.norm_2_weight, p.fc_weight, p.mlp_proj_weight
    torch.manual_seed(5)
    return torch.randn_like(out), torch.randn_like(args[0]), *saved, *weights, HEADS, None, approximate, mask


def fp8_backward_arguments(args, outputs, adds_past=True):
    _, residual_1, residual_2, *saved = outputs
    residual_1, p = args[0] if args[1] is None else residual_1, BlockParameters(*args[3:14])
    kept = residual_1, residual_2, saved, p.norm_1_weight, p.norm_2_weight, args[15]
    return torch.randn_like(residual_2), torch.randn_like(residual_2), *kept, HEADS, None, adds_past, EVERY


def assert_same_bits_and_strides(found, expected):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype, i
        assert a.stride() == b.stride(), i
        assert torch.equal(a, b), i


def compare(args, approximate="tanh", dropped=NONE, **which):
    outputs = ops.layer(*args, *options(approximate), *dropped)
    leaves = [t if t is None else t.detach().requires_grad_() for t in args]
    expected = by_operators(leaves, approximate, dropped)
    assert_same_bits_and_strides(outputs, expected)
    given = backward_arguments(args, outputs, EVERY, approximate)
    dstream, dvalues, *gradients = ops.layer_backward(*given, *dropped, **which)
    if args[1] is None:  # autograd adds the stream's gradients of the norm and the addition
        dstream = dstream + dvalues
    found = [dstream, dvalues if dvalues.numel() else dstream, *gradients]
    results = expected[0], expected[1 + LayerSaved._fields.index("residual_2")]
    wanted = [t for t in leaves if t is not None]
    found = [d for d, t in zip(found, args, strict=True) if t is not None]
    assert_same_bits_and_strides(found, torch.autograd.grad(results, wanted, given[:2]))


def test_namedtuples_have_the_names_of_the_schemas():
    def names(values):
        return tuple(value.name for value in values)

    forward, backward = ops.layer.default._schema, ops.layer_backward.default._schema
    forward_8, backward_8 = ops.fp8_layer.default._schema, ops.fp8_layer_backward.default._schema
    assert names(forward.arguments)[:14] == ("stream", "values", "values_bias", *BlockParameters._fields)
    assert names(forward_8.arguments)[:14] == names(forward.arguments)[:14]
    assert names(forward.returns) == ("out", *LayerSaved._fields)
    assert names(forward_8.returns) == ("out", "residual_1", "residual_2", *FP8LayerSaved._fields)
    gradients = ("dstream", "dvalues", "dvalues_bias", *(f"d{name}" for name in BlockParameters._fields))
    assert names(backward.returns) == names(backward_8.returns) == gradients
    given = names(backward.arguments)
    assert given[:15] == ("dout", "dresidual_2", *LayerSaved._fields)
    assert [name for name in given if name in BlockParameters._fields] == [
        name for name in BlockParameters._fields if name in (*Weights._fields, "norm_1_weight", "norm_2_weight")
    ]


@both_forms
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("wide", "low"), PAIRS, ids=str)
def test_has_the_bits_of_single_operators(wide, low, transposed, approximate, device):
    compare(arguments(wide, low, device, transposed=transposed), approximate)


@both_forms
@pytest.mark.parametrize(("wide", "low"), PAIRS, ids=str)
def test_layer_without_values_and_biases(wide, low, approximate, device):
    args = arguments(wide, low, device, values=False, biases=False)
    compare(args, approximate, has_values=False, adds_past=False)
    given = backward_arguments(args, ops.layer(*args, *options(approximate)), EVERY, approximate)
    past, through, _, *expected = ops.layer_backward(*given, has_values=False, adds_past=False)
    dstream, _, _, *found = ops.layer_backward(*given, has_values=False)
    assert_close_in_scale(dstream, past + through, wide)
    assert_same_bits_and_strides(found, expected)


@pytest.mark.parametrize(
    "probabilities", [(0.1, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 0.1), (0.1, 0.2, 0.3), (1.0, 0.5, 1.0)], ids=str
)
@pytest.mark.parametrize(("wide", "low"), [PAIRS[0], PAIRS[2], MIXED], ids=str)
def test_dropout(wide, low, probabilities, device):
    args, dropped = arguments(wide, low, device), dropouts(device, *probabilities)
    compare(args, "tanh", dropped)
    outputs = ops.layer(*args, *options(), *dropped)
    assert any(not torch.equal(a, b) for a, b in zip(outputs, ops.layer(*args, *options()), strict=True))
    without_bias = [*[True] * 8, False, *[True] * 5]
    every, found = (
        ops.layer_backward(*backward_arguments(args, outputs, mask), *dropped) for mask in (EVERY, without_bias)
    )
    assert all(torch.equal(a, b) for a, b, need in zip(found, every, without_bias, strict=True) if need)


@both_forms
@pytest.mark.parametrize(("wide", "low"), [SAME, MIXED], ids=str)
def test_recomputed_gelu(wide, low, approximate, device):
    args = arguments(wide, low, device)
    *outputs, post = ops.layer(*args, *options(approximate), keep_post_gelu=False)
    assert post.shape == (0,)
    assert_same_bits_and_strides(outputs, ops.layer(*args, *options(approximate))[:-1])
    again = [*outputs, ops.gelu(outputs[-1], approximate=approximate)]
    found, expected = (
        ops.layer_backward(*backward_arguments(args, kept, EVERY, approximate)) for kept in ([*outputs, post], again)
    )
    assert_same_bits_and_strides(found, expected)
    torch.library.opcheck(ops.layer, (*args, *options(approximate)), {"keep_post_gelu": False})


@pytest.mark.parametrize(("wide", "low"), [SAME, MIXED], ids=str)
def test_output_mask(wide, low, device):
    args = arguments(wide, low, device)
    dout, _, *given, _ = backward_arguments(args, ops.layer(*args, *options()), None)
    every = ops.layer_backward(dout, None, *given, EVERY)
    for i in range(14):
        for mask in ([j == i for j in range(14)], [j != i for j in range(14)]):
            found = ops.layer_backward(dout, None, *given, mask)
            for j, (a, b) in enumerate(zip(found, every, strict=True)):
                if mask[j] or (j == 0 and mask[1] and wide == low):  # one tensor is both dstream and dvalues
                    assert torch.equal(a, b), (mask, j)
                elif j > 1:
                    assert a.numel() == 0, (mask, j)


def test_flops(device):
    args, eight = arguments(*SAME, device), histories(device)
    matmuls, attention = 2 * B * T * C * (3 * C + C + 2 * F), 4 * B * T * T * C
    expected = (matmuls + attention, 2 * matmuls + 5 * attention // 2)
    for approximate in ("tanh", "none"):
        forward, outputs = count_flops(ops.layer, *args, *options(approximate))
        given = backward_arguments(args, outputs, EVERY, approximate)
        assert (forward, count_flops(ops.layer_backward, *given)[0]) == expected
    forward, outputs = count_flops(ops.fp8_layer, *args, *eight, *FP8_OPTIONS)
    given = fp8_backward_arguments((*args, *eight), outputs)
    assert (forward, count_flops(ops.fp8_layer_backward, *given)[0]) == expected


@pytest.mark.parametrize(("wide", "low", "values"), [(*SAME, True), (*MIXED, False), (*MIXED, True)], ids=str)
def test_opcheck_with_dropout_or_without_values(wide, low, values, device):
    args, dropped = arguments(wide, low, device, values), dropouts(device, 0.1, 0.2, 0.3) if values else NONE
    torch.library.opcheck(ops.layer, (*args, *options(), *dropped))
    outputs = ops.layer(*args, *options(), *dropped)
    for adds_past in {True, values}:
        for mask in (EVERY, [False, True] * 7):
            given = backward_arguments(args, outputs, mask)
            which = {"has_values": values, "adds_past": adds_past}
            torch.library.opcheck(ops.layer_backward, (*given, *dropped), which)


def test_opcheck_with_float8_matmuls_and_without_values(device):
    args = *arguments(torch.bfloat16, torch.bfloat16, device, values=False), *histories(device)
    torch.library.opcheck(ops.fp8_layer, (*args, *FP8_OPTIONS))
    outputs = ops.fp8_layer(*args, *FP8_OPTIONS)
    # opcheck's test of the schema multiplies tensors, which torch cannot do for float8.
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    for adds_past in (True, False):
        given = fp8_backward_arguments(args, outputs, adds_past)
        torch.library.opcheck(ops.fp8_layer_backward, given, test_utils=tests)


def test_bad_input(device):
    args = arguments(*SAME, device)
    refused(ops.layer, (*args, *options("erf")), "approximate must be 'tanh' or 'none', got 'erf'")
    refused(ops.layer, (args[0], None, *args[2:], *options()), "values_bias")
    dropped = *options(), *dropouts(device, 0.1)
    refused(ops.layer, (args[0], None, None, *args[3:], *dropped), "values_bias and values_dropout_p")
    refused(ops.layer, (*args, *options(), *dropouts(device, 1.5)), "dropout_p must be")
    refused(ops.layer, (args[0].clone().requires_grad_(), *args[1:], *options()), "layer has no derivative")
    with raises("must have shape"):
        ops.layer(args[0][:1], *args[1:], *options())
    given = backward_arguments(args, ops.layer(*args, *options()), EVERY)
    refused(ops.layer_backward, given, "adds_past must be true where there are values", adds_past=False)


def test_bad_input_with_float8_matmuls(device):
    args, (eight, of_douts) = arguments(*SAME, device), histories(device)
    few, rest = [history[:4] for history in eight], (eight, of_douts, *FP8_OPTIONS)
    for given, message in [
        ((*args, eight[:3], of_douts, *FP8_OPTIONS), "histories must be 4 tensors, got 3"),
        ((*args, few, of_douts, *FP8_OPTIONS), r"histories must have shape \(18\)"),
        ((*args, eight, few, *FP8_OPTIONS), r"dout_histories must have shape \(18\)"),
        ((args[0], None, *args[2:], *rest), "values_bias and values_dropout_p are of values"),
        ((*args[:5], args[7], *args[6:], *rest), r"qkv_bias must have shape \(32\)"),
        ((*args[:11], args[11][:40], *args[12:], *rest), "multiple of 16"),
        ((args[0].clone().requires_grad_(), *args[1:], *rest), "fp8_layer has no derivative"),
    ]:
        with raises(message):
            ops.fp8_layer(*given)
    given = fp8_backward_arguments((*args, eight, of_douts), ops.fp8_layer(*args, *rest))
    with raises("saved must be the 24 tensors of the forward, got 3"):
        ops.fp8_layer_backward(*given[:4], given[4][:3], *given[5:])
