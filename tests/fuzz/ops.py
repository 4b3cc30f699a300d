"""Calls operators with arguments drawn at random and compares them with the formula in float64.

    cd tests && python -m fuzz.ops --calls 100000 --seed 1 [--device cuda] [--jobs 8] [--op gelu]

A call is known by its seed and index; a failing one is printed as a command that repeats it, with the choices that were
made simpler while it went on failing:

    cd tests && python -m fuzz.ops --seed 1 --index 4711 --set dtype=torch.float32 --set x.layout=contiguous

Each call checks the result and the gradients by the rule of ``gptkernels.testing.assert_as_exact_as_torch``, in the
root mean square too, and products by ``assert_product``, which does not depend on torch. Some also check that the same
call gives the same bits again, and some break an argument, which must be an error that names the operator.

The rule compares our error with torch's, which on a few numbers may be 0 by luck. A call that breaks the rule is
therefore made again with other numbers (``trial``), up to 400 times. It must keep the rule beside torch's worst error
in these trials, and our errors in all of them must keep it on the whole, in the root mean square. An error that torch's
kernels do not make on such arguments is still found.
"""

import argparse
import dataclasses
import faulthandler
import itertools
import math
import multiprocessing
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from fuzz.draw import FLOATING, Draw
from fuzz.entries import ENTRIES, Call
from gptkernels.testing.exactness import (
    Errors,
    assert_norm_as_exact_as_torch,
    assert_product,
    root_mean_square_error,
)
from helpers import assert_as_exact_as_torch, double

CHUNK = 128  # calls that a worker process takes from the campaign
LAUNCHED = 32  # calls on CUDA that are launched before the first is checked: fewer waits for the device
TRIALS = (1, 10, 100, 400)  # after so many, their worst errors are compared


# ---- one call -------------------------------------------------------------------------------------------------------


def launch(draw, op=None):
    """Make one call.

    Returns:
        The Trial whose results are to be checked; None if the call has been checked, because it had to be refused.

    Raises:
        AssertionError: the operator took what it should refuse, or the same call gave other bits.
        Exception: what the operator raised.
    """
    names = list(ENTRIES)
    draw.op = draw.choose("op", names, [ENTRIES[n][1] for n in names])
    draw.op = op or draw.op
    call = ENTRIES[draw.op][0](draw)
    draw.call = describe(call)
    broken = break_argument(draw, call) if draw.chance("broken", 0.08) else None
    if broken:
        check_refused(draw, call, *broken)
        return None
    return first_trial(draw, call)


def run(draw, op=None):
    """Make and check one call.

    Raises:
        AssertionError: the result is wrong.
        Exception: what the operator raised.
    """
    first = launch(draw, op)
    if first:
        check(draw, first, *on_cpu([first]))


def tensors_of(trial):
    """All tensors of a call with one output by name, for ``Call.products``."""
    named = dict(zip(trial.call.args, trial.args, strict=True))
    named |= {"out": trial.ours[0], "dout": trial.douts[0]}
    return named | {f"d{name}": t for name, t in zip(trial.wanted, trial.ours[len(trial.douts) :], strict=True)}


def describe(call):
    def of(t):
        if t is None:
            return "None"
        text = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        return text if t.is_contiguous() else f"{text} strides {list(t.stride())}"

    return f"{call.text}; " + ", ".join(f"{name} {of(t)}" for name, t in call.args.items())


def first_trial(draw, call):
    wanted = wanted_gradients(draw, call)
    args = list(call.args.values())
    leaves = as_leaves(call, args, wanted)
    outs = listed(call.ours(*leaves))
    special = "nan" if call.nan_gradients else "none"
    douts = [
        draw.tensor(f"dout{i}", out.shape, out.dtype, special=special, denormal=call.denormal_gradients)
        for i, out in enumerate(outs)
    ]
    if len(outs) > 1 and wanted and draw.chance("an output unused", 0.2):
        douts[draw.choose("unused output", range(len(outs)))] = None
    found = [t.detach() for t in outs] + gradients(outs, leaves, douts)
    if draw.chance("again", 0.05):
        check_same_bits(draw, call, douts, wanted, found)
    return Trial(call, wanted, args, douts, found, results(call, call.torchs, args, douts, wanted))


