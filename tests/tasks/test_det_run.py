"""Detection through the public command: numbers, results in COCO's format, pictures; and images that share a canvas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

import run
from split_core import resolve
from split_core.engine.assemble import is_reducer
from split_core.engine.methods import named
from tinycoco import BOX, annotation, entry, write
from tinydet import RUN


def rows(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads((run_dir / "results.json").read_text())["rows"]}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("det") / "run"
    methods = ["methods=[dense,random,oracle]", "eval.images=12", "eval.batch_size=6"]
    assert run.main([*RUN, "data=digits", "data.val=8", *methods, f"run_dir={run_dir}"]) == 0
    return run_dir


def test_every_method_has_its_precision_and_its_results(digits: Path) -> None:
    found = rows(digits)
    assert list(found) == ["dense", "random", "oracle", "xattn_warmstart", "xattn"]
    for name, row in found.items():
        assert {"ap", "ap50", "ap75", "ap_small"} <= set(row["further"])
        assert 0 <= row["ap"] <= row["ap50"] <= 1
        assert 0 <= row["image_ap50"] <= 1
        assert np.isfinite(row["error"])
        assert "canvas_fraction" not in row
        results = json.loads((digits / "report" / name / "detections.json").read_text())
        assert all(set(result) == {"image_id", "category_id", "bbox", "score"} for result in results)
        assert {result["image_id"] for result in results} <= set(range(1, 13))
    assert found["dense"]["object_recall"] == 1.0
    assert "ap50" in (digits / "report" / "table.md").read_text()
    per_class = json.loads((digits / "results.json").read_text())["per_class"]
    assert list(per_class["dense"]) == list("0123456789")


def test_pictures_of_the_data_and_of_one_s_own(digits: Path, tmp_path: Path) -> None:
    with Image.open(digits / "report" / "patchmaps.png") as sheet:
        assert sheet.width > (2 + 2 * 5) * 200, "image, truth, and for each of five methods its tokens and its boxes"
    Image.new("RGB", (90, 60), (200, 30, 30)).save(tmp_path / "own.png")
    assert run.main(["do=draw", "task=det", f"image={tmp_path / 'own.png'}", f"run_dir={digits}"]) == 0
    assert (digits / "report" / "draw_own.png").is_file()


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    sizes = [(100, 60), (64, 64), (60, 100), (160, 64), (80, 60), (90, 70), (70, 90), (100, 100)]
    images = [entry(10 * k + 7, *size) for k, size in enumerate(sizes)]
    annotations = [annotation(k, image["id"], BOX) for k, image in enumerate(images[:-1])]
    return write(folder, images=images, annotations=annotations)


def test_padding_spends_no_tokens_and_results_name_the_file_s_images(coco: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    data = ["data=coco", f"data.root={coco}"]
    evaluation = ["methods=[dense,entropy]", "eval.images=8", "eval.batch_size=4"]
    assert run.main([*RUN, *data, *evaluation, f"run_dir={run_dir}"]) == 0
    found = rows(run_dir)
    assert found["dense"]["token_fraction"] == 1.0
    assert 0.5 < found["dense"]["canvas_fraction"] < 0.95
    assert found["xattn"]["canvas_fraction"] < found["xattn"]["token_fraction"]
    results = json.loads((run_dir / "report" / "dense" / "detections.json").read_text())
    assert {result["image_id"] for result in results} <= {10 * k + 7 for k in range(8)}
    assert {result["category_id"] for result in results} <= {1, 90}
    for left, top, width, height in (result["bbox"] for result in results):
        assert min(left, top, width, height) >= 0
        assert max(left + width, top + height) <= 160.02
    arrays = np.load(run_dir / "per_image.npz")
    assert sorted(arrays["dense/filled"].round(2)) == sorted(arrays["dense/tokens"] / 100), "a token for each cell"
    assert run.main(["do=check", "task=det", *data]) == 0
    assert run.main(["do=bench", f"run_dir={run_dir}"]) == 0


@pytest.mark.parametrize("thresholds", ["[0.5]", "[0.5,0.6]"])
def test_a_policy_that_looks_learns_from_slopes_on_padded_canvases(coco: Path, tmp_path: Path, thresholds: str) -> None:
    settings = ["model.depth=2", "policy=look", "policy.depth=1", "estimator=credit", "estimator.images=16",
                "estimator.batch_size=8", f"task.thresholds={thresholds}", "methods=[]", "eval.images=4"]  # fmt: skip
    where = [f"data.root={coco}", f"run_dir={tmp_path / 'run'}"]
    own = [word for word in RUN if not word.startswith(("policy", "estimator", "model.depth"))]
    assert run.main([*own, *settings, "data=coco", *where, "log_every=1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    learnt = [line for line in lines if line["phase"] == "estimate_look"]
    assert len(learnt) == 2
    assert all(line["saved_spread"] > 0 and np.isfinite(line["fit"]) for line in learnt)
    found = rows(tmp_path / "run")["look"]
    assert np.isfinite(found["ap"])
    assert 0 < found["token_fraction"] <= 1


@pytest.mark.parametrize(("do", "section"), [("train", "eval"), ("compare", "eval"), ("bench", "bench")])
def test_reducers_refuse_padding_before_anything_runs(
    do: str, section: Literal["eval", "bench"], coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    arguments = [*RUN, f"do={do}", "data=coco", f"data.root={coco}", "policy=entropy", f"run_dir={where}"]
    assert run.main([*arguments, f"{section}.methods=[dense,tome]"]) == 2
    line = f"{section}.methods: tome would read padding as picture, and pictures of data=coco share a canvas"
    assert line in capsys.readouterr().err
    assert not where.exists()
    names = named(resolve.load(resolve.parse_arguments([*arguments, f"{section}.methods=all"])), section)
    assert "random" in names
    assert not any(is_reducer(name) for name in names)


def test_data_without_boxes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "run"
    assert run.main(["task=det", "data=photographs", "model.weights=none", f"run_dir={where}"]) == 2
    assert "task=det needs boxes, and this data set has none" in capsys.readouterr().err
    assert not where.exists()
