"""Tests that the benchmarks run on the CPU at small sizes, report faults and regressions, and fill in the pages."""

import functools
import importlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from benchmarks import steps as whole_steps
from benchmarks.__main__ import main
from benchmarks.curves import __main__ as curves
from benchmarks.curves.show import differences
from benchmarks.curves.show import tables as curve_tables
from benchmarks.curves.train import CONTROL, VARIANTS, _in_order
from benchmarks.harness import compare, exact, measure, pages, plot, report
from benchmarks.harness.case import Case
from benchmarks.harness.run import load, save
from benchmarks.harness.timing import Time
from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import losses
from benchmarks.scaling.cases import CASES, MODELS
from benchmarks.scaling.cases import key as key_of
from benchmarks.scaling.model import Machine, estimate
from benchmarks.swap import __main__ as swap
from benchmarks.swap import table as swap_table
from benchmarks.train_step import __main__ as steps
from benchmarks.train_step import cpu as cpu_steps
from benchmarks.train_step.__main__ import main as train_step
from benchmarks.train_step.timeline import Launch, Rates, cells, pieces
from matplotlib import pyplot as plt
from matplotlib.text import Text

from gptkernels.data import write_tokens

pytestmark = pytest.mark.skipif("config.getoption('--device') != 'cpu'", reason="the tests run the CPU kernels")
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


def make_settings(**changes):
    return measure.Settings(**{"device": CPU, "dtypes": [torch.float32], "peers": ["torch"], "repeats": 2, **changes})


def measure_tiny(op, **changes):
    return list(measure.measure(op, make_settings(sizes=[importlib.import_module(f"benchmarks.{op}").TINY], **changes)))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "run.json"
    assert main(["gelu", "layernorm", "--device", "cpu", "--shape", "4x8", "--repeats", "3", "--json", str(path)]) == 0
    return path


@pytest.mark.parametrize("op", measure.OPS)
def test_every_op_is_measured_without_faults(op):
    rows = measure_tiny(op)
    assert rows
    for row in rows:
        assert not row.faults
        assert {"ours", "copy"} <= set(row.times)
        assert row.bytes > 0
        assert row.flops > 0
    if op in ("adamw", "layernorm", "fused_classifier"):
        rows = measure_tiny(op, dtypes=[torch.bfloat16])
        assert [(row.dtype, row.faults) for row in rows] == [("bfloat16", {})] * len(rows)


def test_json_has_machine_settings_and_rows(kept):
    run = json.loads(kept.read_text())
    assert {"date", "commit", "cpu", "platform", "versions", "gpu"} <= set(run["machine"])
    assert run["machine"]["versions"]["torch"] == torch.__version__
    assert run["settings"]["peers"] == ["torch"]
    row = next(row for row in run["rows"] if row["name"] == "layernorm bwd")
    assert (row["shape"], row["dtype"], row["bytes"]) == ("4x8", "float32", 3 * 4 * 8 * 4)
    for median, low, high in row["times"].values():
        assert 0 < low <= median <= high
    assert [r.key for r in load(kept)["rows"]] == [(r["name"], r["shape"], r["dtype"]) for r in run["rows"]]


def test_a_kept_run_can_be_plotted(kept, tmp_path):
    assert main(["--from", str(kept), "--plot", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"gelu.png", "layernorm.png", "roofline.png", "README.md"}
    page = (tmp_path / "README.md").read_text()
    assert "## layernorm" in page
    assert "| layernorm bwd | 4x8 | float32 |" in page


RESULTS = ROOT / "benchmarks" / "results"


def filled_pages(kind):
    if kind == "operators":  # python -m benchmarks --from benchmarks/results/h200*.json --pages
        return pages.filled(ROOT, load(*sorted(RESULTS.glob("h200*.json"))))
    if kind == "steps":  # python -m benchmarks.train_step --from benchmarks/results/step*.json --pages
        runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("step*.json"))]
        page, text = steps.PAGE, "\n\n".join(table for run in runs for table in steps.tables(run))
        return {page: pages.between(page.read_text(), text)}
    if kind == "curves":  # python -m benchmarks.curves --from benchmarks/results/fp8_curves.json --pages
        page, text = curves.PAGE, curves.section(curves.joined([RESULTS / "fp8_curves.json"], pytest.fail))
        return {page: pages.between(page.read_text(), text, curves.PLACE)}
    if kind == "scaling":  # python -m benchmarks.scaling --pages
        return {scaling.PAGE: scaling.filled()}
    # python -m benchmarks.swap --from benchmarks/results/swap.json --pages
    filled = swap_table.filled(ROOT, swap_table.load([RESULTS / "swap.json"]))
    assert all(f"<!-- {swap_table.PLACE} -->" in text for text in filled.values())
    return filled


