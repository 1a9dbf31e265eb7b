"""A policy taught by one estimator is where the next one starts (`warmstart.policy`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from split_core.calibrate import offset_for
from split_core.engine import evaluate, train
from split_core.engine.adapt import load_learner
from split_core.engine.calibration import sampled
from split_core.engine.handover import after
from split_core.engine.opening import open_run
from split_core.engine.session import Session
from split_core.errors import SplitError
from tinyrun import SETTINGS, configure, metrics

NONE = {"eval": {**SETTINGS["eval"], "methods": []}}
CREDIT = {"estimator": {"name": "credit", "images": 48, "batch_size": 16}}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("taught") / "run"
    train.main(configure(run_dir, **CREDIT, **NONE))
    return run_dir / "models" / "xattn.safetensors"


def follower(run_dir: Path, taught: Path, **adapt: Any) -> Any:
    changes = {"init": str(taught), "warmstart": {"policy": str(taught), "spread": 3.0}}
    return configure(run_dir, **changes, **NONE, adapt={**SETTINGS["adapt"], **adapt})


@pytest.mark.parametrize("images", [0, 32])
def test_the_next_estimator_starts_from_the_taught_policy_on_the_scale_of_odds(
    taught: Path, tmp_path: Path, images: int
) -> None:
    run_dir = tmp_path / "run"
    config = follower(run_dir, taught, images=images)
    train.main(config)
    there, start = load_file(taught), load_file(run_dir / "models" / "xattn_warmstart.safetensors")
    for key in there:
        same = torch.equal(there[key], start[key])
        # The policy keeps its order of the parents, only its last layer is scaled; the backbone learns if asked to.
        if key.startswith("model.policy."):
            assert same == ("decide" not in key), key
        elif not images:
            assert same, key
    warm = load_learner(Session(config), "xattn_warmstart", "xattn")
    sample = sampled(Session(config), warm, "train")
    assert abs(float(torch.cat([part.score for part in sample]).std()) - 3.0) < (0.01 if not images else 1.0)
    if not images:
        assert abs(offset_for(sample, config.budget)) < 0.01  # the budget is spent at 0 already
    own = json.loads((run_dir / "results.json").read_text())["rows"][-1]
    assert own["estimator"] == "credit + ppo"
    assert own["learned_images"] == 48 + 80
    assert any(line["phase"] == "adapt_xattn_warmstart" for line in metrics(run_dir)) == bool(images)


def test_a_trained_run_needs_no_other_run(taught: Path, tmp_path: Path) -> None:
    start = tmp_path / "taught.safetensors"
    start.write_bytes(taught.read_bytes())
    config = follower(tmp_path / "run", start, images=0)
    train.main(config)
    before = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    start.unlink()
    evaluate.main(config.model_copy(update={"do": "eval"}))
    after_ = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["error"] for row in after_] == [row["error"] for row in before]
    with pytest.raises(SplitError, match="there is no such file"):
        open_run(follower(tmp_path / "other", start))


def test_rescaling_changes_logits_and_not_their_order(taught: Path, tmp_path: Path) -> None:
    learner = Session(configure(tmp_path / "run")).learner("xattn")
    images = torch.rand(3, 1, 40, 40)
    with torch.no_grad():
        before = learner.model.logits(learner.model.pyramid(images), images)[0]
        learner.model.policy.rescale(0.3, 2.5)
        now = learner.model.logits(learner.model.pyramid(images), images)[0]
    torch.testing.assert_close(now, 2.5 * (before + 0.3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"warmstart": {"policy": "nowhere.safetensors"}},
            "warmstart.policy=nowhere.safetensors: there is no such file",
        ),
        ({"policy": "mlp_parent"}, "does not fit the model: missing model.policy|unexpected model.policy.comparison"),
        ({"policy": "entropy"}, "warmstart.policy: policy Entropy does not learn"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_before_anything_is_written(
    taught: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(SplitError, match=message):
        open_run(configure(run_dir, **{"warmstart": {"policy": str(taught)}, **changes}))
    assert not run_dir.exists()


def test_what_was_learned_before_counts() -> None:
    own = {"estimator": "ppo", "learned_images": 10, "learned_seconds": 2.0}
    assert after({}, own) == own
    before = {"estimator": "credit", "learned_images": 5, "learned_seconds": 1.0}
    assert after(before, own) == {"estimator": "credit + ppo", "learned_images": 15, "learned_seconds": 3.0}
