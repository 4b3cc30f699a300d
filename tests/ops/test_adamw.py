import math

import pytest
import torch

import gptkernels  # noqa: F401
from helpers import (
    DTYPES,
    all_dtypes,
    all_widths,
    as_view,
    assert_as_exact_as_torch,
    assert_equal,
    check_call,
    low_dtypes,
    raises,
    randn,
    warmed_up_and_captured,
    with_dtypes,
)

ops = torch.ops.gptkernels

OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


class Lists:
    def __init__(self, params, state_dtype=None, masters=False):
        self.params = params
        self.exp_avgs = [torch.zeros_like(p, dtype=state_dtype) for p in params]
        self.exp_avg_sqs = [torch.zeros_like(p, dtype=state_dtype) for p in params]
        self.steps = [torch.zeros((), device=p.device) for p in params]
        self.masters = [p.float() for p in params] if masters else None

    def step(self, grads, lr=1e-2, **options):
        for step in self.steps:
            step += 1
        ops.adamw_(
            self.params,
            grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            lr=lr if isinstance(lr, torch.Tensor) else torch.tensor(lr, dtype=torch.float64),
            master_params=self.masters,
            **{**OPTIONS, **options},
        )

    def all(self):
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *(self.masters or [])]


def torch_steps(params, gradients, lr=1e-2, beta1=0.9, beta2=0.95, **options):
    leaves = [p.clone().requires_grad_() for p in params]
    options = {"eps": 1e-8, "weight_decay": 0.1, **options}
    optimizer = torch.optim.AdamW(leaves, lr=lr, betas=(beta1, beta2), foreach=False, fused=False, **options)
    for grads in gradients:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.to(leaf.dtype)
        optimizer.step()
    state = [optimizer.state[leaf] for leaf in leaves]
    return [*(t.detach() for t in leaves), *(s["exp_avg"] for s in state), *(s["exp_avg_sq"] for s in state)]


def make(shapes, dtype, device, steps=20, grad_dtype=None):
    params = [randn(*shape, dtype=dtype, device=device) for shape in shapes]
    gradients = [[randn(*s, dtype=grad_dtype or dtype, device=device) for s in shapes] for _ in range(steps)]
    return params, gradients


def run(params, gradients, state_dtype=None, masters=False, **options):
    lists = Lists([p.clone() for p in params], state_dtype, masters)
    for grads in gradients:
        lists.step(grads, **options)
    return lists


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


SHAPES = [(5, 7), (3,), (0,), (), (40, 33), (1,)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"beta1": 0.0},
        {"beta2": 0.999, "eps": 1e-4, "lr": 0.3},
        {"beta1": 0.0, "beta2": 0.0},
    ],
    ids=str,
)
def test_twenty_steps_match_torch_in_float64(options, device):
    params, gradients = make(SHAPES, torch.float64, device)
    assert_close(run(params, gradients, **options).all(), torch_steps(params, gradients, **options))


def check(params, gradients):
    eps = 1e-3 if params[0].dtype == torch.float16 else 1e-8  # torch rounds eps to float16, where 1e-8 would become 0
    found, plain = run(params, gradients, eps=eps).all(), torch_steps(params, gradients, eps=eps)
    exact = torch_steps([p.double() for p in params], [[g.double() for g in grads] for grads in gradients], eps=eps)
    for i, (a, b, c) in enumerate(zip(found, plain, exact, strict=True)):
        assert_as_exact_as_torch(a, b.to(a.dtype), c, f"params, exp_avgs, exp_avg_sqs: {i}")


@all_dtypes
@all_widths
def test_matches_float64(width, dtype, device):
    check(*make([(width,), (5, width)], dtype, device, steps=3))


@all_dtypes
def test_twenty_steps_are_as_exact_as_torch(dtype, device):
    check(*make(SHAPES, dtype, device))


