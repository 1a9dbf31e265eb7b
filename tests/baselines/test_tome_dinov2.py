"""The script that puts ToMe beside splitting on DINOv2, on a tiny model and a few photographs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tiny import tiny_vit

METHODS = ["dense", "tome", "evit", "resize", "entropy", "cosine", "random"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "tome_dinov2.py"
    spec = importlib.util.spec_from_file_location("tome_dinov2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_table_of_all_methods(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "pretrained", lambda: tiny_vit("dinov2", img_size=64, depth=4, num_classes=0))
    out = tmp_path / "table"
    few = ["--data", "photographs", "--images", "5", "--batch", "2", "--rounds", "1", "--threads", "2"]
    script.main([*few, "--out", str(out)])
    content = json.loads((tmp_path / "table.json").read_text())
    rows = {row["method"]: row for row in content["rows"]}
    assert list(rows) == METHODS
    assert content["budget"] == 0.7
    for name in METHODS[1:]:
        assert rows[name]["tokens"] < 64
        assert rows[name]["cosine"] < 1
        assert rows[name]["speedup"] > 0
    for name in ("tome", "evit", "resize"):
        assert rows[name]["flops"] <= 0.71
    assert rows["entropy"]["tokens"] == 43
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == printed
    assert [line.split(" | ")[0] for line in printed.splitlines()[2:]] == [f"| {name}" for name in METHODS]


def test_with_the_whole_budget_every_method_is_the_dense_model(script: ModuleType) -> None:
    vit = tiny_vit("dinov2", img_size=64, depth=4, num_classes=0)
    batches = script.pictures(vit, name="photographs", count=4, batch=2)
    for row in script.compare(vit, batches, 1.0, 1):
        assert (row["tokens"], row["flops"]) == (64, 1), row
        assert row["cosine"] == pytest.approx(1, abs=1e-5), row