@pytest.mark.parametrize("kind", ["operators", "steps", "curves", "scaling", "swap"])
def test_the_pages_have_the_figures_of_kept_runs(kind):
    for path, text in filled_pages(kind).items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_figures_are_those_of_kept_runs(page):
    text = " ".join((ROOT / page).read_text().split())
    before, after = whole_steps.swapped("huggingface", "eager")
    assert f"{before['ms'] / after['ms']:.2f} times as fast" in text
    assert f"in {100 * after['gib'] / before['gib']:.0f} % of the memory" in text
    before, after = whole_steps.swapped("nanogpt", "compiled")
    assert f" {before['ms'] / after['ms']:.2f} times as fast" in text
    step = whole_steps.steps()
    ours, torch_compile = (step[v]["tokens_per_second"] for v in ("ours-graph", "torch-compile-reduce-overhead"))
    assert page == "README.md" or f"{ours / 1000:.0f}k tokens per second" in text
    assert page == "README.md" or f"{ours / torch_compile:.2f} times as fast" in text


def draw_op(op):
    return plot.bars(plot.by_op(load(*sorted(RESULTS.glob("h200*.json")))["rows"])[op])


@pytest.mark.parametrize(
    ("draw", "labels"),
    [
        (functools.partial(draw_op, "attention"), 150),
        (functools.partial(draw_op, "layernorm"), 60),
        (whole_steps.bars, 30),
    ],
    ids=["the most bars", "the widest labels in narrow bars", "whole steps"],
)
def test_labels_of_a_plot_do_not_overlap(draw, labels):
    with plt.rc_context(plot.STYLE):
        figure = draw()
        figure.canvas.draw()
        ticks = [text for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        texts = [*ticks, *(text for axes in figure.axes for text in axes.texts)]
        boxes = [(text.get_text(), Text.get_window_extent(text).padded(2)) for text in texts if text.get_text()]
        plt.close(figure)
    assert len(boxes) > labels
    assert [(a, b) for (a, first), (b, second) in itertools.combinations(boxes, 2) if first.overlaps(second)] == []


def test_each_operators_page_has_figures_or_says_that_there_are_none():
    found = filled_pages("operators")
    for path in {ROOT / "docs/benchmarks.md", *(ROOT / "docs" / f"{op}.md" for op in measure.OPS)}:
        _, begin, figures = path.read_text().partition(pages.BEGIN)
        assert begin, path
        assert path in found or figures.strip().startswith("Not measured yet."), path


def test_a_page_without_a_place_is_unchanged(kept, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text("no place\n")
    (tmp_path / "docs" / "gelu.md").write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    pages.fill(tmp_path, load(kept))
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == "no place\n"
    text = (tmp_path / "docs" / "gelu.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| gelu fwd | 4x8" in text


def test_a_regression_is_reported(kept, tmp_path, capsys):
    run = load(kept)
    for row in run["rows"]:  # without noise, only the planted regression is reported
        row.times = {name: Time(t.median, t.median, t.median) for name, t in row.times.items()}
    quiet, slow = tmp_path / "quiet.json", tmp_path / "slow.json"
    save(quiet, run)
    planted = next(row for row in run["rows"] if row.name == "gelu fwd")
    planted.times["ours"] = Time(*(1.1 * t for t in planted.times["ours"]))
    save(slow, run)

    assert main(["--from", str(quiet), "--compare", str(quiet)]) == 0
    assert main(["--from", str(slow), "--compare", str(quiet)]) == 1
    assert f"{' '.join(planted.key)}: 10.0% slower" in capsys.readouterr().out
    assert main(["--from", str(quiet), "--compare", str(slow)]) == 0


def slow_down(row):
    """Increase all times by 30 %, as on a slower machine, where the ratios to the time of the copy stay the same."""
    row.times = {name: Time(*(1.3 * t for t in time)) for name, time in row.times.items()}


def make_noisy(row):
    if row.op != "roof":
        median = row.times["ours"].median
        row.times["ours"] = Time(1.2 * median, 0.8 * median, 1.6 * median)


@pytest.mark.parametrize("change", [slow_down, make_noisy])
def test_noise_and_a_slower_machine_are_no_regressions(kept, change):
    changed = load(kept)["rows"]
    for row in changed:
        change(row)
    assert compare.slower(load(kept)["rows"], changed) == []


def make_case(ours, **changes):
    x = torch.randn(64, 8)
    options = {
        "bytes": 2 * x.nbytes,
        "flops": x.numel(),
        "peers": {"torch": lambda: x * x, "compile": lambda: x.no_such_method()},
    }
    exact_outputs = functools.partial(exact.outputs, lambda x: x * x, [x])
    return Case("square", "64x8", lambda: ours(x), exact_outputs, **options | changes)


def write_half(x):
    out = x * x
    out[40] = 0
    return out


@pytest.mark.parametrize(
    "wrong", [lambda x: x * x * 1.001, write_half, lambda x: x * x * float("nan"), lambda x: (x * x)[:, :4]]
)
def test_a_wrong_kernel_is_reported_and_not_timed(wrong, capsys):
    row = measure.measure_case("square", make_case(wrong), torch.float32, make_settings())
    assert row.faults["ours"].startswith("WRONG")
    assert set(row.times) == {"torch", "copy"}
    report.show([row])
    assert "square 64x8 float32, ours: WRONG: output 0" in capsys.readouterr().out


def test_a_failing_peer_does_not_end_the_run():
    settings = make_settings(peers=["torch", "compile"])
    row = measure.measure_case("square", make_case(lambda x: x * x), torch.float32, settings)
    assert row.faults["compile"].startswith("failed: AttributeError")
    assert set(row.times) == {"ours", "torch", "copy"}


def test_a_wrong_kernel_fails_the_command(monkeypatch):
    monkeypatch.setattr("benchmarks.gelu.ops.gelu", lambda x, approximate: x + 1, raising=False)
    assert main(["gelu", "--device", "cpu", "--shape", "4x8", "--repeats", "2"]) == 1


def test_inputs_written_in_place_are_restored():
    x = torch.ones(4)
    start = x.clone()

    def add():
        return x.add_(1)

    options = {"bytes": 32, "flops": 4, "peers": {"torch": add}, "reset": lambda: x.copy_(start)}
    in_place = Case("add_", "4", add, lambda: [(0, ..., start.double() + 1)], **options)
    assert not measure.measure_case("add", in_place, torch.float32, make_settings()).faults


def test_host_mode_times_calls(capsys):
    assert main(["gelu", "--host", "--device", "cpu", "--repeats", "2"]) == 0
    assert "4x8" in capsys.readouterr().out


def test_a_missing_peer_is_reported(capsys):
    main(["global_norm", "--device", "cpu", "--peers", "liger", "--repeats", "2"])
    assert "liger left out: it has no CPU kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["--peers", "nobody"], ["--dtype", "int8"], ["--shape", "4xmany"]], ids=lambda a: a[-1]
)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main([*arguments, "--device", "cpu"])
    assert arguments[-1] in capsys.readouterr().err


SMALL_SIZES = {"batch": 2, "layers": 1, "width": 64, "length": 16, "vocabulary": 128}
SMALL_STEP = ["--device", "cpu", *(f"--{name}={size}" for name, size in SMALL_SIZES.items())]


def test_steps_of_all_variants_have_the_same_losses(tmp_path, capsys):
    kept = tmp_path / "step.json"
    variants = ["--variants", "ours,ours-graph,torch-eager", "--precisions", "tf32,autocast,bf16"]
    assert train_step([*SMALL_STEP, *variants, "--warm-up", "2", "--steps", "4", "--json", str(kept)]) == 0
    rows = json.loads(kept.read_text())["steps"]["rows"]
    assert len(rows) == 9
    for row in rows:
        assert not row["fault"]
        assert len(row["losses"]) == 6
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-2)
        assert row["losses"][-1] < row["losses"][0]
    capsys.readouterr()
    assert train_step(["--from", str(kept)]) == 0
    assert "| torch-eager | autocast | 2 |" in capsys.readouterr().out


def test_steps_on_the_cpu_are_timed_with_their_parts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu_steps, "TURN", 1)
    kept = tmp_path / "step.json"
    assert train_step(["--cpu", "--turns", "2", "--variants", "ours,torch-eager", "--json", str(kept)]) == 0
    found = json.loads(kept.read_text())["cpu"]
    for summary in found["rows"]:  # one summary for one thread, and one for all threads
        quartile, median, least, loss = summary["ours"]
        assert 0 < least <= quartile <= median
        assert loss == pytest.approx(summary["torch-eager"][-1], rel=1e-3)
    calls, _, flops = found["parts"]["mlp_backward"]
    assert (calls, flops) == (4, 4 * 4 * 2 * 1024 * 128 * 512)  # four matmuls in each of four layers
    assert "| mlp_backward | 4 |" in capsys.readouterr().out


