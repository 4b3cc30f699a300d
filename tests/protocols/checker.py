"""A model checker of synchronization protocols, which explores every interleaving of a few processes.

A process is a list of operations, recorded before the exploration by a function with the structure of the kernel's
code. The list must not depend on the interleaving, so each choice that depends on data, such as the blocks that a mask
leaves visible, has its own model. A state is the position of each process in its list. The positions determine the
phases of barriers and the contents of buffers.

A wait, the accesses after it and the arrivals after these accesses are one step. docs/protocols.md explains why no
fault is missed. A TMA copy is a separate process, because it may happen at any time after its start.
"""

import itertools
import re
from collections import defaultdict
from pathlib import Path

CUDA = Path(__file__).parents[2] / "csrc" / "cuda"


class Fault(AssertionError):
    """A model has reached a state that is forbidden in a kernel."""


class Deadlock(Fault):
    """Some processes have not ended, and none of them can continue."""


class WrongPhase(Fault):
    """A process arrives in a phase that is not the current one, or waits for a phase that it cannot test by parity.

    The parity of a barrier only tells the current phase from the phase that was completed last.
    """


class WrongData(Fault):
    """A buffer is read before it is written, or after it is overwritten."""


def find_constant(file, name, **known):
    """Return the value of an integer constant in a kernel's source. ``known`` overrides the source's constants."""
    if name in known:
        return known[name]
    source = (CUDA / file).read_text()
    for expression in re.findall(rf"constexpr (?:int|unsigned) (?:\w+ = [^;]*, )?{name} = ([^;,]+)[;,]", source):
        if "::" not in expression:
            value = re.sub(r"[A-Za-z]\w*", lambda match: str(find_constant(file, match[0], **known)), expression)
            assert re.fullmatch(r"[\d\s()+*-]+", value), f"{file}: {name} = {value} cannot be computed"
            return eval(value)
    raise LookupError(f"{file} has no constant {name}")


def find_ring_size(file, name):
    """Return the number of buffers of a kernel's ring. ``name`` is a variable of type RingPosition in the source."""
    found = set(re.findall(rf"RingPosition<(\w+)> (?:\w+, )*{name}\b", (CUDA / file).read_text()))
    assert len(found) == 1, f"{file}: {name} is a position in {found or 'no ring'}"
    size = found.pop()
    return int(size) if size.isdigit() else find_constant(file, size)


class Ring:
    """Barriers or buffers that are used cyclically: use n of the ring is use n // size of item n % size.

    A call returns ((name, item), phase) of a barrier or ((name, item), number of the write) of a buffer, which has
    ``writes`` writes in each use. Phase -1 is complete at the start, as in the kernels, where a first wait with parity
    1 returns at once.
    """

    def __init__(self, name, size=1, writes=1):
        self.name, self.size, self.writes = name, size, writes

    def __call__(self, n=0, write=0):
        return (self.name, n % self.size), n // self.size * self.writes + write


class Buffers(Ring):
    """A ring of buffers, each with a barrier "full" and a barrier "empty". ``readers`` processes release a buffer."""

    def __init__(self, model, name, size, readers, writes=1):
        super().__init__(name, size, writes)
        self.full, self.empty, self.filled = Ring((name, "full"), size), Ring((name, "empty"), size), 0
        # "full" has two arrivals: the announcement of the bytes, and the completed copy.
        model.arrivals |= {self.full.name: 2, self.empty.name: readers}

    def fill(self, p, *others):
        """Wait until the next buffer's contents are released, and load new contents.

        The kernels wait for parity ``phase ^ 1``, so that the first wait for each buffer returns at once.
        """
        p.wait(self.empty(self.filled - self.size))
        p.load(self.full(self.filled), self(self.filled), *others)
        self.filled += 1

    def get(self, p, n):
        p.wait(self.full(n))
        p.read(self(n))

    def free(self, p, n):
        p.read(self(n))
        p.arrive(self.empty(n))

    def skip(self, p, n):
        p.wait(self.full(n))  # Without this wait, the process could arrive in the phase of an earlier use.
        p.arrive(self.empty(n))