@pytest.mark.parametrize("beta2", [0.999, 0.99999])
def test_first_step_has_the_size_of_lr(beta2, device):
    """If beta2 were rounded to float32, the first step would be wrong by up to 0.07 %."""
    lists = run([torch.zeros(9, device=device)], [[torch.full((9,), 1e-2, device=device)]], beta2=beta2, lr=1e-3)
    torch.testing.assert_close(lists.params[0], torch.full((9,), -1e-3, device=device), rtol=2e-6, atol=0)


# ---- dtypes, layouts, lists ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("float32", [[], ["state"], ["gradients"], ["gradients", "state"]], ids=str)
@all_dtypes
def test_float32_gradients_and_states(dtype, float32, device):
    choices = {"tensors": 2, "shape1.dims": 1, "shape1.0": 7, "shape0.0": 5, "shape0.1": 40, "step": 1}
    check_call("adamw_", dtype, device, choices | {f"{name} in float32": torch.float32 for name in float32})


@low_dtypes
def test_master_parameters_take_float32s_steps(dtype, device):
    params, gradients = make([(40, 33), (7,)], dtype, device)
    lists = run(params, gradients, state_dtype=torch.float32, masters=True)
    found = [*lists.masters, *lists.exp_avgs, *lists.exp_avg_sqs]
    torch.testing.assert_close(found, torch_steps([p.float() for p in params], gradients))
    assert_equal(lists.params, [master.to(dtype) for master in lists.masters])


@low_dtypes
@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=["own states", "float32 states"])
def test_changed_parameters_replace_their_masters(state_dtype, dtype, device):
    """The master is kept if it rounds to the parameter. Otherwise the step starts from the parameter."""
    (param,), gradients = make([(1003,)], dtype, device, steps=1)
    master = param.float() * (1 + 2**-13)  # rounds to the parameter
    assert torch.equal(master.to(dtype), param)
    changed = torch.arange(1003, device=device) % 3 == 0
    param = torch.where(changed, param * 2, param)
    param[:4] = torch.tensor([math.nan, math.inf, 0.0, -0.0])
    master[2:4] = torch.tensor([0.0, -1e-30])
    param[5], master[5] = (
        math.inf,
        3e38 if dtype == torch.bfloat16 else 1e30,
    )  # In float16 this master rounds to infinity, like its parameter, and is therefore kept.
    start = torch.where(master.to(dtype) == param, master, param.float())
    assert start[5] == (math.inf if dtype == torch.bfloat16 else 1e30)
    expected = Lists([start.to(dtype)], state_dtype, masters=True)
    expected.masters = [start.clone()]
    found = Lists([param.clone()], state_dtype, masters=True)
    found.masters = [master]
    for lists in (found, expected):
        lists.step(gradients[0])
    assert_equal(found.all(), expected.all(), equal_nan=True)
    still = Lists([param.clone()], state_dtype, masters=True)
    still.masters = [master.clone()]
    still.step([torch.zeros_like(param)], lr=0.0)
    assert torch.equal(still.params[0].nan_to_num(), param.nan_to_num())


def test_lists_of_mixed_dtypes(device):
    params = [randn(20 + i, dtype=DTYPES[i % 4], device=device) for i in range(9)]
    gradients = [[torch.randn_like(p) for p in params] for _ in range(3)]
    together = run(params, gradients)
    for i, param in enumerate(params):
        alone = run([param], [[grads[i]] for grads in gradients])
        assert torch.equal(together.params[i], alone.params[0])


@pytest.mark.parametrize("count", [1, 159, 160, 161, 400])
def test_more_tensors_than_a_launch_supports(count, device):
    params, gradients = make([(1 + i % 7,) for i in range(count)], torch.float64, device, steps=2)
    assert_close(run(params, gradients).params, torch_steps(params, gradients)[:count])