def test_the_host_times_of_a_step_are_shown(capsys):
    assert train_step([*SMALL_STEP, "--host"]) == 0
    out = capsys.readouterr().out
    for name in ("backward", "in all", "residual_layernorm", "a whole layer"):
        assert f"| {name} |" in out


def test_a_timeline_counts_every_launch_once():
    shapes = ((2, 4, 8), (2, 4, 3), (8, 3))
    kernels = {
        **{"Memset (Device)": 1e-6, "nvjet_a": 5e-5, "nvjet_b": 4e-5},
        **{"void cublasLt::splitKreduce_kernel<32>(int)": 1e-5},
        **{"void gptkernels::cuda::column_sum_partial_kernel<float>(x)": 1e-5},
    }
    found = [Launch("linear_backward", 1, shapes, name, seconds) for name, seconds in kernels.items()]
    found += [Launch("adamw_", call, (), "adamw_chunks_kernel", 2e-5) for call in (2, 3)]
    by_what = {(p.op, p.what): p for p in pieces(found, Rates(bytes=1e6, flops=1e6), itemsize=2, parameters=10)}
    assert by_what["linear_backward", "dx"].launches == 2
    assert by_what["linear_backward", "dx"].floor == 2 * 2 * 4 * 3 * 8 / 1e6
    assert by_what["linear_backward", "dweight"].launches == 2
    assert by_what["linear_backward", "dweight"].kernel == "nvjet_b"
    assert by_what["linear_backward", "column sums"].floor == 0
    assert by_what["adamw_", ""].floor == pytest.approx(280 / 1e6)
    assert cells(list(by_what.values()))[-1][4] == "7"