class Staging:
    """A buffer in shared memory through which a warpgroup stores its results.

    Each warp writes some rows. Then the first warp, or every warp if ``all_read`` is true, reads all rows.
    """

    def __init__(self, model, name, warps, all_read=False):
        self.barrier, self.stored, self.all_read = Ring((name, "barrier")), [0] * warps, all_read
        self.rows = [Ring((name, "rows", warp)) for warp in range(warps)]
        model.arrivals[self.barrier.name] = warps

    def store(self, p, warp):
        n, reads = self.stored[warp], self.all_read or warp == 0
        if reads and n > 0:
            p.read(*[rows(n - 1) for rows in self.rows])  # tma_store_wait_read()
        p.sync(self.barrier(2 * n))
        p.write(self.rows[warp](n))
        p.sync(self.barrier(2 * n + 1))
        if reads:
            p.read(*[rows(n) for rows in self.rows])
        self.stored[warp] += 1


def load_tiles(p, tile, counts, *blocks):
    """Load a tile and its blocks for each number of blocks in ``counts``, and then a tile that marks the end.

    A block consists of one buffer of each ring in ``blocks``.
    """
    for count in [*counts, 0]:
        tile.fill(p)
        for _ in range(count):
            for ring in blocks:
                ring.fill(p)


def add_warps(model, warpgroups, warps, run):
    for warpgroup in range(warpgroups):
        for warp in range(warps):
            run(model.process(f"warpgroup {warpgroup}, warp {warp}"), warpgroup, warp)
    return model


class Process:
    def __init__(self, model, name):
        self.model, self.name, self.operations, self.issued = model, name, [], 0

    def wait(self, barrier):
        """The kernels test only the parity of a phase, which must therefore be the current or the last complete one."""
        self.operations.append(("wait", *barrier))

    def reach(self, counter):
        """Wait until the number of a counter's complete phases exceeds a value, by any amount."""
        self.operations.append(("reach", *counter))

    def arrive(self, *barriers):
        self.operations += [("arrive", *barrier) for barrier in barriers]

    def sync(self, barrier):
        """Arrive and wait, like bar.sync or a cluster's barrier."""
        self.arrive(barrier)
        self.wait(barrier)

    def read(self, *buffers):
        self.operations += [("read", *buffer) for buffer in buffers]

    def write(self, *buffers):
        self.operations += [("write", *buffer) for buffer in buffers]

    def load(self, barrier, *buffers):
        """Announce a copy at a barrier and start the copy, which arrives there at its end."""
        self.arrive(barrier)
        self.copy(barrier, *buffers)

    def copy(self, barrier, *buffers):
        """Start a copy that writes the buffers and then arrives at the barrier.

        A process's copies for one ring of barriers end in the order of their starts, and in any order relative to other
        copies.
        """
        copies = self.model.process(f"{self.name}'s copies for {barrier[0][0]}")
        issued = (f"{copies.name} issued",)
        self.arrive((issued, copies.issued))
        copies.reach((issued, copies.issued))
        copies.issued += 1
        copies.write(*buffers)
        copies.arrive(barrier)


def strip_numbers(key):
    return key[0] if isinstance(key[0], str) else " ".join(part for part in key[0] if isinstance(part, str))


def find_used(step):
    """Return the processes on whose positions a step depends."""
    return {process for operation in step for process, _ in operation[4]}


def decode(state, fields):
    return [state >> shift & mask for shift, mask in fields]


def find_earlier(operations, key):
    return sum(kind in ("arrive", "write") and other == key for kind, other, _ in operations)