def test_gpt2_is_one_launch(device, on_cuda):
    params, (grads,) = make([(1 + i % 7,) for i in range(148)], torch.bfloat16, device, steps=1)
    lists = Lists(params, torch.float32, masters=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        lists.step(grads)
    kernels = [event.name for event in profile.events() if "adamw" in event.name]
    assert len(kernels) == 1, kernels


# A CUDA thread block updates 512 elements if the widest array is float64, 1024 if it is float32, otherwise 2048.
@pytest.mark.parametrize("size", [511, 512, 513, 1023, 1025, 2047, 2048, 2049, 32767, 32768, 32769, 100_003])
@all_dtypes
def test_sizes_around_those_of_thread_blocks(size, dtype, device):
    check(*make([(size,), (3,)], dtype, device, steps=2))


def test_every_tensor_has_its_own_step(device):
    params, gradients = make([(5,), (6,)], torch.float64, device, steps=3)
    lists = Lists([p.clone() for p in params])
    lists.steps[1] += 7
    for grads in gradients:
        lists.step(grads)
    expected = torch_steps(params, gradients)
    assert_close(lists.params[0], expected[0])
    assert not torch.allclose(lists.params[1], expected[1], rtol=1e-3)


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded"])
@all_dtypes
def test_gradients_in_any_layout(view, dtype, device):
    params, gradients = make([(6, 40)], dtype, device, steps=2)
    views = [[as_view(grad, view) for grad in grads] for grads in gradients]
    plain = [[grad.contiguous() for grad in grads] for grads in views]
    assert torch.equal(run(params, views).params[0], run(params, plain).params[0])


LAYOUTS = {
    "transposed": ((6, 40), lambda t: as_view(t, "transposed")),
    "channels_last": ((4, 3, 5, 7), lambda t: t.contiguous(memory_format=torch.channels_last)),
    "channels_last_3d": ((2, 3, 2, 5, 7), lambda t: t.contiguous(memory_format=torch.channels_last_3d)),
    "ones anywhere": ((5, 1, 6), lambda t: as_view(t, "transposed").as_strided((5, 1, 6), (1, 77, 5))),
}


@pytest.mark.parametrize("grads_in", ["the same layout", "rows", "a view with gaps"])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_in_any_dense_layout(layout, masters, grads_in, device):
    shape, change = LAYOUTS[layout]
    params, gradients = make([shape, (3,)], torch.bfloat16, device, steps=3)
    params[0] = change(params[0])
    plain = Lists([p.contiguous() for p in params], masters=masters)
    lists = Lists([p.clone() for p in params], masters=masters)
    assert lists.exp_avgs[0].stride(-1) == params[0].stride(-1) != plain.params[0].stride(-1)
    changes = {
        "the same layout": change,
        "rows": torch.Tensor.contiguous,
        "a view with gaps": lambda t: as_view(t, "sliced"),
    }
    for grads in gradients:
        grads[0] = changes[grads_in](grads[0])
        before = grads[0].clone()
        plain.step([g.contiguous() for g in grads])
        lists.step(grads)
        assert torch.equal(grads[0], before)
    assert_equal(lists.all(), plain.all())


@all_dtypes
def test_misaligned(dtype, device):
    params, gradients = make([(1000,)], dtype, device, steps=2)
    plain = run(params, gradients)
    lists = Lists([as_view(params[0], "misaligned")])
    lists.exp_avgs = [as_view(t, "misaligned") for t in lists.exp_avgs]
    for grads in gradients:
        lists.step([as_view(grads[0], "misaligned")])
    # On CUDA the compiler may contract multiplications and additions differently for single elements and for packs.
    rtol = 0 if device.type == "cpu" else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(lists.params[0], plain.params[0], rtol=rtol, atol=rtol)
    torch.testing.assert_close(lists.exp_avgs[0], plain.exp_avgs[0], rtol=rtol, atol=rtol)


def test_no_tensors_and_no_elements(device):
    Lists([]).step([])
    Lists([torch.zeros(0, 3, device=device)]).step([torch.zeros(0, 3, device=device)])


# ---- learning rate, gradient scaler, clipping ------------------------------------------------------------------------


@with_dtypes(torch.float64, torch.float32, torch.bfloat16)
def test_learning_rate_in_either_dtype_and_on_either_device(dtype, device):
    params, gradients = make([(5, 7)], dtype, device)
    wide = torch.tensor(0.1, dtype=torch.float64)
    for value, tensors in [
        (0.25, [torch.tensor(0.25), torch.tensor(0.25, device=device), torch.tensor([0.25])]),
        (0.1, [wide, wide.to(device)]),
    ]:
        expected = run(params, gradients, lr=value)
        for lr in tensors:
            assert_equal(run(params, gradients, lr=lr).params, expected.params)


CLIP = {"grad_norm": 3.0, "max_grad_norm": 2.0}


@pytest.mark.parametrize("options", [{}, CLIP, {**CLIP, "maximize": True}], ids=str)
def test_gradients_are_divided_by_grad_scale_before_they_are_clipped(options, device):
    params, gradients = make([(5, 7), (33,)], torch.float32, device)
    options = {name: torch.tensor(3.0, device=device) if name == "grad_norm" else o for name, o in options.items()}
    plain = run(params, gradients, **options)
    scaled = [[grad * 4096 for grad in grads] for grads in gradients]
    kept = [grad.clone() for grad in scaled[0]]
    lists = run(params, scaled, grad_scale=torch.tensor(4096.0, device=device), **options)
    assert_equal(lists.all(), plain.all())
    assert_equal(scaled[0], kept)


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, 1e30, float("inf"), float("nan")])
@with_dtypes(torch.float64, torch.float32)
def test_clipping_has_the_bits_of_torchs(norm, dtype, device):
    params, gradients = make([(5, 7), (3000,)], dtype, device, steps=3)
    norm = torch.tensor(norm, device=device)
    scale = (2.0 / (norm + 1e-6)).clamp(max=1.0)
    expected = run(params, [[grad * scale for grad in grads] for grads in gradients])
    kept = [grad.clone() for grad in gradients[0]]
    assert_equal(run(params, gradients, grad_norm=norm, max_grad_norm=2.0).all(), expected.all(), equal_nan=True)
    assert_equal(gradients[0], kept)


