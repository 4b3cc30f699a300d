"""Tests that AdamW and clip_grad_norm_ match torch's in updates, states, options, and use with GradScaler."""

import contextlib
import copy
import io
import math
import pickle

import pytest
import torch
from torch._dynamo.utils import counters

from gptkernels.optim import AdamW, clip_grad_norm_
from helpers import CountCalls, all_dtypes, assert_raises, randn, tolerance

SHAPES = [(5, 7), (3,), (), (0, 4), (2, 3, 4), (1000,)]


def make_parameters(dtype=torch.float64, device="cpu", seed=7):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(randn(*shape, dtype=dtype, device=device)) for shape in SHAPES]


def set_gradients(params, seed, scale=1.0):
    torch.manual_seed(seed)
    for p in params:
        p.grad = randn(*p.shape, dtype=p.dtype, device=p.device, scale=scale)


def train(optimizer, steps, first=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i in range(first, first + steps):
        set_gradients(params, i)
        optimizer.step()


def assert_same(ours, torchs, **options):
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **options)


def make_pair(dtype=torch.float64, device="cpu", **options):
    ours, torchs = make_parameters(dtype, device), make_parameters(dtype, device)
    return AdamW(ours, **options), torch.optim.AdamW(torchs, **options), ours, torchs


OPTIONS = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3},
    {"weight_decay": 0.0},
    {"maximize": True},
    {"foreach": True},
    {"fused": True},
    {"capturable": False, "foreach": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_twenty_steps_match_torch(options, dtype, device):
    ours, torchs, our_params, torch_params = make_pair(dtype, device, **options)
    for optimizer in (ours, torchs):
        train(optimizer, 20)
    assert_same(our_params, torch_params)
    for a, b in zip(our_params, torch_params, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[a][name].cpu(), torchs.state[b][name].cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_matches_torchs_fused_kernel(dtype, device):
    """Our kernel and torch's fused kernel compute in float32. torch's other code rounds intermediates to 16 bits."""
    ours, torchs, our_params, torch_params = make_pair(dtype, device, lr=0.1, fused=True)
    for optimizer in (ours, torchs):
        train(optimizer, 20)
    assert_same(our_params, torch_params, **tolerance(dtype))
    assert all(state["exp_avg"].dtype == dtype for state in ours.state.values())


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_have_float32s_updates(dtype, max_grad_norm, device):
    """The updates are so small that most of them would not change a 16-bit parameter without a master copy."""
    ours = make_parameters(dtype, device)
    wide = [torch.nn.Parameter(p.detach().float()) for p in ours]
    optimizer = AdamW(ours, lr=1e-5, master_weights=True, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(wide, lr=1e-5)
    for i in range(20):
        set_gradients(ours, i)
        for p, w in zip(ours, wide, strict=True):
            w.grad = p.grad.float()
        optimizer.step()
        if max_grad_norm is not None:
            torch.testing.assert_close(optimizer.grad_norm, torch.nn.utils.clip_grad_norm_(wide, max_grad_norm))
        reference.step()
    for p, w in zip(ours, wide, strict=True):
        state = optimizer.state[p]
        torch.testing.assert_close(state["master_param"], w.detach())
        if max_grad_norm is None:
            torch.testing.assert_close(state["exp_avg"], reference.state[w]["exp_avg"])
        assert torch.equal(p, state["master_param"].to(dtype))


@pytest.mark.parametrize("change", ["load_state_dict", "another optimizer", "data", "one element"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_follow_changed_parameters(dtype, change, device):
    ours = torch.nn.ParameterList(make_parameters(dtype, device))
    best = copy.deepcopy(ours.state_dict())
    optimizer = AdamW(ours, lr=0.1, master_weights=True)
    train(optimizer, 3)
    masters = [optimizer.state[p]["master_param"].clone() for p in ours]
    if change == "load_state_dict":
        ours.load_state_dict(best)
    elif change == "another optimizer":
        train(torch.optim.AdamW(ours, lr=0.1), 2)
    elif change == "data":
        for p in ours:
            p.data.mul_(3)
    else:
        with torch.no_grad():
            ours[0][0, 0] = 5.0
    start = [torch.where(m.to(dtype) == p, m, p.detach().float()) for m, p in zip(masters, ours, strict=True)]
    assert sum((s != m).sum() for s, m in zip(start, masters, strict=True)) == 1 or change != "one element"
    changed = copy.deepcopy(ours)
    optimizer.param_groups[0].update(lr=0.0)
    train(optimizer, 1)
    assert_same(ours, changed, rtol=0, atol=0)
    assert_same([optimizer.state[p]["master_param"] for p in ours], start, rtol=0, atol=0)


def test_float32_parameters_have_no_master_weights(device):
    optimizer = AdamW(make_parameters(torch.float32, device), master_weights=True)
    train(optimizer, 1)
    assert all("master_param" not in state for state in optimizer.state.values())


def test_parameter_groups_match_torch(device):
    ours, torchs = make_parameters(device=device), make_parameters(device=device)
    for cls, p in ((AdamW, ours), (torch.optim.AdamW, torchs)):
        optimizer = cls([{"params": p[:2], "weight_decay": 0.5}, {"params": p[2:4], "lr": 0.1}], lr=0.01)
        optimizer.add_param_group({"params": p[4:], "betas": (0.5, 0.6)})
        train(optimizer, 5)
    assert_same(ours, torchs)


def test_parameters_without_a_gradient_are_left(device):
    ours, torchs, our_params, torch_params = make_pair(device=device)
    for optimizer, params in ((ours, our_params), (torchs, torch_params)):
        set_gradients(params, 0)
        params[1].grad = None
        optimizer.step()
        train(optimizer, 3)
    assert_same(our_params, torch_params)
    ours.zero_grad()
    ours.step()  # no parameter has a gradient in this step


def test_one_launch_per_group_and_dtype(device):
    first, second = make_parameters(torch.float32, device), make_parameters(torch.bfloat16, device)
    optimizer = AdamW([{"params": first[:3] + second[:3]}, {"params": first[3:]}])
    train(optimizer, 1)
    set_gradients(first + second, 1)
    with CountCalls() as calls:
        optimizer.step()
    assert calls.count["gptkernels::adamw_"] == 3
    others = {name for name in calls.count if not name.startswith(("gptkernels::", "profiler::"))}
    counting_steps = {"aten::_foreach_add_.Scalar", "aten::_foreach_add_.Tensor", "aten::ones"}
    assert others <= counting_steps | {"aten::lift_fresh", "aten::detach"}  # torch.tensor calls the last two ops


@pytest.mark.parametrize("how", ["set_default_device", "with torch.device"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"master_weights": True}], ids=str)
def test_the_default_device_is_ignored(options, how, device):
    dtype = torch.bfloat16 if "master_weights" in options else torch.float64
    ours, wanted = make_parameters(dtype, device), make_parameters(dtype, device)
    train(AdamW(wanted, lr=0.1, **options), 3)
    optimizer = AdamW(ours, lr=0.1, **options)
    for i in range(3):
        set_gradients(ours, i)
        try:
            if how == "set_default_device":
                torch.set_default_device("meta")
            with torch.device("meta") if how == "with torch.device" else contextlib.nullcontext():
                optimizer.step()
        finally:
            torch.set_default_device(None)
    assert_same(ours, wanted, rtol=0, atol=0)
    with torch.device("meta"):
        assert clip_grad_norm_(ours, 1.0).device == ours[0].device
        assert clip_grad_norm_([], 1.0) == 0


def make_layouts(device, dtype=torch.float64):
    torch.manual_seed(7)
    return [
        torch.nn.Parameter(randn(4, 3, 5, 5, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)),
        torch.nn.Parameter(randn(6, 9, dtype=dtype, device=device).t()),
        torch.nn.Parameter(randn(5, 6, dtype=dtype, device=device).t()[:, None]),
    ]


@pytest.mark.parametrize("grads", ["the parameter's layout", "rows", "expanded"])
def test_dense_layouts_match_torch(grads, device):
    ours, torchs = make_layouts(device), make_layouts(device)
    optimizers = AdamW(ours, lr=0.1, max_grad_norm=1e6), torch.optim.AdamW(torchs, lr=0.1)
    for i in range(4):
        for params, optimizer in zip((ours, torchs), optimizers, strict=True):
            torch.manual_seed(i)
            for p in params:
                p.grad = randn(*p.shape, dtype=p.dtype, device=device)
                if grads == "expanded":
                    p.grad = p.grad[:1].expand_as(p)
                elif grads != "rows":
                    p.grad = torch.empty_like(p).copy_(p.grad)
            optimizer.step()
    assert_same(ours, torchs)
    assert all(optimizers[0].state[p]["exp_avg"].stride() == p.stride() for p in ours)


@pytest.mark.parametrize("masters", [False, True])
def test_a_loaded_state_takes_the_parameters_layout(masters, device):
    dtype = torch.bfloat16 if masters else torch.float64
    rows = [torch.nn.Parameter(p.detach().contiguous()) for p in make_layouts(device, dtype)]
    first = AdamW(rows, lr=0.1, master_weights=masters)
    train(first, 2)
    params = [
        torch.nn.Parameter(torch.empty_like(p).copy_(row.detach()))
        for p, row in zip(make_layouts(device, dtype), rows, strict=True)
    ]
    assert params[0].stride() != rows[0].stride()
    second = AdamW(params)
    second.load_state_dict(save_and_load(first))
    train(first, 2, first=2)
    train(second, 2, first=2)
    assert_same(params, rows, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_can_be_a_tensor(shape, where, device):
    params, reference = make_parameters(device=device), make_parameters(device=device)
    lr = torch.full(shape, 0.25, device=device if where == "device" else "cpu")
    ours, torchs = AdamW(params, lr=lr), torch.optim.AdamW(reference)
    for rate in (0.25, 0.5):
        lr.fill_(rate)
        torchs.param_groups[0]["lr"] = rate
        for optimizer in (ours, torchs):
            train(optimizer, 2)
    assert_same(params, reference)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers(as_tensor, device):
    def schedule(cls, lr, params):
        optimizer = cls(params, lr=lr)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [4])
        for i in range(12):
            set_gradients(params, i)
            optimizer.step()
            scheduler.step()
        return scheduler.get_last_lr()

    ours, torchs = make_parameters(device=device), make_parameters(device=device)
    lr = torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1
    assert schedule(AdamW, lr, ours) == pytest.approx(schedule(torch.optim.AdamW, 0.1, torchs))
    assert_same(ours, torchs)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch's dynamo does not trace a bound method that sets attributes"
)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"master_weights": True}], ids=str)
def test_compiled_steps_with_a_scheduler(options, device):
    """Compiled steps have the bits of eager steps. One graph makes the state, and another runs all later steps."""
    torch._dynamo.reset()
    counters.clear()
    dtype = torch.bfloat16 if "master_weights" in options else torch.float64
    ends = []
    for compiled in (True, False):
        params = make_parameters(dtype, device)
        optimizer = AdamW(params, lr=0.1, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for i in range(12):
            set_gradients(params, i)
            step()
            scheduler.step()
        ends.append(params)
    assert_same(*ends, rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 2


def save_and_load(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("direction", ["from torch", "to torch", "to ours"])
def test_state_dicts_are_exchanged(direction, fused, device):
    before = torch.optim.AdamW if direction == "from torch" else AdamW
    after = torch.optim.AdamW if direction == "to torch" else AdamW
    params, reference = make_parameters(device=device), make_parameters(device=device)
    first = before(params, lr=0.1, weight_decay=0.2, fused=fused)
    train(first, 5)
    second = after(params)
    second.load_state_dict(save_and_load(first))
    assert second.param_groups[0]["lr"] == 0.1
    train(second, 5, first=5)
    whole = torch.optim.AdamW(reference, lr=0.1, weight_decay=0.2)
    train(whole, 10)
    assert_same(params, reference)
    found, expected = second.state_dict(), whole.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    assert found["state"][0].keys() == expected["state"][0].keys()
    if direction == "to ours":
        ours_alone = found["param_groups"][0].keys() - expected["param_groups"][0].keys()
        assert ours_alone == {"master_weights", "rounding_seed"}


def test_master_weights_are_saved_exactly(device):
    params, reference = (make_parameters(torch.bfloat16, device) for _ in range(2))
    whole = AdamW(reference, lr=1e-4, master_weights=True)
    train(whole, 6)
    first = AdamW(params, lr=1e-4, master_weights=True)
    train(first, 3)
    second = AdamW(params)
    second.load_state_dict(save_and_load(first))
    train(second, 3, first=3)
    assert_same(params, reference, rtol=0, atol=0)
    found, expected = ([optimizer.state[p] for p in ps] for optimizer, ps in ((second, params), (whole, reference)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_run_of_torchs_optimizer_can_continue_with_master_weights(device):
    params = make_parameters(torch.bfloat16, device)
    torchs = torch.optim.AdamW(params)
    train(torchs, 2)
    ours = AdamW(params, master_weights=True)
    ours.load_state_dict(torchs.state_dict())
    train(ours, 2, first=2)
    state = ours.state[params[0]]
    assert state["step"] == 4
    assert all(state[name].dtype == torch.float32 for name in ("master_param", "exp_avg", "exp_avg_sq"))


def test_a_closure_is_called_with_gradients(device):
    params = make_parameters(device=device)
    optimizer = AdamW(params)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first.requires_grad
    assert optimizer.step(closure) < first


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled first"])
def test_grad_scaler(unscale, device):
    def scaled(cls, fused):
        params = make_parameters(torch.float32, device)
        optimizer = cls(params, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=2)
        for i in range(8):
            optimizer.zero_grad()
            weights = [randn(*p.shape, dtype=p.dtype, device=device) for p in params]
            loss = sum((p * w).sum() for p, w in zip(params, weights, strict=True))
            scaler.scale(loss).backward()
            if i in (0, 3):
                params[0].grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return params, [optimizer.state[p]["step"].item() for p in params], scaler.get_scale()

    torch.manual_seed(1)
    params, steps, scale = scaled(AdamW, None)
    torch.manual_seed(1)
    expected, expected_steps, expected_scale = scaled(torch.optim.AdamW, True)
    assert_same(params, expected)
    assert steps == expected_steps == [6.0] * len(params)
    assert scale == expected_scale


def test_the_scaler_leaves_gradients_scaled(device):
    params = make_parameters(torch.float32, device)
    optimizer = AdamW(params)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
    scaler.scale(params[0].sum()).backward()
    scaler.step(optimizer)
    assert params[0].grad.eq(64).all()


@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_unsupported_options_and_their_states_are_refused(name):
    message = f"{name}=True is not supported"
    ours, torchs, params, torch_params = make_pair()
    assert_raises(ValueError, message, AdamW, params, **{name: True})
    assert_raises(ValueError, message, AdamW, [{"params": params, name: True}])
    train(ours, 2)
    before = copy.deepcopy(ours.state_dict())
    state = torch.optim.AdamW(torch_params, **{name: True}).state_dict()
    assert_raises(ValueError, message, ours.load_state_dict, state)
    after = ours.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    train(ours, 2, first=2)
    train(torchs, 4)
    assert_same(params, torch_params)


def test_bad_options_are_refused():
    params = make_parameters()
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -1.0}):
        assert_raises(ValueError, "Invalid", AdamW, params, **options)
    assert_raises(ValueError, "betas must be floats", AdamW, params, betas=(torch.tensor(0.9), torch.tensor(0.9)))
    assert_raises(ValueError, "1-element", AdamW, params, lr=torch.ones(2))
    assert_raises(ValueError, "Invalid max_grad_norm: -1", AdamW, params, max_grad_norm=-1)


def test_sparse_gradients_are_refused():
    weight = torch.nn.Parameter(torch.randn(4, 3))
    torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    assert_raises(RuntimeError, "sparse gradients are not supported", AdamW([weight]).step)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@all_dtypes
def test_clip_grad_norm_matches_torch(max_norm, dtype, device):
    ours, torchs = make_parameters(dtype, device), make_parameters(dtype, device)
    for params in (ours, torchs):
        set_gradients(params, 0)
        params[1].grad = None
    total = clip_grad_norm_(iter(ours), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(torchs, max_norm)
    assert total.dim() == 0
    options = tolerance(torch.float32 if dtype == torch.float64 else dtype)  # norms are float32
    torch.testing.assert_close(total.double(), expected.double(), **options)
    found, wanted = ([p.grad for p in params if p.grad is not None] for params in (ours, torchs))
    assert_same(found, wanted, **options)


def test_clip_grad_norm_of_mixed_dtypes_is_the_norm_of_all(device):
    params = make_parameters(torch.float32, device) + make_parameters(torch.bfloat16, device)
    set_gradients(params, 0)
    expected = torch.cat([p.grad.double().flatten() for p in params]).norm()
    torch.testing.assert_close(clip_grad_norm_(params, 1.0).double(), expected, rtol=1e-5, atol=0)
    clipped = torch.cat([p.grad.double().flatten() for p in params]).norm()
    torch.testing.assert_close(clipped, torch.ones_like(clipped), rtol=1e-2, atol=0)


def test_clip_grad_norm_of_no_gradients_or_infinities(device):
    p = torch.nn.Parameter(torch.zeros(3, device=device))
    assert clip_grad_norm_(p, 1.0) == 0
    assert clip_grad_norm_([], 1.0) == 0
    p.grad = torch.tensor([1.0, float("inf"), 2.0], device=device)
    assert_raises(RuntimeError, "norm is inf", clip_grad_norm_, [p], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(p, 1.0).isinf()
    assert_raises(ValueError, "norm_type must be 2, got 1", clip_grad_norm_, p, 1.0, 1.0)


@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_clipping_in_the_step(max_norm, dtype, device):
    ours, apart = make_parameters(dtype, device), make_parameters(dtype, device)
    optimizers = [
        AdamW([{"params": p[:3]}, {"params": p[3:], "lr": 0.1}], max_grad_norm=clip)
        for p, clip in ((ours, max_norm), (apart, None))
    ]
    for i in range(5):
        for params in (ours, apart):
            set_gradients(params, i, scale=1 + i)
        before = [p.grad.clone() for p in ours]
        optimizers[0].step()
        norm = clip_grad_norm_(apart, max_norm)
        optimizers[1].step()
        assert torch.equal(optimizers[0].grad_norm, norm)
        assert optimizers[1].grad_norm is None
        assert_same([p.grad for p in ours], before, rtol=0, atol=0)
    assert_same(ours, apart, rtol=0, atol=0)


def test_clipping_inside_the_scaler(device):

    def train_scaled(inside):
        params = make_parameters(torch.float32, device)
        optimizer = AdamW(params, lr=0.1, max_grad_norm=0.5 if inside else None)
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
        norms = []
        for i in range(4):
            optimizer.zero_grad()
            scaler.scale(sum(p.square().sum() for p in params)).backward()
            if i == 1:
                params[0].grad[0, 0] = float("inf")
            if not inside:
                scaler.unscale_(optimizer)
                norms.append(clip_grad_norm_(params, 0.5).item())
            scaler.step(optimizer)
            scaler.update()
            if inside:
                norms.append(optimizer.grad_norm.item())
        return params, norms

    (ours, norms), (apart, expected) = train_scaled(True), train_scaled(False)
    assert norms == pytest.approx(expected)
    assert norms[1] == math.inf
    assert_same(ours, apart)


def test_max_grad_norm_is_copied_and_can_be_set(device):
    params = make_parameters(device=device)
    optimizer = AdamW(params, max_grad_norm=0.5)
    assert optimizer.grad_norm is None
    train(optimizer, 1)
    assert copy.deepcopy(optimizer).max_grad_norm == 0.5
    assert pickle.loads(pickle.dumps(optimizer)).max_grad_norm == 0.5
    optimizer.max_grad_norm = None
    train(optimizer, 1)
    assert optimizer.grad_norm is None


def test_steps_do_not_synchronise(device):
    if device.type == "cpu":
        pytest.skip("the CPU is the host")
    params = make_parameters(torch.float32, device)
    optimizer = AdamW(params, lr=0.1)
    train(optimizer, 1)
    optimizer.found_inf = torch.zeros(1, device=device)
    train(optimizer, 1)  # moves the numbers of steps to the device
    set_gradients(params, 1)
    try:
        torch.cuda.set_sync_debug_mode("error")
        clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.max_grad_norm = 1.0
        optimizer.step()
        optimizer.found_inf = None
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
