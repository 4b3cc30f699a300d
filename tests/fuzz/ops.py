"""Calls operators with random arguments and compares the results with the formula in float64.

cd tests && python -m fuzz.ops --calls 100000 --seed 1 [--device cuda] [--jobs 8] [--op gelu]

A seed and an index determine a call. The fuzzer replaces the random choices of a failing call by simpler ones as long
as the call still fails, and prints a command that repeats the simplified call:

cd tests && python -m fuzz.ops --seed 1 --index 4711 --set dtype=torch.float32 --set x.layout=contiguous

The largest and the root mean square errors of results and gradients must satisfy the rule of
``gptkernels.testing.assert_as_exact_as_torch``. Matmuls must satisfy ``assert_product``, which does not depend on
torch. Some calls are repeated and must give the same bits. Some have a wrong argument and must raise an error that
names the operator.

On CUDA half of the calls have real sizes, with about one to five tiles for each SM. With ``--set size=real``, all
calls do. With ``--jobs``, a call that hangs or ends its process is reported, and a new process makes the next calls.

Over a few numbers, torch's error may happen to be 0. A call that breaks the rule is therefore repeated with other
numbers (``make_trial``), in up to 400 trials. The first result must then satisfy the rule with torch's largest error in
all trials. The root mean square of our errors in all trials may be at most twice torch's, plus one rounding.
"""

import argparse
import contextlib
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
from multiprocessing import connection

import torch

from gptkernels.testing.cases import OPERATORS, Call
from gptkernels.testing.checks import other_numbers, outputs
from gptkernels.testing.draw import FLOATING, Draw
from gptkernels.testing.exactness import Errors, assert_norm_as_exact_as_torch, assert_product
from helpers import assert_as_exact_as_torch, double

# On CUDA, this many small calls are launched before the first check, because a check synchronizes.
LAUNCHED = 32
MOST_KEPT = 2**30  # bytes of unused CUDA memory that torch's allocator may keep for the next calls
SKIPPED = "(no memory left)"  # calls that were not checked, because other processes used the GPU's memory
# The rules are applied after these numbers of trials until they are satisfied, with at most 100 trials for real sizes.
TRIALS = (1, 10, 100, 400)


# ---- a call ----------------------------------------------------------------------------------------------------------


def list_operators():
    return [name for name, operator in OPERATORS.items() if operator.weight]


def launch(draw, op=None):
    """Draw and make a call. Return the Trial to check, or None if the operator refused a wrong argument, as it must."""
    names = list_operators()
    draw.op = draw.choose("op", names, [OPERATORS[n].weight for n in names])
    draw.op = op or draw.op
    enter("draw")
    call = OPERATORS[draw.op].draw(draw)
    draw.call = describe(call)
    enter("ours", draw.call)
    broken = break_argument(draw, call) if draw.chance("broken", 0.08) else None
    if broken:
        check_refused(draw, call, *broken)
        return None
    return make_first_trial(draw, call)


def run(draw, op=None):
    first = launch(draw, op)
    if first:
        check(draw, first, *choose_device(draw, [first]))


def name_tensors(trial):
    """Return a trial's tensors by the names that ``Call.products`` uses: arguments, "out", "dout" and "d<argument>"."""
    named = dict(zip(trial.call.args, trial.args, strict=True))
    named |= {"out": trial.ours[0], "dout": trial.douts[0]}
    return named | {f"d{name}": t for name, t in zip(trial.wanted, trial.ours[len(trial.douts) :], strict=True)}


def describe(call):
    def describe_tensor(t):
        if t is None:
            return "None"
        text = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        return text if t.is_contiguous() else f"{text} strides {list(t.stride())}"

    return f"{call.text}; " + ", ".join(f"{name} {describe_tensor(t)}" for name, t in call.args.items())


def make_first_trial(draw, call):
    wanted = choose_gradients(draw, call)
    args = list(call.args.values())
    leaves = make_leaves(call, args, wanted)
    outs = outputs(call.ours(*leaves))
    special = "nan" if call.nan_gradients else "none"
    douts = [
        draw.tensor(f"dout{i}", out.shape, out.dtype, special=special, denormal=call.denormal_gradients)
        for i, out in enumerate(outs)
    ]
    if len(outs) > 1 and wanted and draw.chance("an output unused", 0.2):
        douts[draw.choose("unused output", range(len(outs)))] = None
    found = [t.detach() for t in outs] + compute_gradients(outs, leaves, douts)
    if draw.real and draw.device.type == "cuda":
        torch.cuda.synchronize()  # If a kernel hangs, the process stops here, and the report names the stage "ours".
    again = repeat_call(draw, call, douts, wanted) if draw.chance("again", 0.05) else []
    enter("torch's")
    return Trial(call, wanted, args, douts, found, compute_results(call, call.torchs, args, douts, wanted), again)