def wanted_gradients(draw, call):
    """The arguments that ask for a gradient: all, some or none."""
    names = [n for n, t in call.args.items() if t is not None and t.is_floating_point() and n not in call.fixed]
    which = draw.choose("gradients", ("all", "some", "none"), (6, 3, 1))
    if which == "some":
        names = [n for n in names if draw.chance(f"{n}.gradient", 0.5)]
    return [] if which == "none" else names


def as_leaves(call, args, wanted):
    """The arguments as leaves of a graph, in their own layouts."""
    return [
        t if t is None else t.detach().requires_grad_(name in wanted) for name, t in zip(call.args, args, strict=True)
    ]


def listed(outs):
    return list(outs) if isinstance(outs, tuple | list) else [outs]


def gradients(outs, leaves, douts):
    """For the leaves that ask for one; zeros where the outputs in use do not depend on a leaf."""
    inputs = [t for t in leaves if t is not None and t.requires_grad]
    pairs = [(o, d) for o, d in zip(outs, douts, strict=True) if d is not None and o.requires_grad]
    if not inputs or not pairs:
        return [torch.zeros_like(t) for t in inputs]
    used, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(used, inputs, given, allow_unused=True, materialize_grads=True))


def results(call, function, args, douts, wanted):
    """What the function returns, and the gradients."""
    leaves = as_leaves(call, args, wanted)
    outs = listed(function(*leaves))
    return [t.detach() for t in outs] + gradients(outs, leaves, douts)


# ---- what is checked ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trial:
    """A call and what came of it.

    Attributes:
        call: from the table.
        wanted: names of the arguments whose gradients are wanted.
        args: tensors, or None for what is absent.
        douts: gradients of the outputs, None for an output that is not used.
        ours: our outputs, then gradients.
        torchs: torch's.
    """

    call: Call
    wanted: list
    args: list
    douts: list
    ours: list
    torchs: list


def trial(draw, first, i):
    """The same call with other numbers: each floating argument has its rows and columns in another order, and is
    multiplied by a factor of its own.

    The factors are between 7/8 and 1. So zeros, constants, equal rows, infinities, magnitudes and strides stay.
    """

    def changed(t, name):
        if t is None or not t.is_floating_point():
            return t
        generator = draw.generator(f"trial {i}, {name}")
        factor = 1 - torch.rand((), dtype=torch.float64, generator=generator).item() / 8
        values = t
        for dim, size in enumerate(t.shape):
            values = values.index_select(dim, torch.randperm(size, generator=generator).to(t.device))
        values = (values.double() * factor).to(t.dtype)
        if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
            return values
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(values)

    call, wanted = first.call, first.wanted
    args = [changed(t, name) for name, t in zip(call.args, first.args, strict=True)]
    douts = [changed(t, f"dout{j}") for j, t in enumerate(first.douts)]
    found = [results(call, function, args, douts, wanted) for function in (call.ours, call.torchs)]
    return Trial(call, wanted, args, douts, *found)


def on_cpu(trials):
    """The trials with all tensors on the CPU. One copy for each dtype: every copy waits for the device."""
    lists = ("args", "douts", "ours", "torchs")
    tensors = [t for trial in trials for name in lists for t in getattr(trial, name) if t is not None]
    if all(t.device.type == "cpu" for t in tensors):
        return trials
    copies = {}
    for dtype in {t.dtype for t in tensors}:
        same = [t for t in tensors if t.dtype == dtype]
        parts = torch.cat([t.reshape(-1) for t in same]).cpu().split([t.numel() for t in same])
        copies.update((id(t), part.view(t.shape)) for t, part in zip(same, parts, strict=True))
    return [
        dataclasses.replace(trial, **{name: [copies.get(id(t)) for t in getattr(trial, name)] for name in lists})
        for trial in trials
    ]


def formula(trial):
    """The formula in float64, on the CPU as the trial is."""
    args = [double(t) if t is not None and t.is_floating_point() else t for t in trial.args]
    return results(trial.call, trial.call.exact, args, [double(d) for d in trial.douts], trial.wanted)


