"""The results of ``gradcheck_ops``, and their table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

CHECKS = ("float64", "float32", "bfloat16", "float16", "gradcheck", "gradgradcheck", "opcheck")


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one check of one case.

    Attributes:
        case: the operator's name, followed by the variant's.
        check: one of ``CHECKS``: a dtype, or torch's ``gradcheck``, ``gradgradcheck`` or ``opcheck``.
        passed: whether the check passed.
        error: our largest error divided by the allowed error, at most 1; None if the check failed or is one of torch's.
        message: the error message of a check that failed.
    """

    case: str
    check: str
    passed: bool
    error: float | None = None
    message: str = ""


@dataclasses.dataclass(repr=False)
class Report:
    """The results of all checks on ``device``, and their duration ``seconds``; ``print(report)`` shows a table."""

    device: str
    results: list[Result] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return not self.failures

    @property
    def failures(self) -> list[Result]:
        """The results that did not pass."""
        return [result for result in self.results if not result.passed]

    def line(self) -> str:
        """Return one line: the numbers of checks and of failures, the device and the duration."""
        failed = f"{len(self.failures)} FAILED" if self.failures else "all passed"
        return f"gptkernels: {len(self.results)} checks on {self.device} in {self.seconds:.0f} s: {failed}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for ``json``."""
        return {"passed": self.passed, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        cases = dict.fromkeys(result.case for result in self.results)
        rows = [row([result for result in self.results if result.case == case]) for case in cases]
        return "\n".join([HEADER, *rows, self.summary()])

    __repr__ = __str__

    def summary(self) -> str:
        """Return a line for each failure, followed by :meth:`line`."""
        failures = [f"{result.case}, {result.check}: {result.message}" for result in self.failures]
        return "\n".join([*failures, self.line()])


_NAME = 40  # the width of the first column
HEADER = "A number is our largest error as a fraction of the allowed error, so that 1.00 would be the limit.\n"
HEADER += "op".ljust(_NAME) + "".join(f"  {check:>8}" for check in CHECKS)


def row(results: Sequence[Result]) -> str:
    cells = {result.check: _cell(result) for result in results}
    return results[0].case.ljust(_NAME) + "".join(
        f"  {cells.get(check, '-').rjust(max(8, len(check)))}" for check in CHECKS
    )


def _cell(result: Result) -> str:
    if not result.passed:
        return "FAILED"
    return "ok" if result.error is None else f"{result.error:.2f}"
