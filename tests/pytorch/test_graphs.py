"""Tests that a training step replayed by `gptkernels.graphed_step` has the bits of an eager step."""

import copy
import logging
from functools import partial

import pytest
import torch

import gptkernels
from gptkernels.models import GPT2, GPT2Config
from gptkernels.optim import AdamW
from helpers import assert_raises

CONFIG = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 500, "block_size": 64}
STEPS = 6  # on every device, the first two steps are eager


@pytest.fixture(autouse=True)
def _reports(caplog):
    caplog.set_level(logging.INFO, logger="gptkernels.graphs")


def make_training(device, dtype=torch.bfloat16, dropout=0.0, **options):
    torch.manual_seed(7)
    model = GPT2(GPT2Config(**CONFIG), device=device, dtype=dtype)
    for block in model.transformer.h:
        block.attn.dropout = dropout
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    options = {"lr": 1e-2, "master_weights": True, "max_grad_norm": 1.0, **options}
    return model, AdamW(groups, **options)


def make_loss(model, autocast=False):
    def loss(tokens, targets):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            return model(tokens, targets, return_logits=False)[1]

    return loss


def make_batches(count, batch=3, length=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(500, (count, batch, length + 1), generator=generator)
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def plain_step(model, optimizer, loss, *micro):
    device = next(model.parameters()).device
    total = 0
    for batch in micro:
        value = loss(*(t.to(device) for t in batch))
        value = value / len(micro) if len(micro) > 1 else value
        value.backward()
        total = total + value.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(total), float(optimizer.grad_norm)


def assert_same(a, b):
    (model_a, optimizer_a), (model_b, optimizer_b) = a, b
    for (name, p), q in zip(model_a.named_parameters(), model_b.parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in optimizer_a.state[p].items():
            assert torch.equal(value, optimizer_b.state[q][key]), f"{name}: {key}"


def run_both(device, steps, change=lambda i, model, optimizer: None, autocast=False, **options):
    """Assert that plain and graphed steps on the same batches have the same bits. Return the graphed step and the
    losses.

    ``steps`` has the micro-batches of each step. ``change`` is called before each step. ``options`` go to
    ``make_training``.
    """
    plain, graphed = make_training(device, **options), make_training(device, **options)
    loss, losses = make_loss(plain[0], autocast), []
    step = gptkernels.graphed_step(make_loss(graphed[0], autocast), graphed[1])
    torch.manual_seed(3)
    numbers = []
    for i, micro in enumerate(steps):
        change(i, *plain)
        numbers.append(plain_step(*plain, loss, *micro))
    torch.manual_seed(3)
    for i, micro in enumerate(steps):
        change(i, *graphed)
        result = step(*micro)
        assert all(p.grad is None for p in graphed[0].parameters())
        assert result.read() == pytest.approx(numbers[i], rel=0, abs=0)
        assert (result.loss.item(), result.grad_norm.item()) == numbers[i]
        assert graphed[1].grad_norm.item() == numbers[i][1]
        losses.append(result.read().loss)
    assert_same(plain, graphed)
    return step, losses


def expect_captures(step, device, count):
    reason = None if device.type == "cuda" else "the parameters are on the CPU"
    assert (step.eager_because, step.captures) == (reason, count if device.type == "cuda" else 0)


@pytest.mark.parametrize(
    "case",
    [
        {"accumulation": 1},
        {"accumulation": 2},
        {"accumulation": 3},
        {"autocast": True, "dtype": torch.float32},  # Each replay must cast the updated parameters again.
        {"batches": 1, "dropout": 0.3, "lr": 0.0},  # The losses of the steps differ only by their dropout masks.
    ],
    ids=str,
)
def test_has_the_bits_of_the_eager_step(device, case):
    options = dict(case)
    accumulation, batches = options.pop("accumulation", 1), options.pop("batches", None)
    data = make_batches(batches or STEPS * accumulation) * (STEPS if batches else 1)
    step, losses = run_both(device, [data[i::STEPS] for i in range(STEPS)], **options)
    expect_captures(step, device, 1)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("where", ["float", "cpu", "device"])
def test_learning_rates_change(device, where):
    def change(i, model, optimizer):
        for k, group in enumerate(optimizer.param_groups):
            rate = 0.003 * (i + 1) / (k + 1)
            group["lr"] = rate if where == "float" else torch.tensor(rate, device=device if where == "device" else None)

    step, _ = run_both(device, [[batch] for batch in make_batches(STEPS)], change)
    expect_captures(step, device, 1)


def test_a_replay_waits_for_its_capture(device, monkeypatch):
    """The first replay waits for work that was launched on the capture's stream, which the test delays."""
    if device.type == "cpu":
        pytest.skip("graphs are CUDA's")
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph, *args, **kwargs):
        torch.cuda._sleep(100_000_000)  # unit: clock cycles
        return begin(graph, *args, **kwargs)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    (batch,) = make_batches(1)
    step, _ = run_both(device, [[batch]] * STEPS, dropout=0.3, lr=0.0)
    expect_captures(step, device, 1)


def test_a_change_of_shape_captures_again(device):
    long, short = make_batches(8), make_batches(8, batch=2, length=32, seed=2)
    one = [[b] for pair in zip(long[:4], short[:4], strict=True) for b in pair]
    both = [[long[4 + i], long[5 + i], short[i]] for i in range(3)]
    step, _ = run_both(device, [*one, *both])
    expect_captures(step, device, 3)


def test_autocasts_cache_does_not_outlive_an_update(device):
    """Autocast caches casts of parameters. Steps inside one autocast context must use the updated parameters."""
    plain, graphed = make_training(device, dtype=torch.float32), make_training(device, dtype=torch.float32)
    step = gptkernels.graphed_step(lambda *batch: graphed[0](*batch, return_logits=False)[1], graphed[1])
    inside = make_loss(plain[0], autocast=True)
    numbers = [plain_step(*plain, inside, batch) for batch in make_batches(STEPS)]
    with torch.autocast(device.type, torch.bfloat16):
        found = [step(batch).read() for batch in make_batches(STEPS)]
    assert [tuple(n) for n in found] == numbers
    assert_same(plain, graphed)


@pytest.mark.parametrize("what", ["weight_decay", "max_grad_norm", "requires_grad", "state"])
def test_changed_options_and_loaded_states_capture_again(device, what):
    saved = {}

    def change(i, model, optimizer):
        if i == 3 and what == "state":
            saved[model] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if i != 4:
            return
        if what == "weight_decay":
            optimizer.param_groups[0]["weight_decay"] = 0.5
        elif what == "max_grad_norm":
            optimizer.max_grad_norm = 0.01
        elif what == "requires_grad":
            model.transformer.ln_f.bias.requires_grad_(False)
        else:
            model.load_state_dict(saved[model][0])
            optimizer.load_state_dict(saved[model][1])

    step, _ = run_both(device, [[batch] for batch in make_batches(8)], change)
    expect_captures(step, device, 2)


def test_a_resumed_run_has_the_same_bits(device):
    data = make_batches(8)
    model, optimizer = make_training(device)
    step = gptkernels.graphed_step(make_loss(model), optimizer)
    for batch in data[:4]:
        step(batch)
    model_2, optimizer_2 = make_training(device)
    model_2.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer_2.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_2 = gptkernels.graphed_step(make_loss(model_2), optimizer_2)
    for batch in data[4:]:
        assert step(batch).read() == step_2(batch).read()
    assert_same((model, optimizer), (model_2, optimizer_2))


def test_batch_memory_may_be_reused(device):
    plain, graphed = make_training(device), make_training(device)
    step = gptkernels.graphed_step(make_loss(graphed[0]), graphed[1])
    data = make_batches(2 * STEPS)
    buffer = [t.clone() for t in data[0]]
    for i, batch in enumerate(data):
        numbers = plain_step(*plain, make_loss(plain[0]), batch)
        if i % 3 == 0:
            result = step([t.to(device) for t in batch])
        else:
            for to, t in zip(buffer, batch, strict=True):
                to.copy_(t)
            result = step(buffer)
            if step.captures:
                for to in buffer:
                    to.zero_()
        assert result.read() == numbers
    assert_same(plain, graphed)


def test_results_can_be_read_late(device):
    model, optimizer = make_training(device)
    step = gptkernels.graphed_step(make_loss(model), optimizer)
    results = [step(batch) for batch in make_batches(STEPS)]
    read = [result.read() for result in results]
    assert len({numbers.loss for numbers in read}) == STEPS
    assert [(r.loss.item(), r.grad_norm.item()) for r in results] == [tuple(n) for n in read]


def test_without_clipping_there_is_no_norm(device):
    model, optimizer = make_training(device, max_grad_norm=None)
    step = gptkernels.graphed_step(make_loss(model), optimizer)
    for batch in make_batches(4):
        result = step(batch)
        assert result.grad_norm is None
        assert result.read().grad_norm is None


def test_a_model_of_torchs_layers_has_the_same_bits(device):
    def build():
        torch.manual_seed(5)
        layers = [torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)]
        model = torch.nn.Sequential(*layers).to(device)
        return model, AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)

    def loss_with(model):
        return lambda x, y: torch.nn.functional.mse_loss(model(x), y)

    plain, graphed = build(), build()
    step = gptkernels.graphed_step(loss_with(graphed[0]), graphed[1])
    data = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(STEPS)]
    torch.manual_seed(3)
    numbers = [plain_step(*plain, loss_with(plain[0]), batch) for batch in data]
    torch.manual_seed(3)
    assert [tuple(step(batch).read()) for batch in data] == numbers
    assert_same(plain, graphed)
    expect_captures(step, device, 1)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_before_update_may_change_the_gradients(device, accumulation):
    plain, graphed = make_training(device), make_training(device)
    norms = []

    def halve(model):
        for p in model.parameters():
            p.grad.mul_(0.5)
        norms.append(float(sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()))

    steps = [
        gptkernels.graphed_step(make_loss(model), optimizer, before_update=partial(halve, model), capture=capture)
        for (model, optimizer), capture in ((plain, False), (graphed, True))
    ]
    data = make_batches(STEPS * accumulation)
    for i in range(STEPS):
        results = [step(*data[i::STEPS]).read() for step in steps]
        assert results[0] == results[1]
        assert results[0].grad_norm == pytest.approx(norms[-1], rel=1e-4)
    assert steps[0].eager_because == "capture is False"
    expect_captures(steps[1], device, 1)
    assert_same(plain, graphed)