@pytest.mark.parametrize("masters", [False, True])
@low_dtypes
def test_clipped_gradients_are_not_rounded(masters, dtype, device):
    params, gradients = make([(40, 33), (7,)], dtype, device, steps=3)
    state = torch.float32 if masters else None
    norm = torch.tensor(3.0, device=device)
    scale = (2.0 / (norm + 1e-6)).clamp(max=1.0)
    clipped = [[grad.float() * scale for grad in grads] for grads in gradients]
    expected = run(params, clipped, state, masters)
    lists = run(params, gradients, state, masters, grad_norm=norm, max_grad_norm=2.0)
    for a, b in zip(lists.all(), expected.all(), strict=True):
        # On CUDA the compiler may contract multiplications and additions differently for float32 gradients.
        eps, atol = (0, 0) if device.type == "cpu" else (4 * torch.finfo(a.dtype).eps, 1e-5)
        torch.testing.assert_close(a, b, rtol=eps, atol=atol)


def test_found_inf_changes_nothing(device):
    params, gradients = make([(5, 7), (33,)], torch.float32, device, steps=3)
    lists = run(params, gradients)
    before = [t.clone() for t in lists.all()]
    gradients[0][0][2, 3] = torch.inf
    lists.step(gradients[0], found_inf=torch.tensor(1.0, device=device))
    assert_equal(lists.all(), before)
    lists.step(gradients[1], found_inf=torch.tensor(0.0, device=device))
    assert not torch.equal(lists.params[0], before[0])


@all_dtypes
def test_without_beta1_the_average_is_the_gradient(dtype, device):
    params, gradients = make([(127,)], dtype, device, steps=2)
    gradients[0][0] *= 1000
    lists = run(params, gradients, beta1=0.0)
    assert torch.equal(lists.exp_avgs[0], gradients[1][0])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@all_dtypes