def floors_of(*calls, **options):
    """Return the lower bound of the time of each part of a training step, at 1 byte/s and 1 flop/s.

    Each call is (operator, shapes, names of kernels).
    """
    found = [Launch(op, i, shapes, name, 1e-6) for i, (op, shapes, names) in enumerate(calls) for name in names]
    return {p.what: p.floor for p in pieces(found, Rates(bytes=1, flops=1), itemsize=2, parameters=10, **options)}


ROWS, INNER, HIDDEN = 64, 16, 48  # the matmuls multiply (ROWS, INNER) and (INNER, HIDDEN)
X, MATRIX = (2, 32, INNER), (HIDDEN, INNER)


def test_float8_matmuls_have_half_the_floor():
    terms = ROWS * INNER * HIDDEN
    found = floors_of(("fp8_linear", (X, MATRIX), ["fp8_quantize_kernel", "nvjet_a"]))
    assert found.pop("quantisation") == 0
    assert list(found.values()) == [terms]
    for op, shapes, kernels in (
        ("fp8_linear_backward", ((2, 32, HIDDEN), (INNER, ROWS), (INNER, HIDDEN)), ["nvjet_a"] * 2),
        ("fp8_mlp", (X, MATRIX, (HIDDEN,), (INNER, HIDDEN)), ["fp8_gelu_wgmma_kernel", "nvjet_a"]),
        ("fp8_mlp_backward", (X, (2, 32, HIDDEN), (INNER, ROWS)), ["nvjet_a"] * 4),
    ):
        assert list(floors_of((op, shapes, kernels)).values()) == [terms] * len(kernels)