def choose_gradients(draw, call):
    names = list(call.differentiable())
    which = draw.choose("gradients", ("all", "some", "none"), (6, 3, 1))
    if which == "some":
        names = [n for n in names if draw.chance(f"{n}.gradient", 0.5)]
    return [] if which == "none" else names


def make_leaves(call, args, wanted):
    return [
        t if t is None else t.detach().requires_grad_(name in wanted) for name, t in zip(call.args, args, strict=True)
    ]


def compute_gradients(outs, leaves, douts):
    """Return the gradients of the leaves that require one: 0 if no output with a gradient depends on the leaf."""
    inputs = [t for t in leaves if t is not None and t.requires_grad]
    pairs = [(o, d) for o, d in zip(outs, douts, strict=True) if d is not None and o.requires_grad]
    if not inputs or not pairs:
        return [torch.zeros_like(t) for t in inputs]
    used, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(used, inputs, given, allow_unused=True, materialize_grads=True))


def compute_results(call, function, args, douts, wanted):
    leaves = make_leaves(call, args, wanted)
    outs = outputs(function(*leaves))
    return [t.detach() for t in outs] + compute_gradients(outs, leaves, douts)


# ---- checks ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trial:
    call: Call  # from the table of operators
    wanted: list  # names of the arguments whose gradients are computed
    args: list  # tensors, or None for an absent argument
    douts: list  # gradients of the outputs, or None for an unused output
    ours: list  # our outputs, then our gradients
    torchs: list  # torch's outputs, then its gradients
    again: list = dataclasses.field(default_factory=list)  # our results of the repeated call, if the call is repeated


def make_trial(draw, first, i):
    def changed(t, name, **more):
        return other_numbers(t, i, draw.source(f"trial {i}, {name}"), **more)

    call, wanted = first.call, first.wanted
    args = [changed(t, name) for name, t in zip(call.args, first.args, strict=True)]
    douts = [changed(t, f"dout{j}", linear=True) for j, t in enumerate(first.douts)]
    found = [compute_results(call, function, args, douts, wanted) for function in (call.ours, call.torchs)]
    return Trial(call, wanted, args, douts, *found)


def choose_device(draw, trials):
    return trials if draw.real else copy_to_cpu(trials)


def copy_to_cpu(trials):
    """Copy all tensors together, as one tensor of bytes, because every copy from the GPU synchronizes."""
    lists = ("args", "douts", "ours", "torchs", "again")
    tensors = [t for trial in trials for name in lists for t in getattr(trial, name) if t is not None]
    if all(t.device.type == "cpu" for t in tensors):
        return trials
    dtypes = sorted({t.dtype for t in tensors}, key=lambda d: d.itemsize, reverse=True)  # keeps elements aligned
    groups = [[t for t in tensors if t.dtype == dtype] for dtype in dtypes]
    together = [torch.cat([t.reshape(-1) for t in same]) for same in groups]
    copied = torch.cat([t.view(torch.uint8) for t in together]).cpu().split([t.nbytes for t in together])
    copies = {}
    for dtype, same, part in zip(dtypes, groups, copied, strict=True):
        parts = part.view(dtype).split([t.numel() for t in same])
        copies.update((id(t), part.view(t.shape)) for t, part in zip(same, parts, strict=True))
    return [
        dataclasses.replace(trial, **{name: [copies.get(id(t)) for t in getattr(trial, name)] for name in lists})
        for trial in trials
    ]


def view_bytes(t):
    return t.new_empty(t.numel()).copy_(t.reshape(-1)).view(torch.uint8)


def compute_formula(trial):
    args = [double(t) if t is not None and t.is_floating_point() else t for t in trial.args]
    return compute_results(trial.call, trial.call.exact, args, [double(d) for d in trial.douts], trial.wanted)


