"""Runs as JSON files: the machine, the settings and the rows."""

import json

from benchmarks.harness.row import Row
from gptkernels.files.writing import replace_file


def save(path, run):
    """Each row is one line, so that two files can be compared."""
    rows = ",\n  ".join(json.dumps(row.dump() if isinstance(row, Row) else row) for row in run["rows"])
    rest = json.dumps({k: v for k, v in run.items() if k != "rows"}, indent=1)
    with replace_file(path) as temporary:
        temporary.write_text(f'{rest[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


def joined_machine(runs) -> dict:
    commits = ", ".join(dict.fromkeys(run["machine"]["commit"] for run in runs))
    return {**runs[0]["machine"], "commit": commits}


def load(*paths):
    runs = [json.loads(path.read_text()) for path in paths]
    rows = [Row.load(row) for i, run in enumerate(runs) for row in run["rows"] if i == 0 or row["op"] != "roof"]
    return {**runs[0], "machine": joined_machine(runs), "rows": rows}