def test_infinity_and_nan_stay_in_their_place(value, dtype, device):
    params, gradients = make([(100,)], dtype, device, steps=1)
    clean = run(params, gradients).params[0]
    gradients[0][0][40] = value
    param = run(params, gradients).params[0]
    assert param[40].isnan()
    keep = torch.arange(100) != 40
    assert torch.equal(param[keep], clean[keep])


def test_denormal_and_large_gradients(device):
    for scale in (torch.finfo(torch.float32).smallest_normal / 4, 1e15):
        params, gradients = make([(127,)], torch.float32, device, steps=2)
        gradients = [[grad * scale for grad in grads] for grads in gradients]
        torch.testing.assert_close(run(params, gradients).all(), torch_steps(params, gradients))


# ---- autograd and CUDA graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masters", [False, True])
def test_versions_of_written_tensors(masters, device):
    params, (grads,) = make([(5, 7), (3,)], torch.bfloat16, device, steps=1)
    lists = Lists([p.requires_grad_() for p in params], torch.float32, masters)
    written = lists.all()
    before = [t._version for t in written], [t._version for t in grads]
    with torch.no_grad():
        lists.step(grads)
    assert [t._version for t in written] == [v + 1 for v in before[0]]
    assert [t._version for t in grads] == before[1]


