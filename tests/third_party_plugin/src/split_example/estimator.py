"""An estimator turns the errors of a frozen backbone into losses for the policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from split_core.decision import log_prob
from split_core.learn.estimator import Estimator, EstimatorContext, Lesson
from split_core.learn.ppo import advantage, sample_rollouts
from split_core.model import SplitViT
from split_example.configs import ReinforceConfig


class Reinforce(Estimator):
    """Policy gradient at a fixed token price: no ratio, no clipping, no dual."""

    def __init__(self, config: ReinforceConfig, context: EstimatorContext) -> None:
        self.config = config
        self.cost = float("nan")

    def losses(self, model: SplitViT, lesson: Lesson) -> Iterator[Tensor]:
        images = lesson.images
        with torch.no_grad():
            pyramid = model.pyramid(images)
            rollouts = sample_rollouts(model, pyramid, images, lesson.error_of, self.config.rollouts, lesson.generator)
        cost = rollouts.error + self.config.price * rollouts.fraction
        self.cost = float(cost.mean())
        now = log_prob(model.logits(pyramid, images), rollouts.splits).view_as(cost)
        yield -(advantage(cost) * now).mean()

    def metrics(self) -> dict[str, float]:
        return {"cost": self.cost}
