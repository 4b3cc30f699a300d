"""Tests of layouts of processes."""

import re

import pytest

from gptkernels.parallel import Layout


@pytest.mark.parametrize(
    ("text", "processes", "layout"),
    [
        (None, 3, (3, 1, 1)),
        ("dp=2", 2, (2, 1, 1)),
        ("tp=2, dp=3,cp=4", 24, (3, 2, 4)),
        ("cp=2", 2, (1, 1, 2)),
    ],
)
def test_layouts(text, processes, layout):
    assert Layout.parse(text, processes) == layout


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("dp=2,pp=2", "layout 'dp=2,pp=2': the name 'pp' is unknown, must be one of dp, tp, cp"),
        ("", "layout '': the name '' is unknown, must be one of dp, tp, cp"),
        ("dp=2,dp=2", "layout 'dp=2,dp=2': dp is repeated"),
        ("dp=0", "layout 'dp=0': dp is '0', must be an integer of at least 1"),
        ("dp", "layout 'dp': dp is '', must be an integer of at least 1"),
        ("dp=2,tp=-1", "layout 'dp=2,tp=-1': tp is '-1', must be an integer of at least 1"),
        ("dp=2,tp=2", "layout 'dp=2,tp=2' is for 4 processes, but there are 2"),
        ("dp=1", "layout 'dp=1' is for 1 process, but there are 2"),
    ],
)
def test_errors(text, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        Layout.parse(text, 2)
