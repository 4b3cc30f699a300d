"""Tests that OpenMP's threads wait passively in `gptkernels COMMAND` unless the user chose another policy."""

import os
import subprocess
import sys

import pytest

from gptkernels._command import POLICIES, is_command, wait_passively


@pytest.mark.parametrize(
    ("arguments", "command_line", "expected"),
    [
        (["/usr/bin/gptkernels", "train"], ["python3", "/usr/bin/gptkernels", "train"], True),
        (["gptkernels", "--traceback", "train", "-b", "4"], ["gptkernels"], True),
        (["-m", "train"], ["python3", "-u", "-m", "gptkernels", "train"], True),
        (["-m", "train"], ["python3", "-mgptkernels", "train"], True),
        (["-m", "generate"], ["python3", "-m", "gptkernels", "generate"], True),
        (["-m", "train"], ["python3", "-m", "another", "train"], False),
        (["train.py", "train"], ["python3", "train.py", "train"], False),
        (["-c"], ["python3", "-c", "import gptkernels"], False),
        ([""], ["python3"], False),
        ([], [], False),
    ],
)
def test_commands_are_recognized(arguments, command_line, expected):
    assert is_command(arguments, command_line) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_users_setting_is_kept(name):
    environment = {name: "1"}
    wait_passively(environment)
    assert environment == {name: "1"}


def test_torchs_library_obeys():
    env = {name: value for name, value in os.environ.items() if name not in POLICIES}
    result = subprocess.run(
        [sys.executable, "-m", "gptkernels", "generate", "--help"],
        env=env | {"OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    if "OMP_WAIT_POLICY" not in result.stderr:
        pytest.skip("this OpenMP does not print its settings")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in result.stderr
