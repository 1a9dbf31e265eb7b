"""Thresholds that spend a run's budget, set on its validation split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from split_core.calibrate import offset_for, scores
from split_core.decision import Decision
from split_core.engine.loader import evaluation_batches, to_device
from split_core.engine.session import Learner, Session
from split_core.types import Grid

CALIBRATION_IMAGES = 2000
"""Images of the validation split that thresholds are set on."""


@torch.no_grad()
def calibrated(session: Session, learner: Learner) -> Decision:
    """The threshold that spends the budget on the validation split; analysis policies see its labels."""
    model, config = learner.model, session.config
    generator = torch.Generator().manual_seed(config.seed)
    sample = []
    for batch in evaluation_batches(
        session.data("val"), config.eval.batch_size, CALIBRATION_IMAGES, workers=config.workers
    ):
        batch = to_device(batch, session.device)
        pyramid = model.pyramid(batch["image"])
        objects = objects_of(learner, batch["target"], pyramid.grid)
        logits = model.logits(pyramid, batch["image"], objects=objects, generator=generator)
        sample.append(scores(logits, pyramid.grid, pyramid.valid))
    return Decision("threshold", config.budget, offset_for(sample, config.budget))


def objects_of(learner: Learner, target: Mapping[str, Any], grid: Grid) -> Tensor | None:
    """Fine cells on labelled objects, or None."""
    return learner.task.objects(target, grid, learner.model.embed.patch_size)