def test_captured_before_update_is_part_of_the_graph(device):
    plain, graphed = make_training(device), make_training(device)

    def halve(model):
        for p in model.parameters():
            p.grad.mul_(0.5)

    (model, optimizer), (graphed_model, graphed_optimizer) = plain, graphed
    step = gptkernels.graphed_step(make_loss(model), optimizer, before_update=partial(halve, model), capture=False)
    whole = gptkernels.graphed_step(
        make_loss(graphed_model), graphed_optimizer, captured_before_update=partial(halve, graphed_model)
    )
    for batch in make_batches(STEPS):
        assert step(batch).read() == whole(batch).read()
    expect_captures(whole, device, 1)
    assert_same(plain, graphed)


def only_record(caplog):
    (record,) = [r for r in caplog.records if r.name == "gptkernels.graphs"]
    return record.getMessage()


def assert_trains_eagerly(step, model, optimizer, loss, expected):
    plain_model = copy.deepcopy(model)
    plain_optimizer = AdamW(plain_model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for batch in make_batches(5):
        assert step(batch).read() == plain_step(plain_model, plain_optimizer, loss(plain_model), batch)
    assert expected in (step.eager_because or "")
    assert step.captures == 0


def test_a_step_on_the_cpu_logs_one_line(caplog):
    model, optimizer = make_training(torch.device("cpu"))
    step = gptkernels.graphed_step(make_loss(model), optimizer)
    for batch in make_batches(4):
        step(batch)
    assert only_record(caplog) == "the training step runs eagerly: the parameters are on the CPU"


def test_a_step_of_another_optimizer_is_eager(device, caplog):
    model, _ = make_training(device, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gptkernels.graphed_step(make_loss(model), optimizer)
    losses = [step(batch).read() for batch in make_batches(1) * 4]
    assert losses[0].loss > losses[-1].loss
    assert all(numbers.grad_norm is None for numbers in losses)
    assert ("SGD" if device.type == "cuda" else "CPU") in only_record(caplog)


def test_a_step_with_hooks_of_the_optimizer_is_eager(device, caplog):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    model, optimizer = make_training(device)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    step = gptkernels.graphed_step(make_loss(model), optimizer)
    for batch in make_batches(4):
        step(batch)
    assert len(calls) == 4
    assert "step hooks" in only_record(caplog)


def test_a_step_whose_hook_synchronises_is_eager(device, caplog):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    model, _ = make_training(device, dtype=torch.float32)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    seen = []
    model.transformer.ln_f.register_forward_hook(lambda module, inputs, out: seen.append(out.mean().item()))
    assert_trains_eagerly(
        gptkernels.graphed_step(make_loss(model), optimizer), model, optimizer, make_loss, "waits for the device, at"
    )
    assert "test_graphs.py" in only_record(caplog)


def test_a_step_whose_capture_fails_is_eager(device, caplog):
    """The loss synchronises the stream, which is an error in a capture. Later captures must still work."""
    if device.type != "cuda":
        pytest.skip("CUDA only")
    model, _ = make_training(device, dtype=torch.float32)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)

    def waiting(model):
        def loss(tokens, targets):
            torch.rand(3, device=device)
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            return model(tokens, targets, return_logits=False)[1]

        return loss

    assert_trains_eagerly(
        gptkernels.graphed_step(waiting(model), optimizer), model, optimizer, make_loss, "it cannot be captured"
    )
    assert "it cannot be captured" in only_record(caplog)
    assert torch.rand(3, device=device).isfinite().all()
    step, _ = run_both(device, [[batch] for batch in make_batches(STEPS)], dropout=0.1)
    expect_captures(step, device, 1)


def test_bad_batches_are_refused(device):
    model, optimizer = make_training(device)
    step = gptkernels.graphed_step(make_loss(model), optimizer)
    assert_raises(ValueError, "at least one batch", step)
    assert_raises(TypeError, "tuple or list of tensors, got Tensor", step, torch.zeros(2, 3))
    assert_raises(ValueError, "are more than block_size", step, make_batches(1, length=65)[0])
