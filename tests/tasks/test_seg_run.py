"""Segmentation through the engine: phases, numbers of images and of the data set, recall's sanity check, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from split_core import resolve
from split_core.config import RunConfig
from split_core.engine import bench, draw, evaluate, train
from split_core.errors import SplitError

SETTINGS: dict[str, Any] = {
    "task": {"name": "seg", "taps": [0, 1]},
    "data": {"name": "digits", "val": 16},
    "model": {"name": "digits_vit", "weights": "none", "dim": 16, "depth": 2, "heads": 2},
    "policy": "xattn",
    "budget": 0.5,
    "adapt": {"images": 32, "batch_size": 16, "dense_fraction": 0.25, "backbone_lr": 1e-3},
    "estimator": {"name": "ppo", "images": 16, "batch_size": 16, "lr": 1e-3, "reach": 1},
    "eval": {"images": 24, "batch_size": 8, "random_draws": 2, "methods": ["dense", "random", "oracle"]},
    "bench": {"batch_sizes": [4], "repeats": 1, "warmup": 0},
    "draw": {"count": 2},
    "device": "cpu",
    "threads": 1,
}


def configure(run_dir: Path, **changes: Any) -> RunConfig:
    return resolve.load(resolve.merge(SETTINGS, {"run_dir": str(run_dir), **changes}))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("seg") / "run"
    train.main(configure(run_dir))
    return run_dir


def test_rows_hold_numbers_of_images_and_of_the_data_set(done: Path) -> None:
    results = json.loads((done / "results.json").read_text())
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == ["dense", "random", "oracle", "xattn_warmstart", "xattn"]
    for name, row in rows.items():
        assert row["further"] == ["miou", "aacc", "boundary_recall"]
        present = [v for v in results["per_class"][name].values() if v is not None]
        assert len(results["per_class"][name]) == 11
        if name != "random":  # there the mean over draws of the means need not be the mean of the means
            assert row["miou"] == pytest.approx(np.mean(present))
        assert 0 < row["aacc"] <= 1
    assert rows["dense"]["boundary_recall"] == rows["dense"]["object_recall"] == 1.0
    arrays = np.load(done / "per_image.npz")
    assert arrays["xattn/score"].shape == arrays["xattn/boundary_cells"].shape == (24,)
    assert "miou" in (done / "report" / "table.md").read_text()
    assert (done / "report" / "classes.md").read_text().count("| background") == 1


def test_random_recalls_its_budget(done: Path, tmp_path: Path) -> None:
    rows = json.loads((done / "results.json").read_text())["rows"]
    row = next(row for row in rows if row["method"] == "random")
    arrays = np.load(done / "per_image.npz")
    split = (row["token_fraction"] - 0.25) / 0.75  # the share of parents that split is that of cells read fine
    for kind in ("object", "boundary"):
        cells = arrays[f"random/{kind}_cells"].sum() * 2  # two draws
        assert abs(row[f"{kind}_recall"] - split) < 5 * np.sqrt(4 * 0.25 / cells), "four cells share a parent"


def test_pictures_stand_beside_truth_and_output(done: Path, tmp_path: Path) -> None:
    path = done / "report" / "patchmaps.png"
    with Image.open(path) as sheet:
        width = sheet.width
    draw.main(configure(done, do="draw"))
    with Image.open(path) as sheet:
        assert sheet.width == width
        across = (width - draw.LEFT) / (200 + draw.GAP)
    assert across == 2 + 2 * 5, "image, truth, and for each of five methods its tokens and its output"
    Image.new("RGB", (90, 60), (200, 30, 30)).save(tmp_path / "own.png")
    draw.main(configure(done, do="draw", draw={"image": str(tmp_path / "own.png")}))
    with Image.open(done / "report" / "draw_own.png") as sheet:
        assert sheet.width > 3 * 200


def test_bench_times_the_task_s_own_head(done: Path) -> None:
    bench.main(configure(done, do="bench"))
    rows = json.loads((done / "bench.json").read_text())["rows"]
    assert rows[0]["method"] == "timm"
    assert all(row["stages_s"]["head"] > 0 for row in rows[1:])


def test_evaluation_again_gives_the_same_numbers(done: Path) -> None:
    before = json.loads((done / "results.json").read_text())
    evaluate.main(configure(done, do="eval"))
    after = json.loads((done / "results.json").read_text())
    for a, b in zip(before["rows"], after["rows"], strict=True):
        assert a["miou"] == pytest.approx(b["miou"])
    assert before["per_class"].keys() == after["per_class"].keys()


def test_data_without_label_maps_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SplitError, match="task=seg needs label maps"):
        train.main(configure(tmp_path / "run", data={"name": "photographs"}, model={"name": "timm", "weights": "none",
                   "architecture": "vit_tiny_patch16_224"}))  # fmt: skip
    assert not (tmp_path / "run").exists()
