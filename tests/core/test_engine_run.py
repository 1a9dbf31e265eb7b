"""The engine on a run of seconds: phases, what they leave, and that a killed run ends as a straight one does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from split_core import resolve
from split_core.engine import evaluate, export, train
from split_core.engine.checkpoint import Checkpoints, load_weights, save_weights
from split_core.engine.deploy import deployed
from split_core.engine.groups import learning_rate_factor, parameter_groups
from split_core.engine.loader import StepSampler, step_seed
from split_core.engine.log import RunLog
from split_core.engine.methods import plan, sources
from split_core.engine.session import Session
from split_core.errors import SplitError
from split_core.task import Task
from tinyrun import SETTINGS, configure, metrics


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    train.main(configure(run_dir))
    return run_dir


def test_a_run_leaves_weights_numbers_and_a_report(straight: Path) -> None:
    names = {path.stem for path in (straight / "models").iterdir()}
    assert names == {"dense", "random", "xattn_warmstart", "xattn"}
    results = json.loads((straight / "results.json").read_text())
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == ["dense", "random", "cosine", "oracle", "xattn_warmstart", "xattn"]
    assert {"command", "commit", "machine"} < set(results)
    assert rows["dense"]["token_fraction"] == 1.0
    assert rows["dense"]["object_recall"] == 1.0
    assert rows["oracle"]["backbone"] == rows["cosine"]["backbone"] == "xattn_warmstart"
    assert "images_per_s" not in rows["oracle"]  # it sees labels: no deployment to time
    arrays = np.load(straight / "per_image.npz")
    own = arrays["xattn/score"] - arrays["dense/score"]
    assert rows["xattn"]["minus"]["dense"]["mean"] == pytest.approx(own.mean())
    assert rows["xattn"]["minus"]["dense"]["se"] == pytest.approx(own.std(ddof=1) / np.sqrt(20))
    assert (straight / "report" / "table.md").is_file()
    assert not list((straight / "checkpoints").glob("*/*")), "finished phases keep no checkpoints"


def test_ppo_moves_only_the_policy(straight: Path) -> None:
    before, after = (load_file(straight / "models" / f"{name}.safetensors") for name in ("xattn_warmstart", "xattn"))
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved
    assert all(key.startswith("model.policy.") for key in moved)


def test_the_first_batches_measure_the_price_of_a_token(straight: Path) -> None:
    rows = [row for row in metrics(straight) if row["phase"] == "estimate_xattn"]
    assert [row["step"] for row in rows] == list(range(5))
    assert "clip_fraction_1" not in rows[1]
    assert all(row["clip_fraction_1"] == 0 for row in rows[2:]), "the ratio is one before the first update"


class Killed(BaseException):
    """Stands for a kill signal: no handler of the code under test catches it."""


@pytest.mark.parametrize(("phase", "step"), [("adapt_random", 3), ("adapt_xattn_warmstart", 2), ("estimate_xattn", 3)])
def test_a_killed_run_resumed_ends_as_the_straight_one(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, step: int
) -> None:
    run_dir = tmp_path / "run"
    write = RunLog.write

    def write_or_die(log: RunLog, at: str, now: int, numbers: Any) -> None:
        write(log, at, now, numbers)
        if (at, now) == (phase, step):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write_or_die)
        with pytest.raises(Killed):
            train.main(configure(run_dir))
    train.main(configure(run_dir))
    assert metrics(run_dir) == metrics(straight)
    for weights in (straight / "models").iterdir():
        mine, theirs = load_file(run_dir / "models" / weights.name), load_file(weights)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), weights.name


ESTIMATORS: dict[str, dict[str, Any]] = {
    "credit": {"estimator": {"name": "credit", "images": 80, "batch_size": 16}},
    "gate": {"estimator": {"name": "gate", "images": 80, "batch_size": 16}, "error": "distill"},
    "supervised": {"estimator": {"name": "supervised", "images": 80, "batch_size": 16}},
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("policy", ["xattn", "look"])
def test_other_estimators_run_resume_and_deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, policy: str
) -> None:
    changes = {**ESTIMATORS[name], "policy": policy, "eval": {**SETTINGS["eval"], "methods": []}}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train.main(configure(whole, **changes))
    write = RunLog.write

    def write_or_die(log: RunLog, at: str, now: int, numbers: Any) -> None:
        write(log, at, now, numbers)
        if (at, now) == (f"estimate_{policy}", 2):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write_or_die)
        with pytest.raises(Killed):
            train.main(configure(cut, **changes))
    train.main(configure(cut, **changes))
    assert metrics(cut) == metrics(whole)
    rows = [{k: v for k, v in row.items() if "per_s" not in k and "speed" not in k and k != "learned_seconds"}
            for run in (whole, cut) for row in json.loads((run / "results.json").read_text())["rows"]]  # fmt: skip
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]
    # Scores that only order parents are deployed at the threshold that spends the budget on training images.
    learner = deployed(Session(configure(whole, **changes)), plan(configure(whole, **changes))[-1])
    assert (learner.model.decision.offset != 0) == (name != "gate")


def test_distillation_needs_a_distance_between_outputs() -> None:
    with pytest.raises(SplitError, match="Task defines no distance between outputs"):
        Task().distance(torch.zeros(1), torch.zeros(1))


def test_evaluation_alone_repeats_the_run(straight: Path) -> None:
    before = json.loads((straight / "results.json").read_text())["rows"]
    evaluate.main(configure(straight, do="eval"))
    after = json.loads((straight / "results.json").read_text())["rows"]
    for old, new in zip(before, after, strict=True):
        for key in ("accuracy", "error", "token_fraction", "object_recall", "minus"):
            assert old[key] == new[key], key


def test_evaluating_before_training_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SplitError, match=r"dense.safetensors is missing: train the run first"):
        evaluate.main(configure(tmp_path / "run", do="eval"))


def test_an_export_is_a_timm_state_dict(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "vit.safetensors"
    config = configure(straight, do="export", export={"method": "dense", "out": str(out)})
    export.main(config)
    vit = Session(config)._vit
    assert vit.load_state_dict(load_file(out), strict=True)
    with pytest.raises(SplitError, match="exists"):
        export.main(config)
    with pytest.raises(SplitError, match="Did you mean dense"):
        export.main(configure(straight, do="export", export={"method": "dence"}))


def test_a_start_from_another_run_takes_backbone_and_head(straight: Path, tmp_path: Path) -> None:
    weights = straight / "models" / "dense.safetensors"
    learner = Session(configure(tmp_path / "run", init=str(weights))).learner("entropy")
    there = load_file(weights)
    assert all(torch.equal(value, there[f"model.{key}"]) for key, value in learner.model.state_dict().items())


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        kept.save(step, {"value": torch.tensor(step)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]
    state = tmp_path / "00000003" / "state.pt"
    state.write_bytes(state.read_bytes()[:-20])
    assert kept.newest() == 2
    assert kept.load(2)["value"] == 2
    assert "00000003 cannot be used" in caplog.text


def test_damaged_checkpoints_do_not_push_out_new_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(18, {"a": 1})
    (tmp_path / "00000018" / "state.pt").write_bytes(b"cut")
    assert checkpoints.newest() is None
    checkpoints.save(4, {"a": 2})
    assert checkpoints.newest() == 4
    assert [folder.name for folder in tmp_path.iterdir()] == ["00000004"]


def test_a_flipped_bit_in_finished_weights_is_named(tmp_path: Path) -> None:
    path, module = tmp_path / "models" / "dense.safetensors", torch.nn.Linear(4, 4)
    save_weights(path, {"model": module}, {"source": "dense"})
    assert load_weights(path, {"model": module}) == {"source": "dense"}
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    with pytest.raises(SplitError, match=r"dense.safetensors is damaged: its checksum is wrong. Delete it"):
        load_weights(path, {"model": module})


def test_a_run_goes_on_after_settings_were_added_and_with_other_tolerance(tmp_path: Path) -> None:
    config = configure(tmp_path / "run")
    path = resolve.claim_run_dir(config) / resolve.CONFIG_FILE
    tree = resolve.read_recipe(path)
    del tree["compile_blocks"], tree["estimator"]["reach"]  # as an older version wrote it
    path.write_text(yaml.safe_dump(tree))
    resolve.check_run_dir(config)
    resolve.check_run_dir(configure(tmp_path / "run", on_error="skip"))
    with pytest.raises(SplitError, match="compile_blocks: False there, True here"):
        resolve.check_run_dir(configure(tmp_path / "run", compile_blocks=True))
    older = {key: value for key, value in resolve.settings_of(config).items() if key != "compile_blocks"}
    Checkpoints(tmp_path / "c", 2, older).save(3, {})
    assert Checkpoints(tmp_path / "c", 2, resolve.settings_of(config)).newest() == 3


def test_weights_of_another_shape_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, {"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(1, 1)}, {})
    with pytest.raises(SplitError, match=r"a\.weight is \(3, 2\), wanted \(3, 4\).*unexpected b\.bias; unexpected b"):
        load_weights(path, {"a": torch.nn.Linear(4, 3)})
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SplitError, match="cannot be read"):
        load_weights(path, {"a": torch.nn.Linear(2, 3)})


def test_batches_by_step_are_epochs_of_permutations_and_resume_anywhere() -> None:
    whole = list(StepSampler(10, 4, range(5), seed=1))
    assert sorted(index for batch in whole for index in batch) == sorted([*range(10)] * 2)
    assert list(StepSampler(10, 4, range(3, 5), seed=1)) == whole[3:]
    shared = [list(StepSampler(10, 2, range(5), seed=1, rank=rank, world=2)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*shared, strict=True)] == whole
    assert list(StepSampler(10, 4, range(5), seed=2)) != whole
    assert len({step_seed(0, phase, step) for phase in ("a", "b") for step in range(500)}) == 1000


def test_each_fine_tuning_is_done_once_and_the_policy_comes_last(tmp_path: Path) -> None:
    methods = plan(configure(tmp_path))
    assert sources(methods) == ["dense", "random", "xattn_warmstart"]
    assert methods[-1].name == "xattn"
    assert not methods[-1].calibrated
    assert [m.name for m in plan(configure(tmp_path, policy="entropy", eval={"methods": ["dense"]}))] == [
        "dense",
        "entropy",
    ]


def test_snapshots_are_the_policy_on_its_way(straight: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    estimator = {**SETTINGS["estimator"], "snapshots": [0.99, 0.6, 0.01]}
    config = configure(run_dir, estimator=estimator, eval={**SETTINGS["eval"], "methods": [], "calibrate": "test"})
    resolve.claim_run_dir(config)
    (run_dir / "models").mkdir()
    shutil.copy(straight / "models" / "xattn_warmstart.safetensors", run_dir / "models")
    train.main(config)
    results = json.loads((run_dir / "results.json").read_text())
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == ["xattn_warmstart", "xattn_step3", "xattn", "xattn_matched"], (
        "5 steps: 0, 3 and 5, of which one"
    )
    assert (rows["xattn_step3"]["learned_images"], rows["xattn"]["learned_images"]) == (48, 80)
    assert rows["xattn_step3"]["rule"] == "calibrated threshold"
    kept, end = (load_file(run_dir / "models" / f"{name}.safetensors") for name in ("xattn_step3", "xattn"))
    moved = {key for key in kept if not torch.equal(kept[key], end[key])}
    assert moved
    assert all(key.startswith("model.policy.") for key in moved)
    whole = load_file(straight / "models" / "xattn.safetensors")
    assert all(torch.equal(end[key], whole[key]) for key in whole), "keeping one changes nothing"
    with pytest.raises(SplitError, match=r"estimator\.snapshots"):
        configure(run_dir, estimator={**estimator, "snapshots": [1.5]})


def test_learning_rates_by_part_and_frozen_names(tmp_path: Path) -> None:
    adapt = {**SETTINGS["adapt"], "freeze": ["vit.blocks.0.", "embed"], "head_lr": 0.5}
    config = configure(tmp_path, adapt=adapt)
    learner = Session(config).learner("xattn")
    groups = parameter_groups(learner, config)
    assert [group["lr"] for group in groups] == [1e-3, 0.5, 1e-3]
    named = dict(learner.model.named_parameters())
    assert not any(p.requires_grad for name, p in named.items() if name.startswith(("vit.blocks.0.", "embed.")))
    assert {id(p) for p in groups[1]["params"]} == {id(named["vit.head.weight"]), id(named["vit.head.bias"])}
    assert [learning_rate_factor(step, 10, 0.2) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert learning_rate_factor(9, 10, 0.2) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0.1}, "budget 0.1 cannot be met"),
        ({"device": "gpu"}, "device=gpu"),
        ({"eval": {"methods": ["mlp_parent"]}}, "mlp_parent is a learned policy and this run trains xattn"),
        ({"policy": "entropy", "eval": {"methods": ["oracle"]}}, "oracle runs on a learned policy's backbone"),
        ({"policy": "oracle", "eval": {"methods": []}}, "policy=oracle sees labels"),
        ({"eval": {"calibrate": "test", "images": 20_000}}, "needs more images than are evaluated"),
        ({"init": "nosuch.safetensors"}, "there is no such file"),
        ({"stages": 9}, "stages=9: a coarse patch spans"),
    ],
)
def test_what_cannot_be_run_right_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(SplitError, match=message):
        train.main(configure(run_dir, **changes))
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapt": {"images": 10, "batch_size": 16}}, "do not fill one batch of 16"),
        ({"estimator": {"images": 32, "batch_size": 16}}, "all spent on measuring the price"),
        ({"seed": 10**30}, "seed"),
    ],
)
def test_settings_that_would_train_nothing_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        configure(tmp_path, **changes)


def test_a_run_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SplitError, match="cannot be written"):
        train.main(configure(tmp_path / "file" / "run"))


def test_a_run_wide_rule_leaves_dense_dense_and_thresholds_calibrated(straight: Path) -> None:
    rules = {}
    for rule in ("image", "threshold"):
        session = Session(configure(straight, do="eval", decision=rule))
        methods = {m.name: m for m in plan(session.config)}
        rules[rule] = {name: deployed(session, methods[name]).model.decision for name in ("dense", "cosine")}
    assert rules["image"]["dense"].rule == "threshold"
    assert rules["image"]["cosine"].rule == "image"
    assert rules["threshold"]["cosine"].offset != 0
