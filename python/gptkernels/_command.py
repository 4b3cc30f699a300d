"""Settings of the process in which the command `gptkernels` runs. Most of them must precede the import of torch."""

import os
import signal
import sys
from collections.abc import MutableMapping, Sequence

POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""If the user has set any of these variables, the policy is not changed."""


def is_command(arguments: Sequence[str] = sys.argv, command_line: Sequence[str] = sys.orig_argv) -> bool:
    """Return whether this process runs the command `gptkernels`, as a script or by `python -m gptkernels`."""
    if not arguments:
        return False
    program = arguments[0]
    if program == "-m":  # Python's placeholder until it has found the module
        program = command_line[len(command_line) - len(arguments)].removeprefix("-m")
    return os.path.basename(program) == "gptkernels"


def wait_passively(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads sleep while they wait, unless the user has set one of ``POLICIES``.

    The threads of GNU's OpenMP, which torch's CPU wheels contain, spin at every barrier. If other programs use the
    processors, the spinning threads delay the threads that have not reached the barrier. The import of torch makes
    OpenMP read the variables.
    """
    if not any(name in environment for name in POLICIES):
        environment["OMP_WAIT_POLICY"] = "passive"


def let_interrupts_end_imports() -> None:
    """Let Ctrl-C end the process without a traceback while torch is imported, which takes seconds.

    If the parent process disabled interrupts, as a script's shell does for a command with ``&``, they stay disabled.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminated(SystemExit):
    """SIGTERM was received."""


def accept_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt and SIGTERM raise Terminated, so that unfinished files are removed.

    With several processes SIGTERM keeps its default action, because a process that waits for the others in a collective
    would not run Python's handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and os.environ.get("WORLD_SIZE", "1") == "1":
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, _frame: object) -> None:
    raise Terminated(128 + number)
