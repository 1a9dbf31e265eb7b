"""Reducers in the engine: trained, evaluated, timed and compared as policies are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tinyrun
from split_core import resolve
from split_core.config import RunConfig
from split_core.engine import bench, compare, evaluate, train
from split_core.engine.deploy import deployed
from split_core.engine.groups import parameter_groups
from split_core.engine.log import RunLog
from split_core.engine.methods import named, plan, sources
from split_core.engine.session import Session
from split_core.errors import SplitError
from split_core.flops import backbone_flops
from split_core.reducer import Reducer

REDUCERS = ["tome", "dtem", "evit", "dynamicvit", "resize"]
SETTINGS: dict[str, Any] = resolve.merge(
    tinyrun.SETTINGS,
    {
        "model": {"depth": 4},
        "policy": "entropy",
        "budget": 0.7,
        "adapt": {"images": 48, "dense_fraction": 0.0},
        "eval": {"images": 12, "methods": ["dense", *REDUCERS, "quadformer"]},
    },
)


def configure(run_dir: Path, **changes: Any) -> RunConfig:
    return resolve.load(resolve.merge(SETTINGS, {"run_dir": str(run_dir), **changes}))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    train.main(configure(run_dir))
    return run_dir


def rows(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads((run_dir / "results.json").read_text())["rows"]}


def test_all_methods_are_fine_tuned_alike_and_stand_in_one_table(straight: Path) -> None:
    methods = ["dense", *REDUCERS, "quadformer", "entropy"]
    assert {path.stem for path in (straight / "models").iterdir()} == set(methods)
    assert list(rows(straight)) == methods
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    for name in methods:
        assert sum(line["phase"] == f"adapt_{name}" for line in lines) == 3
    assert (straight / "report" / "table.md").is_file()
    dynamic = next(line for line in lines if line["phase"] == "adapt_dynamicvit")
    assert {"ratio_0", "distill"} <= set(dynamic)


def test_reducers_stay_within_the_flops_of_splitting_at_the_budget(straight: Path) -> None:
    vit = Session(configure(straight)).learner("entropy").model.vit
    allowed = backbone_flops(vit, 100) / backbone_flops(vit, 70)
    for name in REDUCERS:
        assert rows(straight)[name]["ideal_speedup"] >= allowed - 1e-9
    assert rows(straight)["quadformer"]["token_fraction"] == pytest.approx(0.7)
    assert rows(straight)["quadformer"]["rule"] == "image"
    assert rows(straight)["evit"]["rule"].startswith("keep=0.")


def test_scores_are_paired_over_the_same_images(straight: Path) -> None:
    arrays = np.load(straight / "per_image.npz")
    own = arrays["entropy/score"] - arrays["tome/score"]
    assert rows(straight)["entropy"]["minus"]["tome"]["mean"] == pytest.approx(own.mean())


def test_evaluation_alone_repeats_the_run(straight: Path) -> None:
    before = rows(straight)
    evaluate.main(configure(straight, do="eval"))
    for name, row in rows(straight).items():
        for key in ("accuracy", "error", "token_fraction", "ideal_speedup", "minus"):
            assert row[key] == before[name][key], (name, key)


class Killed(BaseException):
    """Stands for a kill signal."""


@pytest.mark.parametrize("name", ["dynamicvit", "dtem"])
def test_a_killed_run_resumed_ends_as_the_straight_one(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = configure(tmp_path / "run", eval={"methods": [name]})
    write = RunLog.write

    def write_or_die(log: RunLog, at: str, now: int, numbers: Any) -> None:
        write(log, at, now, numbers)
        if (at, now) == (f"adapt_{name}", 2):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write_or_die)
        with pytest.raises(Killed):
            train.main(config)
    train.main(config)
    mine, theirs = (load_file(place / "models" / f"{name}.safetensors") for place in (tmp_path / "run", straight))
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_what_decides_learns_at_the_policy_s_rate_and_the_head_at_its_own(tmp_path: Path) -> None:
    config = configure(tmp_path, warmstart={"policy_lr": 0.5}, adapt={**SETTINGS["adapt"], "head_lr": 0.25})
    learner = Session(config).learner("dtem")
    groups = parameter_groups(learner, config)
    assert [group["lr"] for group in groups] == [1e-3, 0.25, 0.5]
    own = dict(learner.model.named_parameters())
    assert {id(p) for p in groups[2]["params"]} == {id(p) for n, p in own.items() if n.startswith("metric.")}
    assert {id(p) for p in groups[1]["params"]} == {id(own["vit.head.weight"]), id(own["vit.head.bias"])}


def test_a_reducer_starts_from_a_backbone_that_splitting_trained(straight: Path, tmp_path: Path) -> None:
    weights = straight / "models" / "entropy.safetensors"
    there = load_file(weights)
    model = Session(configure(tmp_path, init=str(weights))).learner("dynamicvit").model
    for key, value in model.vit.state_dict().items():
        assert torch.equal(value, there[f"model.vit.{key}"])


def test_settings_of_reducers_and_a_drawn_budget(tmp_path: Path) -> None:
    adapt = {**SETTINGS["adapt"], "images": 16, "budget_range": [0.6, 0.9]}
    changes: dict[str, Any] = {"reducers": {"tome": {"proportional": False}}, "eval": {"methods": ["tome"]}}
    config = configure(tmp_path / "run", adapt=adapt, **changes)
    train.main(config)
    session = Session(config)
    model = deployed(session, plan(config)[0]).model
    assert isinstance(model, Reducer)
    assert not model.config.proportional
    reference = session.learner("tome").model
    assert isinstance(reference, Reducer)
    assert model.config.r == reference.settings_for(0.7).r
    with pytest.raises(SplitError, match=r"reducers: no reducer is called 'tomee'\. Did you mean tome\?"):
        configure(tmp_path, reducers={"tomee": {}})
    with pytest.raises(SplitError, match="reducers"):
        configure(tmp_path, reducers={"tome": {"rr": 1}})


def test_all_is_every_method_that_needs_neither_labels_nor_an_estimator(tmp_path: Path) -> None:
    names = named(configure(tmp_path, eval={"methods": "all"}), "eval")
    assert set(names) >= {"dense", "random", "cosine", "quadformer", *REDUCERS}
    assert not {"oracle", "xattn", "entropy", "all"} & set(names)
    assert sources(plan(configure(tmp_path, eval={"methods": "all"})))[-1] == "entropy"
    with pytest.raises(SplitError, match="Did you mean tome"):
        configure(tmp_path, eval={"methods": ["tomme"]})


def test_bench_times_all_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model": {"pool": "avg"},
        "bench": {**SETTINGS["bench"], "methods": "all", "budgets": [0.6, 0.35]},
    }
    content = bench.run(Session(configure(tmp_path, do="bench", **changes)))
    timed = {(row["method"], row["rho"], row["lengths"]) for row in content["rows"]}
    assert ("tome", 0.6, "equal") in timed
    assert ("quadformer", 0.35, "equal") in timed
    assert not any(name == "quadformer" and lengths == "ragged" for name, _, lengths in timed)
    tome = next(row for row in content["rows"] if row["method"] == "tome")
    assert tome["tokens_per_layer"][0][0] == 100
    assert "stages_s" not in tome
    assert any(line.startswith("tome is left out: ToMe cannot be matched to") for line in content["left_out"])


def test_a_comparison_over_budgets_and_seeds(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "do": "compare", "compare": {"budgets": [0.7, 0.3], "seeds": [0, 1]},
        "eval": {**SETTINGS["eval"], "methods": ["dense", "tome", "resize"]},
        "adapt": {**SETTINGS["adapt"], "images": 16}, "bench": {**SETTINGS["bench"], "batch_sizes": [1, 2]},
        "report": {"out": str(tmp_path / "out")},
    }  # fmt: skip
    config = configure(tmp_path / "run", **changes)
    compare.main(config)
    content = json.loads((tmp_path / "out.json").read_text())
    found = {(row["method"], row["rho"]): row["seeds"] for row in content["aggregate"]}
    assert found == {
        ("dense", 0.7): 2, ("tome", 0.7): 2, ("resize", 0.7): 2, ("entropy", 0.7): 2,
        ("dense", 0.3): 2, ("resize", 0.3): 2, ("entropy", 0.3): 2,
    }  # fmt: skip
    text = (tmp_path / "out.md").read_text()
    assert "tome is left out: ToMe cannot be matched to budget 0.3" in text
    assert "speed-up b=2" in text
    assert (tmp_path / "out.png").stat().st_size > 10_000
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*/models/*")}
    assert len(stamps) == 14
    compare.main(config)  # goes on where it stopped: nothing is trained twice
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*/models/*")}