def check(draw, first, compared):
    """Check a call's results. If they break the rules of exactness, make further trials with other numbers.

    ``compared`` is a copy of ``first`` on the device where results are compared.
    """
    for one, other in zip(compared.ours, compared.again, strict=False):
        assert torch.equal(view_bytes(one), view_bytes(other)), "the same call gave other bits"
    enter("products")
    for arguments in first.call.products(name_tensors(compared)):
        assert_product(*arguments)
    enter("formula")
    names = [f"output {i}" for i in range(len(first.douts))] + [f"d{name}" for name in first.wanted]
    results = list(zip(compared.ours, compared.torchs, compute_formula(compared), strict=True))
    try:
        assert_as_exact(names, results, [0.0] * len(names), [0.0] * len(names))
    except AssertionError:
        assert_as_exact_in_trials(draw, first, names, results)


def assert_as_exact(names, results, errors, norms):
    """For each name, ``results`` has (ours, torch's, the formula's), and ``errors`` and ``norms`` have torch's largest
    error and root mean square error in other trials.
    """
    for name, triple, error, norm in zip(names, results, errors, norms, strict=True):
        assert_as_exact_as_torch(*triple, name, torch_error=error)
        assert_norm_as_exact_as_torch(*triple, name, torch_error=norm)


def assert_as_exact_in_trials(draw, first, names, results):
    """Add trials until the results satisfy the rules for several trials. If they never do, raise the last error."""
    noise, luck = first.call.noise(first.args, first.douts), 2.0 if first.call.torchs_splits else 1.0
    errors = [Errors(noise, luck) for _ in names]

    def add(found):
        for e, triple in zip(errors, found, strict=True):
            e.add(*triple)

    results = [leave_out_overflows(*triple) for triple in results]
    add(results)
    together = 1 if draw.real else 10
    for begin, enough in itertools.pairwise(TRIALS[:3] if draw.real else TRIALS):
        for some in range(begin, enough, together):
            enter("other numbers")
            more = [make_trial(draw, first, i) for i in range(some, min(some + together, enough))]
            for other in choose_device(draw, more):
                triples = zip(other.ours, other.torchs, compute_formula(other), strict=True)
                found = [leave_out_overflows(*triple) for triple in triples]
                add(found)
                # With an allowed error of infinity, only the infinities and NaN of our result are checked.
                assert_as_exact(names, found, [math.inf] * len(names), [math.inf] * len(names))
        try:
            assert_as_exact(names, results, *zip(*((e.worst_of_torchs(), e.worst_norm()) for e in errors), strict=True))
            for name, e in zip(names, errors, strict=True):
                e.hold_on_the_whole(name)
            return
        except AssertionError as error:
            failure = error
    raise failure


def leave_out_overflows(ours, torchs, exact):
    """Replace some elements that are finite in the formula's result by the formula's value, in all three results.

    If both our and torch's element are not finite, an intermediate result has overflowed. If some of torch's sums
    overflow, partial sums of its other elements may have overflowed or been rounded, depending on how the matmul splits
    its sum. An element above 1/64 of the dtype's largest number is therefore left out if ours differs from the
    formula's by at most 1/64 of that number and a quarter of the element.
    """
    if torchs.isfinite().all():
        return ours, torchs, exact
    most, error = torch.finfo(ours.dtype).max, (ours.double() - exact).abs()
    overflowed = (torchs.isinf() & exact.isfinite()).any()
    size = exact.abs()
    near = overflowed & (size > most / 64) & (size <= most) & (error <= (size / 4).clamp(max=most / 64))
    left_out = near | (exact.isfinite() & ~torchs.isfinite() & ~ours.isfinite())
    return *(torch.where(left_out, exact.to(t.dtype), t) for t in (ours, torchs)), exact


def repeat_call(draw, call, douts, wanted):
    """On the CPU, use another number of threads if ``call.any_threads`` says that this changes no bit."""
    threads = torch.get_num_threads()
    try:
        if call.any_threads and draw.device.type == "cpu":
            torch.set_num_threads(3 if threads == 1 else 1)
        return compute_results(call, call.ours, call.args.values(), douts, wanted)
    finally:
        torch.set_num_threads(threads)


# ---- wrong arguments -------------------------------------------------------------------------------------------------


