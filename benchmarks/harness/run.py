"""A run: its machine, settings and rows, kept as JSON."""

import json

from benchmarks.harness.row import Row


def save(path, run):
    """Write it; the rows one a line, so that two runs can be compared by eye."""
    rows = ",\n  ".join(json.dumps(row.dump()) for row in run["rows"])
    rest = json.dumps({k: v for k, v in run.items() if k != "rows"}, indent=1)
    path.write_text(f'{rest[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


def load(*paths):
    """One run of all these files' rows, the roof's once; the machine is the first one's, with every file's commit."""
    runs = [json.loads(path.read_text()) for path in paths]
    rows = [Row.load(row) for i, run in enumerate(runs) for row in run["rows"] if i == 0 or row["op"] != "roof"]
    commits = ", ".join(dict.fromkeys(run["machine"]["commit"] for run in runs))
    return {**runs[0], "machine": {**runs[0]["machine"], "commit": commits}, "rows": rows}
