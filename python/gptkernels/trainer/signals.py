"""Handles Ctrl-C and SIGTERM, after which a run stops when its current step is done."""

import os
import signal
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from gptkernels.trainer.output import write_error

ACKNOWLEDGEMENT = "\nstopping after this step, with a checkpoint; once more stops at once, without one\n"
END_SECONDS = 25.0
"""The time after a signal in which a process of `torchrun` must end. `torchrun` kills it after 30 seconds."""


class StopRequest:
    """A request to stop. `signal` is the number of the signal, or 0 if there was none."""

    signal = 0


@contextmanager
def stop_on_signals(acknowledges: bool = True, on_late: Callable[[], object] | None = None) -> Iterator[StopRequest]:
    """Record the first SIGINT or SIGTERM, and print that it was received. Later signals have their usual effect.

    Python allows handlers only in the main thread, so that in another thread no signal is recorded. It calls them when
    a blocking call, for example of CUDA, has returned. If the context has not ended `END_SECONDS` after a signal,
    another thread calls `on_late`.
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
def _time_limit(signals: Container[int], on_late: Callable[[], object] | None) -> Iterator[None]:
    if on_late is None:
        yield
        return

    def wait() -> None:
        with open(reader, "rb", buffering=0) as arrivals:
            while number := arrivals.read(1):
                if number[0] in signals and not ended.wait(END_SECONDS):
                    on_late()

    ended = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier = signal.set_wakeup_fd(writer)  # signals write their numbers there, also during a blocking call
    threading.Thread(target=wait, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(writer)
        ended.set()