def check(draw, first, compared):
    """Hold the results to the rules; where they break that beside torch's error, with more trials.

    Args:
        draw: of the call.
        first: the call as it was made.
        compared: the same where it is compared.
    """
    for arguments in first.call.products(tensors_of(first)):
        assert_product(*arguments)
    names = [f"output {i}" for i in range(len(first.douts))] + [f"d{name}" for name in first.wanted]
    results = list(zip(compared.ours, compared.torchs, formula(compared), strict=True))
    try:
        hold(names, results, [0.0] * len(names), [0.0] * len(names))
    except AssertionError:
        hold_with_trials(draw, first, names, results)


def hold(names, results, errors, norms):
    """Hold results (ours, torch's, the formula's) to the rules, beside torch's errors on other numbers."""
    for name, triple, error, norm in zip(names, results, errors, norms, strict=True):
        assert_as_exact_as_torch(*triple, name, torch_error=error)
        assert_norm_as_exact_as_torch(*triple, name, torch_error=norm)


def hold_with_trials(draw, first, names, results):
    """Hold the results to the rules beside torch's worst errors in more and more trials."""
    errors, norms = [Errors() for _ in names], [[] for _ in names]

    def add(found):
        for e, norm, (ours, torchs, exact) in zip(errors, norms, found, strict=True):
            e.add(ours, torchs, exact)
            norm.append(root_mean_square_error(torchs, exact))

    add(results)
    for begin, enough in itertools.pairwise(TRIALS):
        for some in range(begin, enough, 10):
            more = [trial(draw, first, i) for i in range(some, min(some + 10, enough))]
            for other in on_cpu(more):
                found = list(zip(other.ours, other.torchs, formula(other), strict=True))
                add(found)
                # here only infinities and NaN, where the formula has them and nowhere else
                hold(names, found, [math.inf] * len(names), [math.inf] * len(names))
        try:
            hold(names, results, [e.worst_of_torchs() for e in errors], [max(norm) for norm in norms])
            for name, e in zip(names, errors, strict=True):
                e.hold_on_the_whole(name)
            return
        except AssertionError as error:
            failure = error
    raise failure


def check_same_bits(draw, call, douts, wanted, found):
    threads = torch.get_num_threads()
    try:
        if call.any_threads and draw.device.type == "cpu":
            torch.set_num_threads(3 if threads == 1 else 1)
        again = results(call, call.ours, call.args.values(), douts, wanted)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(found, again, strict=True):
        a, b = (t.new_empty(t.numel()).copy_(t.reshape(-1)).view(torch.uint8) for t in (a, b))
        assert torch.equal(a, b), "the same call gave other bits"


# ---- calls that must be refused -------------------------------------------------------------------------------------


def break_argument(draw, call):
    """The name of an argument and what the operator does not take in its place; None where nothing is known."""
    floating = [n for n, t in call.args.items() if t is not None and t.is_floating_point()]
    tied = [n for n in call.tied if call.args[n] is not None]
    how = draw.choose("breakage", ("integers", "another dtype", "wider", "an index out of range"))
    if how == "integers" and call.takes_floating_alone and all(call.args[n].numel() for n in floating):
        name = draw.choose("broken argument", floating)
        return name, call.args[name].nan_to_num(0, 0, 0).clamp(-9, 9).to(torch.int64)
    if how == "an index out of range":
        return break_index(draw, call)
    if how == "integers" or len(tied) < 2:
        return None
    name = draw.choose("broken argument", tied[1:])
    t = call.args[name]
    if how == "another dtype":
        return name, t.to(draw.choose("other dtype", [d for d in FLOATING if d != t.dtype]))
    return name, torch.cat([t, t[..., :1]], -1)


def break_index(draw, call):
    """An index that is out of range. Not on CUDA, where it ends the process by a device-side assertion."""
    name = next((n for n in ("tokens", "targets") if n in call.args), None)
    if name is None or draw.device.type != "cpu" or not call.args[name].numel():
        return None
    t = call.args[name].clone(memory_format=torch.contiguous_format)
    t.view(-1)[draw.random("where").randrange(t.numel())] = draw.choose("bad index", (2**31 - 1, -3, -(2**31)))
    return name, t