def break_argument(draw, call):
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
    """Return an argument's name and a copy of it with an index out of range, or None if the call has no indices.

    On CUDA return None, because the kernels report such an index by a device-side assertion, after which the process
    cannot use the device.
    """
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


# ---- failures --------------------------------------------------------------------------------------------------------


def find_failure(seed, index, device, op=None, replaced=None):
    draw = Draw(seed, index, device, replaced)
    draw.call = "?"
    try:
        run(draw, op)
    except Exception as error:
        return draw, error
    return None


def simplify(draw, error, seed, index, device, op, seconds):
    """Replace a failing call's choices by simpler ones, one by one, as long as it raises the same type of error.

    After a CUDA error no simpler call is tried, because the process cannot use the device.
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
                enter("a simpler call")
                found = find_failure(seed, index, device, op, {**draw.replaced, name: str(value)})
                if found and type(found[1]) is type(error):
                    draw, error = found
                    again = True
                    break
    return draw, error


def format_report(draw, error, seed, index, device, op):
    where = "" if isinstance(error, AssertionError) else "".join(traceback.format_tb(error.__traceback__)[-1:])
    return (
        f"{format_command(seed, index, device, op, draw.replaced)}\n"
        f"  {draw.op}: {draw.call}\n  {type(error).__name__}: {error}\n{where}"
    )


def format_command(seed, index, device, op, replaced):
    options = [f"--seed {seed} --index {index}", *([f"--device {device}"] if device != "cpu" else [])]
    options += [f"--op {op}"] if op else []
    options += [f"--set {shlex.quote(f'{name}={value}')}" for name, value in replaced.items()]
    return f"python -m fuzz.ops {' '.join(options)}"


# ---- the campaign's processes ----------------------------------------------------------------------------------------

_progress = None  # the Progress of this process, if it is a worker of a campaign


class Progress:
    """A worker's current call and stage, in memory shared with the campaign's process."""

    def __init__(self, context):
        self.numbers = context.Array("q", 2, lock=False)  # the call's index, and the number of stages entered so far
        self.texts = [context.Array("c", size, lock=False) for size in (50, 4000)]  # the stage and the call

    def read(self):
        return self.numbers[0], *(text.value.decode(errors="replace") for text in self.texts)


def enter(stage, call=None, index=None):
    """Record that this process enters a stage of a call. ``call`` and ``index`` begin a new call."""
    if _progress:
        for buffer, text in zip(_progress.texts, (stage, call), strict=True):
            if text is not None:
                buffer.value = text.encode()[: len(buffer) - 1]
        if index is not None:
            _progress.numbers[0] = index
        _progress.numbers[1] += 1


def prepare_process():
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    faulthandler.enable()


class DeviceLost(Exception):
    """Raised after a CUDA error, when this process cannot use the device any more."""


def make_calls(arguments, start, stop, alone=False):
    """Make the calls start to stop - 1, on CUDA in groups that are launched together unless ``alone`` is true.

    Yields (index, report) of each failure, and after each group a Counter of the calls of each operator. Raises
    DeviceLost if the process cannot use the device any more.
    """
    seed, device, op = arguments.seed, arguments.device, arguments.op
    together = 1 if alone or device == "cpu" else LAUNCHED
    for first in range(start, stop, together):
        counts = Counter()
        for index, draw, error in find_failures(arguments, range(first, min(first + together, stop)), counts):
            lost = "CUDA error" in str(error)
            if lost and together > 1:
                raise DeviceLost from error
            simple = simplify(draw, error, seed, index, device, op, arguments.simplify)
            yield index, format_report(*simple, seed, index, device, op)
            if lost:
                raise DeviceLost from error
        yield counts
        if device != "cpu" and torch.cuda.memory_reserved() > MOST_KEPT:
            torch.cuda.empty_cache()


def parse_settings(arguments):
    return dict(text.split("=", 1) for text in arguments.set)


def is_out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def find_failures(arguments, indices, counts):
    launched, failed = [], []
    for index in indices:
        enter("draw", "?", index)
        draw = Draw(arguments.seed, index, arguments.device, parse_settings(arguments))
        draw.call = "?"
        try:
            first = launch(draw, arguments.op)
            if first and draw.real:
                check(draw, first, first)
            elif first:
                launched.append((index, draw, first))
        except Exception as error:
            failed.append((index, draw, error))
        counts[draw.op] += 1
    try:
        compared = copy_to_cpu([first for *_, first in launched])
    except torch.AcceleratorError as error:
        return [(index, draw, error)]
    for (index, draw, first), first_on_cpu in zip(launched, compared, strict=True):
        enter("products", draw.call, index)
        try:
            check(draw, first, first_on_cpu)
        except Exception as error:
            failed.append((index, draw, error))
    checked = [failure for failure in failed if not is_out_of_memory(failure[-1])]
    for draw in [draw for _, draw, error in failed if is_out_of_memory(error)]:
        counts[draw.op] -= 1
        counts[SKIPPED] += 1
    if len(checked) < len(failed):
        del failed  # its tracebacks keep tensors
        torch.cuda.empty_cache()
    return checked


def work(pipe, progress, arguments):
    """Send what ``make_calls`` yields for each task, and then None. If the device is lost, the process ends instead of
    sending None.
    """
    global _progress
    _progress = progress
    prepare_process()
    torch.zeros(1, device=arguments.device)  # creating the first tensor on CUDA takes seconds
    while True:
        enter("wait for calls", "?")
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            for found in make_calls(arguments, *task):
                pipe.send(found)
        except DeviceLost:
            return
        pipe.send(None)


START = 300  # seconds in which a new process must enter its first stage; the first one waits for the import of torch


class Worker:
    """A process that makes calls.

    Attributes:
        task: the arguments (start, stop, alone) of ``make_calls``, or None while the process waits for a task.
        why: the reason why an earlier process with this task ended, or None.
        count: the number of stages that the process had entered at the last call of ``is_stuck``.
        since: the time from which ``is_stuck`` measures how long the process has entered no stage.
    """

    def __init__(self, arguments):
        context = multiprocessing.get_context("forkserver")  # which imports torch once for all processes
        context.set_forkserver_preload(["torch"])
        self.progress = Progress(context)
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, self.progress, arguments), daemon=True)
        self.process.start()
        other.close()
        self.task, self.why, self.count, self.since = None, None, 0, time.monotonic()

    def give(self, task, why):
        self.task, self.why, self.since = task, why, time.monotonic()
        with contextlib.suppress(OSError):  # If the process has ended, run_in_processes notices when it reads the pipe.
            self.pipe.send(task)

    def is_stuck(self, patience):
        """A process has ``patience`` seconds to enter its next stage, and ``START`` seconds to enter its first."""
        count = self.progress.numbers[1]
        if count != self.count:
            self.count, self.since = count, time.monotonic()
        return time.monotonic() - self.since > (patience if count else START)

    def end(self):
        self.process.kill()
        self.process.join(60)
        self.pipe.close()


def run_in_processes(arguments):
    """Make the calls in several worker processes, and yield what ``make_calls`` yields in them.

    If a process on CUDA hangs or ends, the calls that it launched together are repeated one by one to find the faulty
    call. While a kernel hangs, kernels of other processes may have to wait for it. Therefore only the process that has
    entered no stage for the longest time is killed, and the waiting times of the others begin again.
    """
    starts = iter(range(0, arguments.calls, LAUNCHED))
    again = []  # (task, why) of tasks that must be repeated because their process hung or ended
    reported = set()  # indices of the calls whose failure has been reported
    end = time.time() + arguments.seconds
    workers = [Worker(arguments) for _ in range(arguments.jobs)]

    def next_task():
        if again:
            return again.pop()
        start = next(starts, None) if time.time() <= end else None
        return None if start is None else ((start, min(start + LAUNCHED, arguments.calls), False), None)

    def lose(worker, why):
        """Replace a process that hangs or has ended.

        On CUDA, calls that were launched together are repeated one by one. Otherwise the process's current call is
        reported, and the calls after it are made by any free process.
        """
        start, stop, alone = worker.task
        index, stage, call = worker.progress.read()
        index = index if start <= index < stop else start
        worker.end()
        workers[workers.index(worker)] = Worker(arguments)
        if arguments.device != "cpu" and not alone:
            again.append(((start, stop, True), why))
            return
        if index + 1 < stop:
            again.append(((index + 1, stop, alone), None))
        if index not in reported:
            reported.add(index)
            repeat = format_command(arguments.seed, index, arguments.device, arguments.op, parse_settings(arguments))
            yield index, f"{repeat}\n  {call}\n  {why}, after it entered the stage {stage!r}\n"

    try:
        while True:
            for worker in workers:
                if not worker.task and (task := next_task()):
                    worker.give(*task)
            busy = {worker.pipe: worker for worker in workers if worker.task}
            if not busy:
                return
            for pipe in connection.wait(list(busy), timeout=1):
                worker = busy[pipe]
                try:
                    found = pipe.recv()
                except (EOFError, ConnectionError):
                    worker.process.join(10)
                    yield from lose(worker, f"the process ended with status {worker.process.exitcode}")
                    continue
                if isinstance(found, Counter):
                    yield found
                elif found:
                    if found[0] not in reported:
                        reported.add(found[0])
                        yield found
                else:
                    start, stop, _ = worker.task
                    if worker.why and reported.isdisjoint(range(start, stop)):
                        yield start, f"calls {start} to {stop - 1}: {worker.why}; not when they are made one by one\n"
                    worker.task = None
            if stuck := [worker for worker in workers if worker.task and worker.is_stuck(arguments.patience)]:
                first = min(stuck, key=lambda worker: worker.since)
                yield from lose(first, f"no progress for {arguments.patience:g} s")
                for worker in workers:
                    worker.since = time.monotonic()
    finally:
        for worker in workers:
            worker.end()


def run_in_process(arguments):
    prepare_process()
    end = time.time() + arguments.seconds
    for start in range(0, arguments.calls, LAUNCHED):
        if time.time() > end:
            return
        stop = min(start + LAUNCHED, arguments.calls)
        try:
            yield from make_calls(arguments, start, stop)
        except DeviceLost as lost:
            yield start, f"calls {start} to {stop - 1}: {lost.__cause__}; --jobs 1 finds out which one\n"
            return


# ---- the campaign ----------------------------------------------------------------------------------------------------


def run_campaign(arguments):
    """Make the calls, and print the failures and the number of calls of each operator, even after an interrupt.

    Returns 1 if a call failed or if more than 5 % of the calls were skipped.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = shown = time.monotonic()
    counts, failures = Counter(), 0
    try:
        for found in run_in_processes(arguments) if arguments.jobs else run_in_process(arguments):
            if isinstance(found, Counter):
                counts += found
            else:
                failures += 1
                print(found[1], flush=True)
            now = time.monotonic()
            if now - shown > 30:
                shown = now
                checked = counts.total() - counts[SKIPPED]
                print(f"{checked} calls, {failures} failures, {now - begin:.0f} s", file=sys.stderr, flush=True)
            if failures >= arguments.failures:
                print(f"stopped after {failures} failures")
                break
    except KeyboardInterrupt:
        print("interrupted")
    for op, count in sorted(counts.items()):
        print(f"{op:32} {count}")
    where = f"seed {arguments.seed}, {arguments.device}, {time.monotonic() - begin:.0f} s"
    print(f"fuzz.ops: {counts.total() - counts[SKIPPED]} calls, {failures} failures ({where})", flush=True)
    return 1 if failures or counts[SKIPPED] > counts.total() / 20 else 0


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="fuzz.ops", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000, help="number of calls (2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the campaign (0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=0, help="number of processes; 0 for this process alone (0)")
    parser.add_argument(
        "--patience",
        type=float,
        default=20,
        metavar="SECONDS",
        help="end a process that makes no progress for this time (20)",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="make no more calls after this time")
    parser.add_argument("--failures", type=int, default=20, help="stop after this number of failures (20)")
    parser.add_argument(
        "--simplify", type=float, default=15, metavar="SECONDS", help="time to simplify each failure (15)"
    )
    parser.add_argument("--op", choices=sorted(list_operators()), help="call this operator alone")
    parser.add_argument("--index", type=int, help="make this call alone")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replace a choice")
    arguments = parser.parse_args(argv)
    if arguments.index is None:
        return run_campaign(arguments)
    prepare_process()
    found = find_failure(arguments.seed, arguments.index, arguments.device, arguments.op, parse_settings(arguments))
    if found is None:
        print("no failure")
        return 0
    draw, error = found
    traceback.print_exception(error)
    print("\n".join(f"{name} = {value}" for name, value in draw.drawn.items()))
    print(format_report(draw, error, arguments.seed, arguments.index, arguments.device, arguments.op))
    return 1


if __name__ == "__main__":
    sys.exit(main())
