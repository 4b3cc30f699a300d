"""Handles Ctrl-C and SIGTERM, after which a run stops when its current step is done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gptkernels.trainer.output import write_error

ACKNOWLEDGEMENT = "\nstopping after this step, with a checkpoint; once more stops at once, without one\n"


class StopRequest:
    """A request to stop. `signal` is the number of the signal, or 0 if there was none."""

    signal = 0


@contextmanager
def stop_on_signals(acknowledges: bool = True) -> Iterator[StopRequest]:
    """Record the first SIGINT or SIGTERM, and print that it was received. Later signals have their usual effect.

    Python allows handlers only in the main thread, so that in another thread no signal is recorded.
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
        yield request
    finally:
        restore()