class Model:
    """Processes, and the numbers of arrivals that complete a phase of each kind of barrier (default: 1)."""

    def __init__(self, **arrivals):
        self.arrivals, self.processes = arrivals, {}

    def process(self, name):
        return self.processes.setdefault(name, Process(self, name))

    def places(self):
        """Return (role, kind, name of the barriers) of all waits and arrivals, except those of copies.

        The role is the process's name with "*" in place of numbers. The kind is "wait", "reach" or "arrive".
        """
        return {
            (re.sub(r"\d+", "*", process.name), kind, strip_numbers(key))
            for process in self.processes.values()
            for kind, key, _ in process.operations
            if kind in ("wait", "reach", "arrive") and "copies" not in f"{process.name} {strip_numbers(key)}"
        }

    def mutants(self, place, change):
        """Yield this model with the operations at a place replaced, once for each process that has the place's role.

        ``change(kind, key, number)`` returns the operations that replace an operation.
        """
        for name, process in self.processes.items():
            if re.sub(r"\d+", "*", name) == place[0]:
                original, process.operations = process.operations, []
                for kind, key, n in original:
                    here = (kind, strip_numbers(key)) == place[1:]
                    process.operations += change(kind, key, n) if here else [(kind, key, n)]
                yield self
                process.operations = original

    def compile(self):
        """Combine the operations of each process into steps.

        For each barrier or buffer and each process, a table has the number of the process's arrivals or writes before
        each of its positions.
        """
        self.programs, self.totals = [], defaultdict(list)
        for index, process in enumerate(self.processes.values()):
            steps, arrived = [], True
            for operation in process.operations:
                kind = operation[0]
                if kind in ("wait", "reach") or (arrived and kind != "arrive") or not steps:
                    steps.append([])
                steps[-1].append(operation)
                arrived = kind == "arrive"
            self.programs.append(steps)
            for key in {key for step in steps for kind, key, _ in step if kind in ("arrive", "write")}:
                table = [0, *itertools.accumulate(find_earlier(step, key) for step in steps)]
                self.totals[key].append((index, table))
        self.programs = [
            [
                [
                    (kind, key, n, find_earlier(step[:i], key), self.totals[key], self.arrivals.get(key[0], 1))
                    for i, (kind, key, n) in enumerate(step)
                ]
                for step in steps
            ]
            for steps in self.programs
        ]

    def perform(self, state, process, step):
        for kind, key, n, total, totals, arrivals in step:
            for index, table in totals:
                total += table[state[index]]
            if kind == "wait":
                complete = total // arrivals
                if complete == n:
                    return False
                if complete != n + 1:
                    raise WrongPhase(
                        f"{self.at(process)} waits for phase {n} of {key}, of which {complete} are complete"
                    )
            elif kind == "reach":
                if total // arrivals <= n:
                    return False
            elif kind == "arrive":
                if total // arrivals != n:
                    raise WrongPhase(f"{self.at(process)} arrives at {key} in phase {total // arrivals}, not {n}")
            elif total != n + (kind == "read"):
                raise WrongData(f"{self.at(process)}: {kind} of {key}, number {n}, after {total} writes")
        return True

    def at(self, process):
        return list(self.processes)[process]

    def explore(self):
        """Visit all states in order of their distance from the start, and return the number of states.

        Whether a process can make a step depends only on the positions of the processes with the same barriers and
        buffers. Therefore ``perform`` is called once for each choice of these positions.
        """
        self.compile()
        # A state is an integer, in which a field of bits is a process's position.
        masks = [(1 << len(steps).bit_length()) - 1 for steps in self.programs]
        shifts = [0, *itertools.accumulate(map(int.bit_length, masks))]
        fields = list(zip(shifts, masks, strict=False))
        programs = [
            (
                *(index, shifts[index], masks[index]),
                [(step, sum(fields[i][1] << fields[i][0] for i in {index, *find_used(step)}), {}) for step in steps],
            )
            for index, steps in enumerate(self.programs)
        ]
        level, states = {0}, 0
        while level:
            states += len(level)
            following = set()
            for state in level:
                moved = unfinished = False
                for index, shift, mask, steps in programs:
                    at = state >> shift & mask
                    if at == len(steps):
                        continue
                    unfinished = True
                    step, positions, known = steps[at]
                    key = state & positions
                    can_move = known.get(key)
                    if can_move is None:
                        can_move = known[key] = self.perform(decode(state, fields), index, step)
                    if can_move:
                        moved = True
                        following.add(state + (1 << shift))
                if unfinished and not moved:
                    waits = [
                        f"{self.at(process)} for {steps[at][0][1]}, phase {steps[at][0][2]}"
                        for process, (steps, at) in enumerate(zip(self.programs, decode(state, fields), strict=True))
                        if at < len(steps) and not str(steps[at][0][1][0]).endswith("issued")
                    ]
                    raise Deadlock("waiting: " + "; ".join(waits))
            level = following
        return states
