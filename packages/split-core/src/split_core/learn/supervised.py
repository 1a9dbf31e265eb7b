"""Learning from labelled objects: a bound to compare with, no rival, since it is told what others must find out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from split_core.errors import SplitError
from split_core.learn.config import EstimatorConfig
from split_core.learn.estimator import Estimator, EstimatorContext, Lesson
from split_core.learn.warmstart import imitation_loss
from split_core.model import SplitViT
from split_core.quadtree import pool_any
from split_core.types import Splits


class Supervised(Estimator):
    """Binary cross-entropy of each parent against "it touches an object".

    Its error is never asked for. The threshold is set afterwards.
    """

    holds_budget: ClassVar[bool] = False

    def __init__(self, config: EstimatorConfig, context: EstimatorContext) -> None:
        self._metrics: dict[str, float] = {}

    def losses(self, model: SplitViT, lesson: Lesson) -> Iterator[Tensor]:
        """Raises SplitError when the data label no objects."""
        if lesson.objects is None:
            raise SplitError("estimator supervised needs labelled objects, and this task or data set labels none")
        with torch.no_grad():
            pyramid = model.pyramid(lesson.images, lesson.valid)
        masks, touched = [], lesson.objects
        for _ in range(pyramid.grid.stages):
            touched = pool_any(touched)
            masks.append(touched)
        model.policy.train()  # its dropout acts while it fits
        logits = model.logits(pyramid, lesson.images)
        model.policy.eval()
        loss = imitation_loss(logits, Splits(tuple(masks), pyramid.grid), pyramid.valid)
        yield loss
        self._metrics = {"fit": float(loss.detach())}

    def metrics(self) -> dict[str, float]:
        return self._metrics
