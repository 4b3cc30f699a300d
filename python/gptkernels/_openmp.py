"""Sets the wait policy of OpenMP's threads in `gptkernels train`. OpenMP reads the policy when torch is imported.

The threads of GNU's OpenMP, which torch's CPU wheels contain, spin at every barrier unless there are more threads than
processors. If other programs use the processors, a spinning thread delays the threads that the barrier waits for. With
a passive policy threads sleep instead. GNU's, LLVM's and Intel's OpenMP read it from OMP_WAIT_POLICY.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence

POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""If the user has set any of these variables, the policy is not changed."""


def wait_passively_in_training(
    arguments: Sequence[str] = sys.argv,
    command_line: Sequence[str] = sys.orig_argv,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Set a passive wait policy if this process is `gptkernels train` and the user has not set a policy.

    Args:
        arguments: `sys.argv` while this package is imported.
        command_line: the process's command line, with the interpreter and its options.
        environment: the environment variables, which are changed.
    """
    if _is_training(arguments, command_line) and not any(name in environment for name in POLICIES):
        environment["OMP_WAIT_POLICY"] = "passive"


def _is_training(arguments: Sequence[str], command_line: Sequence[str]) -> bool:
    """Return whether this process is `gptkernels [options] train`, as a script or by `python -m`."""
    if not arguments:
        return False
    program = arguments[0]
    if program == "-m":  # Python's placeholder until it has found the module
        program = command_line[len(command_line) - len(arguments)].removeprefix("-m")
    command = next((argument for argument in arguments[1:] if not argument.startswith("-")), None)
    return os.path.basename(program) == "gptkernels" and command == "train"
