"""Handles Ctrl-C and SIGTERM, after which a run stops when its current step is done."""

import os
import signal
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from gptkernels.trainer.output import write_error

ACKNOWLEDGEMENT = "\nstopping after this step, with a checkpoint; once more stops at once, without one\n"
LATE_SECONDS = 20.0
"""torch's launcher kills a process 30 seconds after SIGTERM, unless it was given another time."""


class StopRequest:
    """A request to stop. `signal` is the number of the signal, or 0 if there was none."""

    signal = 0


@contextmanager
def stop_on_signals(acknowledges: bool = True, on_late: Callable[[], object] = lambda: None) -> Iterator[StopRequest]:
    """Record the first SIGINT or SIGTERM, after which later ones have their usual effect.

    Python allows handlers only in the main thread, so that in another thread no signal is recorded. It calls them when
    a blocking call, for example of CUDA, has returned.

    Args:
        acknowledges: print that the signal was received.
        on_late: called in another thread, also if the main thread is blocked, when the context has not ended
            `LATE_SECONDS` after a signal.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: object) -> None:
        request.signal = number
        restore()
        if acknowledges:
            write_error(ACKNOWLEDGEMENT)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, note)
    try:
        with _time_limit(previous, on_late):
            yield request
    finally:
        restore()


@contextmanager
def _time_limit(signals: Container[int], on_late: Callable[[], object]) -> Iterator[None]:
    """Call `on_late` in a thread if the context has not ended `LATE_SECONDS` after one of the signals.

    Signals write their numbers to Python's wakeup descriptor, also during a blocking call. If it is in use, for example
    by asyncio, there is no time limit.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()

    def wait() -> None:
        with open(reader, "rb", buffering=0) as arrivals:
            while number := arrivals.read(1):
                if number[0] in signals and not ended.wait(LATE_SECONDS):
                    on_late()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    other = signal.set_wakeup_fd(writer)
    if other != -1:
        signal.set_wakeup_fd(other)
    try:
        yield
    finally:
        ended.set()
        if other == -1:
            signal.set_wakeup_fd(-1)
        os.close(writer)
