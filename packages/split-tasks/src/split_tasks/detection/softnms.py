"""Soft non-maximum suppression: of boxes that overlap a better one, the score falls instead of the box."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from split_tasks.detection.geometry import has_area, overlaps


@dataclass(frozen=True)
class Detections:
    """What was found in one image, best first.

    Args:
        boxes: (n, 4) in px of the canvas.
        scores: (n,).
        labels: (n,) class indices.
        masks: (m, 28, 28) probabilities at points of the first m boxes, where the detector says masks.
    """

    boxes: Float[Tensor, "n 4"]
    scores: Float[Tensor, " n"]
    labels: Int[Tensor, " n"]
    masks: Float[Tensor, "m 28 28"] | None = None


def soft_nms(
    boxes: Float[Tensor, "b n 4"], scores: Float[Tensor, "b n k"], *, iou: float, least: float, limit: int
) -> list[Detections]:
    """Linear soft-NMS of each class by itself, all classes and images at once.

    The best box is taken; every other one that overlaps it by more than `iou` keeps (1 - overlap) of its score; so on,
    until no score is above `least`. Scores only fall, so the first `limit` boxes taken are the best of their class.

    Args:
        limit: boxes of one class in one image (average precision reads 100).
    """
    overlap = overlaps(boxes, boxes)
    left = torch.where(has_area(boxes)[..., None], scores, 0).transpose(1, 2).contiguous()
    taken, kept = [], []
    for _ in range(min(limit, boxes.shape[1])):
        best, index = left.max(2)
        if not bool((best > least).any()):
            break
        taken.append(index)
        kept.append(best)
        over = overlap.gather(1, index[..., None].expand(-1, -1, overlap.shape[2]))
        left = (left * torch.where(over > iou, 1 - over, 1)).scatter(2, index[..., None], 0)
    if not kept:
        empty = [Detections(boxes.new_zeros(0, 4), boxes.new_zeros(0), boxes.new_zeros(0).long())]
        return empty * len(boxes)
    index, score = torch.stack(taken, 2), torch.stack(kept, 2)
    labels = torch.arange(score.shape[1], device=score.device)[:, None].expand(-1, score.shape[2])
    return [_best_first(*image, labels, least) for image in zip(boxes, index, score, strict=True)]


def _best_first(boxes: Tensor, index: Tensor, score: Tensor, labels: Tensor, least: float) -> Detections:
    above = score > least
    order = score[above].argsort(descending=True, stable=True)
    return Detections(boxes[index[above][order]], score[above][order], labels[above][order])
