"""What became slower since a run that was kept."""

from benchmarks.harness.report import microseconds

LEAST = 0.03


def slower(old_rows, new_rows):
    """A line for each row whose kernel takes more of a copy's time than it did, by over 3 % and over both spreads.

    The copy of as many bytes in the same run stands for the machine, since one differs from the next by a few per cent;
    where there is none (host times), seconds are compared.
    """
    old = {row.key: row for row in old_rows if "ours" in row.times}
    lines = []
    for row in new_rows:
        before = old.get(row.key)
        if before is None:
            continue
        name = " ".join(row.key)
        if "ours" not in row.times:
            lines.append(f"{name}: {row.faults['ours']}")
            continue
        increase = _cost(row) / _cost(before) - 1
        if increase > max(LEAST, _spread(row), _spread(before)):
            was, now = (microseconds(r.times["ours"].median) for r in (before, row))
            lines.append(f"{name}: {increase:.1%} slower beside a copy ({was} -> {now} us)")
    return lines


def _cost(row):
    return 1 / row.share if row.share else row.times["ours"].median


def _spread(row):
    """Of ours and of the copy it is held against."""
    times = [row.times[name] for name in ("ours", "copy") if name in row.times]
    return sum((t.high - t.low) / t.median for t in times)
