"""From one estimator to the next: a run whose policy starts where that of another run ended (`warmstart.policy`).

An estimator that only orders parents (credit) leaves logits on a scale of its own and a threshold beside them; one that
samples (PPO) reads logits as odds. So the threshold becomes 0 and the spread of the logits `warmstart.spread`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from split_core.calibrate import offset_for
from split_core.engine.calibration import sampled
from split_core.engine.checkpoint import load_weights
from split_core.engine.session import Learner, Session
from split_core.errors import SplitError

LEARNED = ("estimator", "learned_images", "learned_seconds")
"""What weights say of how their policy was taught."""


def take_over(session: Session, learner: Learner) -> None:
    """Give `learner` the policy that `warmstart.policy` names, spending the budget on training images."""
    settings, policy = session.config.warmstart, learner.split.policy
    facts = load_policy(settings.policy, learner)
    sample = sampled(session, learner.eval(), "train")
    spread = float(torch.cat([part.score for part in sample]).float().std())
    if not spread > 0:
        raise SplitError(f"warmstart.policy={settings.policy} scores all parents alike; there is nothing to go on from")
    learner.facts = {"taught": {key: facts[key] for key in LEARNED if key in facts}}
    policy.rescale(offset_for(sample, session.config.budget), settings.spread / spread)


def load_policy(path: str | None, learner: Learner) -> dict[str, Any]:
    """Read the policy's weights alone; returns the file's facts.

    Raises:
        SplitError: there is no such file, the policy does not learn, or the file holds one of another kind.
    """
    policy = learner.split.policy
    if not policy.learned:
        raise SplitError(f"warmstart.policy: policy {type(policy).__name__} does not learn; leave it out")
    if path is None or not Path(path).is_file():
        raise SplitError(f"warmstart.policy={path}: there is no such file; train the run that makes it first")
    return load_weights(Path(path), {"model.policy": policy}, only="model.policy.")


def after(taught: Mapping[str, Any] | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """How a policy was taught in all: the estimators in turn, their images and seconds together."""
    if not taught:
        return dict(own)
    name = f"{taught['estimator']} + {own['estimator']}"
    return {"estimator": name, **{key: taught[key] + own[key] for key in LEARNED[1:]}}