def test_the_logits_of_a_float8_head_have_half_the_floor_only_in_float8():
    terms = ROWS * INNER * HIDDEN
    kernels = ["nvjet_a", "ClassifierForwardRow", "fp8_quantize_kernel", "nvjet_a", "fp8_transpose_kernel", "nvjet_a"]
    head = "fp8_linear_cross_entropy", (X, MATRIX, (2, 32)), kernels
    expected = {"logits": 2 * terms, "dx": terms, "dweight": terms, "quantisation": 0}
    expected |= {"classifier": 3 * ROWS * HIDDEN, "transposition": 2 * ROWS * HIDDEN}
    assert floors_of(head) == expected
    assert floors_of(head, fp8_logits=True) == expected | {"logits": terms}


def test_the_parts_of_a_float8_layer_have_their_floors():
    width = (INNER,)
    layer = (X, X, width, width, width, (48, INNER), (48,), (INNER, INNER), width, width, width)
    layer = *layer, (64, INNER), (64,), (INNER, 64)
    kernels = ["fp8_layernorm_kernel", "nvjet_a", "attention_a", "nvjet_a", "fp8_layernorm_kernel", "fp8_gelu", "nvjet"]
    forward = "fp8_layer", layer, kernels
    kernels = [*["nvjet_a"] * 4, "layernorm_backward_kernel", *["nvjet_a"] * 2, "attention_a", *["nvjet_a"] * 2]
    backward = "fp8_layer_backward", (X,), kernels
    terms, norms, of_attention = ROWS * INNER, 2 * 4 * 2 * ROWS * INNER, 2 * 32 * 32 * INNER
    expected = {"qkv": 48 * terms, "attention's out": INNER * terms, "fc and GELU": 64 * terms, "proj": 64 * terms}
    assert floors_of(forward) == expected | {"norms": norms, "attention": 2 * of_attention}
    outputs = {"dattended": INNER, "dout_weight": INNER, "qkv's dx": 48, "dqkv_weight": 48}
    outputs |= dict.fromkeys(("dproj_weight", "dhidden and dGELU", "fc's dx", "dfc_weight"), 64)
    expected |= {name: size * terms for name, size in outputs.items()}
    assert floors_of(forward, backward) == expected | {"norms": norms, "attention": 5 * of_attention}


SMALL_CURVES = ["--device", "cpu", "--steps=60", "--batch=2", "--layers=1", "--width=32", "--length=16", "--warm-up=5"]


@pytest.fixture(scope="module")
def token_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    for name, count in ("train", 4000), ("val", 400):
        write_tokens(folder / f"{name}.bin", [(torch.rand(count) ** 3 * 64).int().numpy()])
    return ["--vocabulary=64", f"--train={folder / 'train.bin'}", f"--val={folder / 'val.bin'}"]


