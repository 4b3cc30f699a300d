"""A watchdog that ends a run that hangs, for example because the GPU does not answer."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STALLED = 4
"""The exit status of a run that the watchdog has ended."""
INTERVALS = 60
"""The number of checks in the allowed time."""
REPORT_SECONDS = 10.0


class Watchdog:
    """Ends the process if no unit of work is finished for `minutes` minutes (0: never).

    The watchdog's thread counts intervals, not seconds, so that a stop of the process (Ctrl-Z, a debugger) counts as
    one interval. Only work inside `watch` is watched, because other work, such as printing, may wait for a reader.
    Before the process ends, another thread calls `report` with the argument of `watch`. The process ends when `report`
    returns, or after `REPORT_SECONDS`.
    """

    def __init__(self, minutes: float, report: Callable[[str], object]) -> None:
        self._interval = 60 * minutes / INTERVALS
        self._report = report
        self._what: str | None = None
        self._finished = 0  # written by the main thread only
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._interval:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        self._what = what
        try:
            yield
        finally:
            self._what = None
            self.tick()

    def tick(self) -> None:
        self._finished += 1

    def _run(self) -> None:
        seen, idle = -1, 0
        while not self._closed.wait(self._interval):
            finished, what = self._finished, self._what
            if what is None or finished != seen:
                seen, idle = finished, 0
                continue
            idle += 1
            if idle == INTERVALS:
                self._end_process(what)

    def _end_process(self, what: str) -> None:
        report = threading.Thread(target=self._report, args=(what,), daemon=True)
        report.start()
        report.join(REPORT_SECONDS)  # the report may wait for a lock of the blocked thread
        os._exit(STALLED)
