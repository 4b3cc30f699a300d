"""A run as JSON: its machine, settings and rows."""

import json

from benchmarks.harness.row import Row


def save(path, run):
    """Write a run with one row per line, so that two files can be compared."""
    rows = ",\n  ".join(json.dumps(row.dump()) for row in run["rows"])
    rest = json.dumps({k: v for k, v in run.items() if k != "rows"}, indent=1)
    path.write_text(f'{rest[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


def load(*paths):
    """Join files to one run; the first file's machine and roof are used, and all files' commits are listed."""
    runs = [json.loads(path.read_text()) for path in paths]
    rows = [Row.load(row) for i, run in enumerate(runs) for row in run["rows"] if i == 0 or row["op"] != "roof"]
    commits = ", ".join(dict.fromkeys(run["machine"]["commit"] for run in runs))
    return {**runs[0], "machine": {**runs[0]["machine"], "commit": commits}, "rows": rows}