def check_refused(draw, call, name, value):
    draw.call += f"; broken: {name} {value.dtype}{list(value.shape)}"
    args = {**call.args, name: value}
    leaves = [
        t if t is None else t.detach().requires_grad_(n != name and t.is_floating_point()) for n, t in args.items()
    ]
    try:
        call.ours(*leaves)
    except (RuntimeError, ValueError, TypeError) as error:
        text = str(error)
    else:
        raise AssertionError("no error")
    named = "gptkernels::" in text or text.startswith(call.text.partition("(")[0])
    assert named, f"the error does not name the operator: {text}"


# ---- failures -------------------------------------------------------------------------------------------------------


def failure_of(seed, index, device, op=None, replaced=None):
    """None, or the draw and the exception of a call that fails."""
    draw = Draw(seed, index, device, replaced)
    draw.call = "?"
    try:
        run(draw, op)
    except Exception as error:
        return draw, error
    return None


def simplified(draw, error, seed, index, device, op, seconds):
    """Make the choices of a failing call simpler, one after the other, as long as it fails in the same way.

    A CUDA error ends all work of its process on the device, so that nothing more can be tried.
    """
    if "CUDA error" in str(error):
        return draw, error
    end = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < end:
        again = False
        for name in list(draw.drawn):
            if name == "op":
                continue
            for value in draw.simpler.get(name, ()):
                if time.monotonic() > end:
                    break
                found = failure_of(seed, index, device, op, {**draw.replaced, name: str(value)})
                if found and type(found[1]) is type(error):
                    draw, error = found
                    again = True
                    break
    return draw, error


def report(draw, error, seed, index, device, op):
    """Three lines: the command, the call, what is wrong."""
    options = [f"--seed {seed} --index {index}", *([f"--device {device}"] if device != "cpu" else [])]
    options += [f"--op {op}"] if op else []
    options += [f"--set {shlex.quote(f'{name}={value}')}" for name, value in draw.replaced.items()]
    where = "" if isinstance(error, AssertionError) else "".join(traceback.format_tb(error.__traceback__)[-1:])
    return (
        f"python -m fuzz.ops {' '.join(options)}\n  {draw.op}: {draw.call}\n  {type(error).__name__}: {error}\n{where}"
    )


# ---- the campaign ---------------------------------------------------------------------------------------------------

_at = None  # this process's place in the array of the indices at work


def start_worker(places, free):
    global _at
    with free.get_lock():
        place = free.value
        free.value += 1
    _at = (places, place)
    prepare_process()


def prepare_process():
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    faulthandler.enable()


class DeviceLost(Exception):
    """A CUDA error, which ends all work of a process on the device, in one of the calls ``args[0]`` to ``args[1]``."""


def chunk(arguments, start, stop, end):
    """Calls start..stop, or those before the time is over: how many of each operator, and a report of each failure."""
    seed, device, op = arguments.seed, arguments.device, arguments.op
    counts, reports = Counter(), []
    together = 1 if device == "cpu" else LAUNCHED
    for first in range(start, stop, together):
        if time.time() > end or len(reports) >= arguments.failures:
            break
        if _at:
            _at[0][_at[1]] = first
        indices = range(first, min(first + together, stop))
        try:
            failures = failures_of(seed, indices, device, op, counts)
        except torch.AcceleratorError as error:
            raise DeviceLost(first, indices.stop) from error
        for index, draw, error in failures:
            simple = simplified(draw, error, seed, index, device, op, arguments.simplify)
            reports.append(report(*simple, seed, index, device, op))
    return counts, reports


def failures_of(seed, indices, device, op, counts):
    """(index, draw, exception) of the calls that fail, all launched before the first is checked."""
    failed, launched = [], []
    for index in indices:
        draw = Draw(seed, index, device)
        draw.call = "?"
        try:
            first = launch(draw, op)
        except Exception as error:
            failed.append((index, draw, error))
        else:
            if first:
                launched.append((index, draw, first))
        counts[draw.op] += 1
    for (index, draw, first), first_on_cpu in zip(launched, on_cpu([first for *_, first in launched]), strict=True):
        try:
            check(draw, first, first_on_cpu)
        except Exception as error:
            failed.append((index, draw, error))
    return failed


