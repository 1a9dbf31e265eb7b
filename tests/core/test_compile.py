"""Compiled blocks: the same values, and as many graphs for nine token counts as for one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def compiled(what: str, family: str, **environment: str) -> dict[str, Any]:
    paths = os.pathsep.join([str(TESTS), *sys.path])
    out = subprocess.run(
        [sys.executable, TESTS / "compiled.py", what, family], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    ).stdout  # fmt: skip
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize("family", ["eva02", "windows"])
def test_nine_token_counts_take_the_graphs_of_one(family: str) -> None:
    found = compiled("graphs", family)
    assert found["totals"] == 9
    assert found["graphs"][-1] == found["graphs"][0] > 0
    assert max(found["errors"]) <= 1e-6
    assert found["trained"][-1] == found["trained"][0]
    assert max(found["gradients"]) <= 1e-5


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler (g++) to make code for a CPU")
def test_nine_token_counts_take_the_code_of_one(tmp_path: Path) -> None:
    """Through inductor itself, from an empty cache."""
    found = compiled("code", "vit", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert found["totals"] == 9
    assert found["compiled"][-1] == found["compiled"][0] > 0
    assert max(found["errors"]) <= 1e-5
