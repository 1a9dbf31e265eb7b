"""Compiled blocks: the same values, and as many graphs for nine token counts as for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("family", ["eva02", "windows"])
def test_nine_token_counts_take_the_graphs_of_one(family: str) -> None:
    paths = os.pathsep.join([str(TESTS), *sys.path])
    out = subprocess.run(
        [sys.executable, TESTS / "compiled.py", family], env={**os.environ, "PYTHONPATH": paths}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = json.loads(out.splitlines()[-1])
    assert found["totals"] == 9
    assert found["graphs"][-1] == found["graphs"][0] > 0
    assert max(found["errors"]) <= 1e-6
    assert found["trained"][-1] == found["trained"][0]
    assert max(found["gradients"]) <= 1e-5
