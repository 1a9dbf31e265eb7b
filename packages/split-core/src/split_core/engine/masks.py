"""Whose partitions the backbone is fine-tuned on: a policy's own, or the cosine rule's in the warm start (Sec. 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from split_core.decision import Decision
from split_core.engine.calibration import CALIBRATION_IMAGES, calibrated
from split_core.engine.session import Learner, Session
from split_core.learn.dual import Threshold
from split_core.learn.warmstart import imitation_loss, pseudo_labels, start_tau
from split_core.types import Pyramid, Splits


@runtime_checkable
class Masks(Protocol):
    """Partitions for each step of fine-tuning, and what is learned from them beside the task."""

    def __call__(self, pyramid: Pyramid, images: Tensor, generator: torch.Generator) -> Splits: ...

    def policy_loss(self, logits: tuple[Tensor, ...], labels: Splits, valid: Tensor | None) -> Tensor | None:
        """Loss of the policy on the partitions just used, or None if it does not learn here."""

    def after(self, fraction: float) -> dict[str, float]:
        """React to the token fraction of a step; returns numbers for the log."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PolicyMasks:
    """Partitions of an unlearned policy, at the budget or at one drawn for each step."""

    def __init__(self, session: Session, learner: Learner) -> None:
        self.config, self.model = session.config.adapt, learner.split
        if (
            self.model.policy.default_rule == "image"
            and not self.model.policy.exact
            and self.config.budget_range is None
        ):
            self.model.decision = calibrated(session, learner.eval(), "train")

    def __call__(self, pyramid: Pyramid, images: Tensor, generator: torch.Generator) -> Splits:
        if self.config.budget_range is None:
            return self.model.splits(pyramid, images, generator=generator)
        low, high = self.config.budget_range
        budget = low + (high - low) * float(torch.rand((), generator=generator))
        logits = self.model.logits(pyramid, images, generator=generator)
        return Decision("image", budget)(logits, pyramid.grid, pyramid.valid)

    def policy_loss(self, logits: tuple[Tensor, ...], labels: Splits, valid: Tensor | None) -> Tensor | None:
        return None

    def after(self, fraction: float) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.model.decision.offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        decision = self.model.decision
        self.model.decision = Decision(decision.rule, decision.budget, state["offset"])


class WarmStartMasks:
    """Partitions of the cosine rule, whose threshold follows the budget by dual ascent."""

    def __init__(self, session: Session, learner: Learner) -> None:
        config = session.config
        tau = config.warmstart.tau
        if tau is None:
            model = learner.split
            with torch.no_grad():
                shown = session.images(model, "train", config.eval.batch_size, CALIBRATION_IMAGES)
                tau = start_tau((model.pyramid(*batch) for batch in shown), config.budget)
        self.tau = Threshold(tau, config.warmstart.tau_lr, config.budget)

    def __call__(self, pyramid: Pyramid, images: Tensor, generator: torch.Generator) -> Splits:
        return pseudo_labels(pyramid, self.tau.tau)

    def policy_loss(self, logits: tuple[Tensor, ...], labels: Splits, valid: Tensor | None) -> Tensor | None:
        return imitation_loss(logits, labels, valid)

    def after(self, fraction: float) -> dict[str, float]:
        self.tau.update(fraction)
        return {"tau": self.tau.tau}

    def state_dict(self) -> dict[str, Any]:
        return self.tau.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tau.load_state_dict(state)
