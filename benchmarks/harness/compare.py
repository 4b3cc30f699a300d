"""Compares a run with an earlier run, and lists our kernels that have become slower or fail now."""

import statistics

from benchmarks.harness.report import microseconds

LEAST = 0.03


def slower(old_rows, new_rows):
    """List the rows that fail now, or whose time grew by more than 3 % and by more than the sum of both runs' spreads.

    Machines differ by a few per cent, so each ratio of times is divided by the median ratio of the copies' times.
    """
    old = {row.key: row for row in old_rows if "ours" in row.times}
    pairs = [(old[row.key], row) for row in new_rows if row.key in old]
    copies = [_ratio(before, now, "copy") for before, now in pairs if "copy" in before.times and "copy" in now.times]
    machine = statistics.median(copies) if copies else 1.0
    lines = []
    for before, now in pairs:
        name = " ".join(now.key)
        if "ours" not in now.times:
            lines.append(f"{name}: {now.faults['ours']}")
            continue
        increase = _ratio(before, now, "ours") / machine - 1
        if increase > max(LEAST, _spread(before) + _spread(now)):
            was, took = (microseconds(row.times["ours"].median) for row in (before, now))
            lines.append(f"{name}: {increase:.1%} slower ({was} -> {took} us; copies take {machine:.3f} times as long)")
    return lines


def _ratio(before, now, name):
    return now.times[name].median / before.times[name].median


def _spread(row):
    median, low, high = row.times["ours"]
    return (high - low) / median
