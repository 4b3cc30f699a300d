"""Runs tests with torch's kernels and our kernels for each instruction set: ``make test-capabilities``.

python tests/capabilities.py [--same] [pytest's arguments]

ATEN_CPU_CAPABILITY selects the instruction set of torch's kernels, GPTKERNELS_CPU_CAPABILITY that of our kernels. The
tests (by default ``OPERATORS``) run with all pairs that this processor supports, or, with --same, only with equal
values.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CAPABILITIES = ["default", "avx2", "avx512"]
OPERATORS = [
    *(str(p) for p in sorted((TESTS / "ops").glob("test_*.py")) if (ROOT / "ops" / f"{p.stem[5:]}.cpp").exists()),
    *(str(TESTS / name) for name in ("ops/test_helpers.py", "pytorch/test_functional.py", "fuzz/test_ops.py")),
]


def list_available():
    code = "import gptkernels; print(gptkernels.info()['cpu capability'])"
    environment = {k: v for k, v in os.environ.items() if k != "GPTKERNELS_CPU_CAPABILITY"}
    best = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return CAPABILITIES[: CAPABILITIES.index(best.stdout.strip()) + 1]


def run(torchs, ours, arguments):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": torchs, "GPTKERNELS_CPU_CAPABILITY": ours}
    command = [sys.executable, "-m", "pytest", *arguments]
    lines = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    return process.returncode, next((line for line in reversed(lines) if line), "")


def main(arguments):
    same = "--same" in arguments
    arguments = [a for a in arguments if a != "--same"] or OPERATORS
    # addopts in pyproject.toml is -q, with which pytest does not print a progress count.
    arguments = ["-o", "addopts=", "-o", "console_output_style=count", *arguments]
    found = list_available()
    for missing in CAPABILITIES[len(found) :]:
        print(f"left out, because this processor lacks it: {missing}")
    results = [(t, o, *run(t, o, arguments)) for t in found for o in found if t == o or not same]
    print(f"\n{'torch':10}{'gptkernels':12}")
    for torchs, ours, _, line in results:
        print(f"{torchs:10}{ours:12}{line.strip('= ')}")
    return max(status for _, _, status, _ in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