def first_device_error(arguments, start, stop):
    """The report of the call that loses the device: each is made alone, in a new process."""
    calls = (arguments.seed, range(start, stop), arguments.device, arguments.op)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare_process) as pool:
        found = pool.submit(first_failure_in_order, *calls).result()
    return found or f"a CUDA error in calls {start} to {stop - 1}; not when they are made one by one\n"


def first_failure_in_order(seed, indices, device, op):
    for index in indices:
        if (found := failure_of(seed, index, device, op)) and "CUDA error" in str(found[1]):
            return report(*found, seed, index, device, op)
    return None


def chunks(arguments):
    """(counts, reports) of every chunk, as they are ready."""
    ranges = [(i, min(i + CHUNK, arguments.calls)) for i in range(0, arguments.calls, CHUNK)]
    end = time.time() + arguments.seconds
    if arguments.jobs == 1:
        prepare_process()
        for start, stop in ranges:
            try:
                yield chunk(arguments, start, stop, end)
            except DeviceLost as lost:
                yield Counter(), [first_device_error(arguments, *lost.args)]
                return
        return
    context = multiprocessing.get_context("spawn")
    places, free = context.Array("q", [-1] * arguments.jobs), context.Value("i", 0)
    with ProcessPoolExecutor(arguments.jobs, context, start_worker, (places, free)) as pool:
        waiting = [pool.submit(chunk, arguments, *r, end) for r in ranges]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except DeviceLost as lost:
            pool.shutdown(wait=False, cancel_futures=True)
            yield Counter(), [first_device_error(arguments, *lost.args)]
        except BrokenProcessPool:
            yield Counter(), [f"a process died; the calls at work began at --index {', '.join(map(str, places))}\n"]
        finally:
            pool.shutdown(cancel_futures=True)


def campaign(arguments):
    """Make all calls; the exit status. What has been done is said also where the campaign is interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = shown = time.monotonic()
    counts, failures = Counter(), 0
    try:
        for more, reports in chunks(arguments):
            counts += more
            for text in reports:
                failures += 1
                print(text, flush=True)
            now = time.monotonic()
            if now - shown > 30:
                shown = now
                print(f"{counts.total()} calls, {failures} failures, {now - begin:.0f} s", file=sys.stderr, flush=True)
            if failures >= arguments.failures:
                print(f"stopped after {failures} failures")
                break
    except KeyboardInterrupt:
        print("interrupted")
    for op, count in sorted(counts.items()):
        print(f"{op:32} {count}")
    where = f"seed {arguments.seed}, {arguments.device}, {time.monotonic() - begin:.0f} s"
    print(f"fuzz.ops: {counts.total()} calls, {failures} failures ({where})", flush=True)
    return 1 if failures else 0


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="fuzz.ops", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000, help="how many calls (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign (0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="make no more calls after this time")
    parser.add_argument("--failures", type=int, default=20, help="stop after so many failures (20)")
    parser.add_argument("--simplify", type=float, default=15, metavar="SECONDS", help="time for each failure (15)")
    parser.add_argument("--op", choices=sorted(ENTRIES), help="this operator alone")
    parser.add_argument("--index", type=int, help="this call alone")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replace a choice of --index")
    arguments = parser.parse_args(argv)
    if arguments.index is None:
        return campaign(arguments)
    prepare_process()
    replaced = dict(text.split("=", 1) for text in arguments.set)
    found = failure_of(arguments.seed, arguments.index, arguments.device, arguments.op, replaced)
    if found is None:
        print("no failure")
        return 0
    draw, error = found
    traceback.print_exception(error)
    print("\n".join(f"{name} = {value}" for name, value in draw.drawn.items()))
    print(report(draw, error, arguments.seed, arguments.index, arguments.device, arguments.op))
    return 1


if __name__ == "__main__":
    sys.exit(main())
