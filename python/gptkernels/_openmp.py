"""How the threads of `gptkernels train` wait for each other; set before torch is loaded, which is when OpenMP reads it.

GNU's OpenMP, which torch's CPU wheels bring, spins at every barrier while there are no more threads than processors.
On a busy machine each barrier then takes as long as its slowest thread waits for a processor. With a passive policy
threads sleep instead. LLVM's and Intel's OpenMP obey the same variable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Any of these, set by the user, is the user's choice."""


def wait_passively_in_training(
    arguments: Sequence[str] = sys.argv,
    command_line: Sequence[str] = sys.orig_argv,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Set a passive wait policy, where this process is `gptkernels train` and the user has set none.

    Args:
        arguments: of the process, as `sys.argv` has them while this package is imported.
        command_line: of the process, with the interpreter and its options.
        environment: what is changed.
    """
    if _is_training(arguments, command_line) and not any(name in environment for name in POLICIES):
        environment["OMP_WAIT_POLICY"] = "passive"


def _is_training(arguments: Sequence[str], command_line: Sequence[str]) -> bool:
    """Whether this is `gptkernels [options] train`, as a script or by `python -m`."""
    if not arguments:
        return False
    program = arguments[0]
    if program == "-m":  # what Python has there until it has found the module
        program = command_line[len(command_line) - len(arguments)].removeprefix("-m")
    command = next((argument for argument in arguments[1:] if not argument.startswith("-")), None)
    return os.path.basename(program) == "gptkernels" and command == "train"
