"""How fast policies learn: runs of several estimators, lengths and seeds in one table and one plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from PIL import Image

from split_core import resolve
from split_core.engine import learning, report
from split_core.engine.results import read_results, write_json
from split_core.errors import SplitError


def run_dir(folder: Path, estimator: dict[str, Any], images: int, seed: int, accuracy: float) -> str:
    row = {"method": "xattn_matched", "rho": 0.5, "seed": seed, "token_fraction": 0.5, "accuracy": accuracy}
    row |= {"accuracy_se": 0.01, "object_recall": accuracy / 2, "estimator": estimator["name"], "minus": {}}
    row |= {"learned_images": images, "learned_seconds": images / 100}
    content = {"command": "python run.py", "commit": "abc", "machine": "CPU", "rows": [row]}
    write_json(folder / "results.json", content)
    OmegaConf.save(OmegaConf.create({"estimator": estimator}), folder / "config.yaml")
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    blend = {"name": "gate", "relax": "blend"}
    return [
        run_dir(tmp_path / "a", {"name": "ppo"}, 4000, 0, 0.5),
        run_dir(tmp_path / "b", {"name": "ppo"}, 4000, 1, 0.7),
        run_dir(tmp_path / "c", {"name": "ppo"}, 8000, 0, 0.8),
        run_dir(tmp_path / "d", blend, 4000, 0, 0.2),
    ]


def test_points_are_means_over_seeds_by_learner_and_images(runs: list[str]) -> None:
    content = learning.gather(runs, "curves")
    found = {(row["learner"], row["learned_images"]): row for row in content["aggregate"]}
    assert list(found) == [("gate (blend)", 4000), ("ppo", 4000), ("ppo", 8000)]
    assert found["ppo", 4000]["accuracy"]["mean"] == pytest.approx(0.6)
    assert found["ppo", 4000]["learned_seconds"]["mean"] == 40
    assert found["ppo", 8000]["seeds"] == 1
    text = learning.table(content).markdown()
    assert "0.600" in text
    assert "gate (blend)" in text


def test_the_command_writes_json_table_and_picture(runs: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out" / "curves"
    settings = {"task": "cls", "data": "digits", "model": "digits_vit", "policy": "xattn", "do": "report"}
    settings["report"] = {"kind": "learning", "runs": runs, "out": str(out)}
    report.main(resolve.load(settings))
    assert len(read_results(out.with_suffix(".json"), hint="")["rows"]) == 4
    assert out.with_suffix(".md").read_text().startswith("# curves")
    with Image.open(out.with_suffix(".png")) as picture:
        assert picture.width > 500
    written = out.with_suffix(".md").read_text()
    settings["report"] = {"out": str(out)}  # remade from the json alone
    report.main(resolve.load(settings))
    assert out.with_suffix(".md").read_text() == written


def test_a_run_without_a_learned_policy_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_json(folder / "results.json", {"rows": [{"method": "entropy", "rho": 0.5, "seed": 0}]})
    with pytest.raises(SplitError, match="has learned no policy"):
        learning.gather([str(folder)], "curves")


def test_a_run_that_kept_snapshots_is_a_path(tmp_path: Path) -> None:
    folder = Path(run_dir(tmp_path / "a", {"name": "ppo"}, 4000, 0, 0.8))
    content = read_results(folder / "results.json", hint="")
    own = {**content["rows"][0], "ap": 0.4, "further": ["ap"]}
    bare = {key: value for key, value in own.items() if not key.startswith(("learned", "estimator"))}
    rows = [{**bare, "method": "dense"}, {**bare, "method": "xattn_warmstart", "ap": 0.1}]
    rows += [{**own, "method": "xattn_step9", "learned_images": 1000, "ap": 0.2}, {**own, "method": "xattn", "ap": 0.3}]
    write_json(folder / "results.json", {**content, "rows": [*rows, own]})
    found = learning.gather([str(folder)], "curves")
    assert [(row["learned_images"], row["ap"]["mean"]) for row in found["aggregate"]] == [
        (0, 0.1), (1000, 0.2), (4000, 0.4)
    ]  # fmt: skip
    assert "ap" in learning.table(found).header
    learning.plot(found, tmp_path / "path.png")
    assert (tmp_path / "path.png").is_file()
