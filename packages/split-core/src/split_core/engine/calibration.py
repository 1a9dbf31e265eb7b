"""Thresholds that spend a run's budget on a sample of one of its splits. No label is read but by analysis policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from split_core.calibrate import Scores, scores_of, threshold_for
from split_core.decision import Decision
from split_core.engine.loader import evaluation_batches, to_device, valid_of
from split_core.engine.session import Learner, Session
from split_core.types import Grid

CALIBRATION_IMAGES = 1000
"""Images that thresholds are set on."""


def calibrated(session: Session, learner: Learner, split: str, *, start: int = 0) -> Decision:
    """The threshold that spends the budget on images of `split` from number `start` on."""
    return threshold_for(sampled(session, learner, split, start=start), session.config.budget)


@torch.no_grad()
def sampled(session: Session, learner: Learner, split: str, *, start: int = 0) -> list[Scores]:
    """What the policy says of `CALIBRATION_IMAGES` images of `split` from number `start` on."""
    model, config = learner.split, session.config
    generator = torch.Generator().manual_seed(config.seed)
    sample = []
    images = range(start, start + CALIBRATION_IMAGES)
    for batch in evaluation_batches(session.data(split), config.eval.batch_size, images, workers=config.workers):
        batch = to_device(batch, session.device)
        objects = objects_of(learner, batch["target"], model.embed.grid(batch["image"].shape[-2:]))
        valid = valid_of(model, batch)
        sample.append(scores_of(model, batch["image"], valid, objects=objects, generator=generator))
    return sample


def objects_of(learner: Learner, target: Mapping[str, Any], grid: Grid) -> Tensor | None:
    """Fine cells on labelled objects, or None."""
    return learner.task.objects(target, grid, learner.model.embed.patch_size)
