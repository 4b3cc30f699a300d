"""Tests that a short campaign of the file fuzzer finds nothing, and that the fuzzer finds planted faults."""

import json
import os
import time

import pytest
import torch

from fuzz import files


def test_a_short_campaign(capsys):
    assert files.main(["--calls", "400", "--seed", "7"]) == 0, capsys.readouterr().out
    assert "files: 400 calls, seed 7:" in capsys.readouterr().out


def raise_key_error(path):
    raise KeyError("x")


def raise_without_a_message(path):
    raise ValueError


@pytest.mark.parametrize(
    ("load", "checksummed", "outcome", "found"),
    [
        (raise_key_error, False, "finding", "KeyError in test_files.py raise_key_error"),
        (raise_without_a_message, False, "finding", "ValueError without a message"),
        (lambda path: path.read_bytes(), True, "finding", "other content despite checksums"),
        (lambda path: path.read_bytes(), False, "other", ""),
        (lambda path: [torch.ones(3), {"a": None}], True, "same", ""),
        (lambda path: json.loads(path.read_bytes()), True, "refused", ""),
    ],
)
def test_outcomes_of_damaged_files(tmp_path, load, checksummed, outcome, found):
    kind = files.Kind("x", b"intact", load, checksummed)
    judged = files.judge(files.Call(kind, b"other"), tmp_path)
    assert judged[0] == outcome
    assert found in judged[1]


def crash(call, folder):
    if call.data == b"crash":
        os.kill(os.getpid(), 9)
    if call.data == b"hang":
        time.sleep(100)
    return "same", ""


def test_the_campaign_survives_crashes_and_hangs(monkeypatch):
    """The child processes are forked, so that they contain the functions that the test replaced."""
    kind, calls = files.Kind("x", b"", None), [b"", b"crash", b"", b"hang", b""]
    monkeypatch.setattr(files, "make_kinds", lambda folder: [])
    monkeypatch.setattr(files, "make_call", lambda kinds, seed, number: files.Call(kind, calls[number]))
    monkeypatch.setattr(files, "judge", crash)
    get_context = files.multiprocessing.get_context
    monkeypatch.setattr(files.multiprocessing, "get_context", lambda method: get_context("fork"))
    monkeypatch.setattr(files, "SECONDS", 3)
    counts, findings = files.run(range(5), 3)
    assert counts == {"same": 3, "finding": 2}
    assert findings == [
        "call 1 of seed 3, x: ends the process with status -9",
        "call 3 of seed 3, x: takes more than 3 s",
    ]


def test_calls_can_be_repeated(tmp_path):
    kinds = files.make_kinds(tmp_path)
    calls = [files.make_call(kinds, 5, number) for number in range(100)]
    assert calls == [files.make_call(kinds, 5, number) for number in range(100)]
    assert {call.kind.name for call in calls} == {kind.name for kind in kinds}
    assert sum(call.data == call.kind.data for call in calls) < 10