def test_backward_detects_a_step_of_a_saved_parameter(device):
    param = torch.ones(3, device=device, requires_grad=True)
    loss = (param * param).sum()
    with torch.no_grad():
        Lists([param]).step([torch.ones(3, device=device)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_step_needs_no_grad(device):
    param = torch.ones(3, device=device, requires_grad=True)
    with raises("adamw_ has no derivative", "no_grad"):
        Lists([param]).step([torch.ones(3, device=device)])
    assert torch.equal(param, torch.ones(3, device=device))
    with torch.inference_mode():
        Lists([torch.ones(3, device=device)]).step([torch.ones(3, device=device)])


def test_cuda_graph_replays_with_another_lr_and_norm(device, on_cuda):
    params, gradients = make([(5, 7), (3000,)], torch.float32, device, steps=1)
    lists = Lists([p.clone() for p in params])
    lr, norm = torch.tensor(0.0, device=device), torch.tensor(1.0, device=device)
    options = {"lr": lr, "grad_norm": norm, "max_grad_norm": 1.0}
    graph, _ = warmed_up_and_captured(lambda: lists.step(gradients[0], **options))
    expected = Lists([p.clone() for p in params])
    expected.step(gradients[0], **options)
    for value in (0.5, 0.25):
        lr.fill_(value)
        norm.fill_(8 * value)
        graph.replay()
        expected.step(gradients[0], lr=value, grad_norm=norm, max_grad_norm=1.0)
    assert_equal(lists.all(), expected.all())


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_lists(device):
    def refused(*fragments, index=0, name=None, value=None, masters=False, dtype=torch.bfloat16):
        """``value(element)`` replaces element ``index`` of the list ``name``; without ``value``, the element is
        removed.
        """
        params, (grads,) = make([(5, 8), (3, 4)], dtype, device, steps=1)
        lists = Lists(params, masters=masters)
        lists.grads = grads
        if name:
            found = getattr(lists, name)
            found[index : index + 1] = [] if value is None else [value(found[index])]
        with raises("adamw_", *fragments):
            lists.step(lists.grads)

    for name in ("grads", "exp_avgs", "exp_avg_sqs", "steps"):
        refused(f"{name} must have as many tensors as params", r"\(2\), got 1", name=name)
    refused("master_params must have as many tensors as params", name="masters", masters=True)
    refused("master_params belong to bfloat16 and float16", "float32", masters=True, dtype=torch.float32)
    for argument in ("exp_avgs", "exp_avg_sqs", "master_params"):
        name, masters = argument.replace("master_params", "masters"), argument == "master_params"
        message = rf"{argument}\[0\] must have the strides of params\[0\]", r"strides \(1, \d+\)"
        refused(*message, name=name, value=lambda t: as_view(t, "transposed"), masters=masters)
    gaps = r"params\[1\].*must fill its memory without gaps"
    for name, value, *fragments in [
        ("params", torch.Tensor.long, r"params\[1\] must be float64", "int64"),
        ("params", lambda t: t[:, ::2], gaps, r"\(3, 2\) with strides \(4, 2\)"),
        ("params", lambda t: as_view(t, "expanded"), gaps, r"\(3, 4\) with strides \(0, 1\)"),
        ("exp_avgs", torch.Tensor.t, r"exp_avgs\[1\] must have shape \(3, 4\)", r"\(4, 3\)"),
        ("grads", lambda t: t[:2], r"grads\[1\] must have shape \(3, 4\)", r"\(2, 4\)"),
        ("grads", torch.Tensor.double, r"grads\[1\] must be bfloat16 as params\[1\] or float32", "float64"),
        ("exp_avgs", torch.Tensor.half, r"exp_avgs\[1\] must be bfloat16", "float16"),
        ("exp_avg_sqs", torch.Tensor.float, r"exp_avg_sqs\[1\] must have the dtype of exp_avgs\[1\] \(bfloat16\)"),
        ("steps", torch.Tensor.long, r"steps\[1\] must be one float32 on", "int64"),
        ("steps", lambda t: t.repeat(2), r"steps\[1\] must be one float32 on", r"shape \(2\)"),
        ("masters", torch.Tensor.double, r"master_params\[1\] must be float32", "float64"),
    ]:
        refused(*fragments, index=1, name=name, value=value, masters=name == "masters")


def test_bad_options(device):
    def refused(*fragments, **options):
        with raises("adamw_", *fragments):
            Lists([torch.ones(3, device=device)]).step([torch.ones(3, device=device)], **options)

    one, wide = torch.ones((), device=device), torch.ones((), dtype=torch.float64, device=device)
    for name in ("beta1", "beta2"):
        for value in (1.0, -0.1):
            refused(rf"{name} must be in \[0, 1\)", f"got {value:g}", **{name: value})
    refused("eps must be at least 0", eps=-1.0)
    refused("lr must have one element", r"\(2\)", lr=torch.ones(2))
    refused("lr must be float32", "int64", lr=torch.tensor(1))
    refused("grad_scale must be float32", "float64", grad_scale=wide)
    refused("found_inf must have one element", r"\(2\)", found_inf=torch.zeros(2, device=device))
    refused("grad_norm must be float32", "float64", grad_norm=wide, max_grad_norm=1.0)
    refused("max_grad_norm must be at least 0", "got -1", grad_norm=one, max_grad_norm=-1.0)
    refused("grad_norm and max_grad_norm clip together, got only grad_norm", grad_norm=one)
    refused("grad_norm and max_grad_norm clip together, got only max_grad_norm", max_grad_norm=1.0)


def test_tensors_on_different_devices(device, on_cuda):
    x = torch.ones(3, device=device)
    with raises("adamw_", r"grads\[0\] is on cpu", r"params\[0\] is on cuda"):
        Lists([x]).step([x.cpu()])
    with raises("adamw_", r"params\[1\] is on cpu", r"params\[0\] is on cuda"):
        Lists([x, x.cpu()]).step([x, x.cpu()])
    with raises("adamw_", "grad_scale is on cpu"):
        Lists([x]).step([x], grad_scale=torch.tensor(1.0))


@pytest.mark.large
def test_more_than_2_31_elements(device):
    size = 2**31 + 5
    lists = Lists([torch.zeros(size, dtype=torch.bfloat16, device=device)])
    grad = torch.ones(size, dtype=torch.bfloat16, device=device)
    grad[-3:] = -1
    lists.step([grad], lr=0.5)
    assert (lists.params[0][:-3] == -0.5).all()
    assert (lists.params[0][-3:] == 0.5).all()