def test_curves_are_the_same_in_separate_processes(token_files, tmp_path, capsys):
    both, joined = tmp_path / "both.json", tmp_path / "joined.json"
    command = [*SMALL_CURVES, *token_files]
    assert curves.main([*command, "--json", str(both)]) == 0
    assert "bf16: 25 steps, loss" in capsys.readouterr().out
    variants = ["bf16", "bf16-reversed", "fp8", "fp8-head", "fp8-logits"]
    parts = [tmp_path / f"{variant}.json" for variant in reversed(variants)]
    for part in parts:
        assert curves.main([*command, "--variants", part.stem, "--json", str(part)]) == 0
    capsys.readouterr()
    plot = tmp_path / "curves.png"
    assert curves.main(["--from", *map(str, parts), "--json", str(joined), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "| bfloat16 | 0 | 60 |" in out
    assert out.count("%") == 4 * 3  # four variants have a largest, a last and a validation difference
    assert plot.read_bytes()[1:4] == b"PNG"

    found, alone = (json.loads(path.read_text())["curves"] for path in (both, joined))
    assert [curve["variant"] for curve in found] == [curve["variant"] for curve in alone] == variants
    for one, other in zip(found, alone, strict=True):
        assert len(one["losses"]) == 60
        assert one["losses"][-1] < one["losses"][0]
        assert one["losses"] == other["losses"]
        assert one["validation"] == other["validation"] > 0
    control = found.pop(1)["losses"]
    assert max(abs(a - b) for a, b in zip(control, found[0]["losses"], strict=True)) < 1e-2
    for one, other in itertools.combinations(found, 2):
        assert one["losses"] != other["losses"]


def test_the_control_reverses_its_batches():
    batch = torch.arange(6).view(3, 2), torch.arange(6, 12).view(3, 2)
    for variant in VARIANTS:
        tokens, targets = _in_order(batch, variant)
        assert tokens[:, 0].tolist() == ([4, 2, 0] if variant == CONTROL else [0, 2, 4])
        assert (targets - tokens == 6).all()


def test_an_interrupted_curve_is_kept(token_files, tmp_path, monkeypatch):
    def full(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.curves.train._validation", full)
    kept = tmp_path / "kept.json"
    with pytest.raises(KeyboardInterrupt):
        curves.main([*SMALL_CURVES, *token_files, "--variants", "bf16", "--json", str(kept)])
    (curve,) = json.loads(kept.read_text())["curves"]
    assert len(curve["losses"]) == 50
    assert curve["validation"] is None
    assert curves.main(["--from", str(kept)]) == 0


def train_briefly(folder, name, *options):
    path = folder / f"{name}.json"
    assert curves.main([*SMALL_CURVES, "--steps=52", "--val-batches=0", *options, "--json", str(path)]) == 0
    return path


def test_curves_are_compared_within_their_seed(token_files, tmp_path, capsys):

    seeds = [train_briefly(tmp_path, seed, *token_files, "--variants=bf16,fp8", f"--seed={seed}") for seed in "10"]
    found = curves.joined(seeds, pytest.fail)
    assert [(c["settings"]["seed"], c["variant"]) for c in found] == list(itertools.product((0, 1), ("bf16", "fp8")))
    ends = [differences(found[i + 1], found[i])[-1] for i in (0, 2)]
    shown = "\n".join(curve_tables(found))
    for end in ends:
        assert f"| {end:+.2%} |" in shown
    assert f"mean of 2 seeds: {sum(ends) / 2:+.2%}, standard error {abs(ends[0] - ends[1]) / 2:.2%}." in shown
    assert "control" not in shown

    controls = [
        {**found[i], "variant": "bf16-reversed", "losses": [1.1 * x for x in found[i]["losses"]]} for i in (0, 2)
    ]
    of_both = [(1 + end) / 1.05 - 1 for end in ends]
    error = abs(of_both[0] - of_both[1]) / 2
    shown = "\n".join(curve_tables([found[0], controls[0], *found[1:3], controls[1], found[3]]))
    assert f"the first curve and the control {sum(of_both) / 2:+.2%}, standard error {error:.2%}." in shown
    assert "mean of 2 seeds: +10.00%, standard error 0.00%." in shown


def test_curves_of_different_settings_are_not_joined(token_files, tmp_path, capsys):
    files = [train_briefly(tmp_path, w, *token_files, "--variants=bf16", f"--warm-up={w}") for w in (1, 2)]
    with pytest.raises(SystemExit):
        curves.main(["--from", *map(str, files)])
    assert "different settings" in capsys.readouterr().err


SMALL_SWAP = ["--size", "tiny", "--length", "8", "--losses", "3", "--seconds", "0"]


def run_swap_benchmark(*arguments):
    return swap.main([*SMALL_SWAP, *map(str, arguments)])


def measure_here(variants, options):
    """Measure in this process, which saves imports. Another test measures in processes."""
    return (swap.measure(variant, CPU, options.seconds, options.losses) for variant in variants)


def test_runs_of_swapped_models_join_in_one_table(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(swap, "measure_in_processes", measure_here)
    one, other, all_rows = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "all.json"
    assert run_swap_benchmark("--rows", "huggingface/eager/2/0", "--json", one) == 0
    assert run_swap_benchmark("--rows", "nanogpt/eager/2/0", "--swapped", "yes", "--json", other) == 0
    rows = [row for path in (one, other) for row in json.loads(path.read_text())["rows"]]
    measured = [(row["model"], row["swapped"]) for row in rows]
    assert measured == [("huggingface", "no"), ("huggingface", "yes"), ("nanogpt", "yes")]
    for row in rows:
        assert not row["fault"]
        assert row["ms"] > 0
        assert len(row["losses"]) == 3
    assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-2)
    capsys.readouterr()
    assert run_swap_benchmark("--from", one, other, "--json", all_rows) == 0
    shown = capsys.readouterr().out
    assert json.loads(all_rows.read_text())["rows"] == rows
    assert f"| Hugging Face, eager, B=2, dropout 0 | {rows[0]['ms']:.1f} | {rows[1]['ms']:.1f} |" in shown
    assert f"| nanoGPT, eager, B=2, dropout 0 |  | {rows[2]['ms']:.1f} |  |" in shown


def test_an_interrupted_run_of_swapped_models_keeps_its_rows(tmp_path, monkeypatch):
    def cut(variants, options):
        yield {"model": variants[0].model, "fault": "", "ms": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(swap, "measure_in_processes", cut)
    with pytest.raises(KeyboardInterrupt):
        run_swap_benchmark("--rows", "nanogpt/*", "--json", tmp_path / "run.json")
    assert [row["ms"] for row in json.loads((tmp_path / "run.json").read_text())["rows"]] == [1.0]


def test_a_failing_variant_does_not_end_the_run(tmp_path, capsys):
    kept, rows = tmp_path / "run.json", "nanogpt/eager/-1/0,nanogpt/eager/1/0"
    assert run_swap_benchmark("--rows", rows, "--swapped", "yes", "--json", kept, "--at-once", 2) == 1
    failed, measured = json.loads(kept.read_text())["rows"]
    assert "negative dimension" in failed["fault"]
    assert measured["ms"] > 0
    assert len(measured["losses"]) == 3
    assert "negative dimension" in capsys.readouterr().out


@pytest.mark.parametrize("rows", ["huggingface/eager/32", "nobody/eager/1/0", "nanogpt/fast/1/0", "llmc/*"])
def test_malformed_rows_are_refused(rows, capsys):
    with pytest.raises(SystemExit):
        run_swap_benchmark("--rows", rows)
    assert rows in capsys.readouterr().err


def test_the_scaling_model_is_within_10_percent_of_each_measured_step():
    cases = {case.key: case for case in CASES}
    rows = [row for run in scaling.kept_runs() for row in run["rows"]]
    modelled = [(row, cases[key_of(row)]) for row in rows if cases[key_of(row)].layout is not None]
    assert len(modelled) >= 15
    for row, case in modelled:
        seconds = estimate(MODELS[case.model], case.layout, case.batch, case.length, Machine()).seconds
        assert 1e3 * seconds == pytest.approx(row["ms"], rel=0.1), case.key


def test_losses_of_layouts_are_compared(tmp_path, monkeypatch):
    one, two = losses.ONE, f"{losses.ONE}, 2 batches of 4"
    monkeypatch.setattr(losses, "LAYOUTS", {1: {name: losses.LAYOUTS[1][name] for name in (one, two)}})
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    write_tokens(tmp_path / "text_train.bin", [torch.arange(2000).numpy() % 50])
    options = losses.SMALL | {"layers": 1, "sequence_length": 8, "steps": 2, "data": str(tmp_path / "text")}
    losses.main(json.dumps(options), str(tmp_path / "runs.json"))
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert [(r["layout"], r["dtype"]) for r in runs] == [(a, b) for a in (one, two) for b in losses.DTYPES]
    assert all(len(r["losses"]) == 2 for r in runs)
    ordered = {**runs[2], "layout": "dp=2, deterministic layout", "processes": 2}
    run = {"machine": json.loads((RESULTS / "step.json").read_text())["steps"]["machine"] | {"gpus": 2}}
    run |= {"model": "tiny", "steps": 2, "runs": [*runs, ordered, {**ordered, "dtype": "bfloat16", "losses": [1, 1]}]}
    losses.save(tmp_path / "kept.json", run)
    assert json.loads((tmp_path / "kept.json").read_text()) == run
    lines = losses.table(run).splitlines()
    assert lines[0].startswith("2 x NVIDIA H200, ")
    assert lines[-1].startswith(f"| dp=2, deterministic layout | {two} | same bits | ")
    assert not lines[-1].endswith("same bits |")
