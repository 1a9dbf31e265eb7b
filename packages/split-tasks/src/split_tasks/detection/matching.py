"""Which box is which object's, and how much each counts in an image's error.

The reference trains on a random sample of anchors and of proposals. As an error to learn a policy from, that would be
noise: proposals differ between two partitions of an image, so that equal draws pick unequal ones. Training therefore
samples, and the error takes the mean over all samples in closed form: every box counts with its chance of being drawn.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from split_core.draws import uniform

NOTHING = Matcher.BELOW_LOW_THRESHOLD
UNCLEAR = Matcher.BETWEEN_THRESHOLDS


def match(
    truth: Float[Tensor, "g 4"], boxes: Float[Tensor, "n 4"], *, high: float, low: float, best: bool = False
) -> Int[Tensor, " n"]:
    """The object of each box: the one it overlaps most, NOTHING below `low`, UNCLEAR below `high`.

    Args:
        best: give every object the boxes that overlap it most, however little.
    """
    if not len(truth) or not len(boxes):
        return torch.full((len(boxes),), NOTHING, device=boxes.device)
    overlap = box_iou(truth, boxes)
    # An object that no box touches would take all boxes, each with an overlap of nothing; one without area overlaps
    # itself by 0 / 0.
    touched = (overlap.amax(1) > 0).nonzero()[:, 0]
    if not len(touched):
        return torch.full((len(boxes),), NOTHING, device=boxes.device)
    found: Tensor = Matcher(high, low, allow_low_quality_matches=best)(overlap[touched])
    found = torch.where(found >= 0, touched[found.clamp_min(0)], found)
    return found.masked_fill(overlap[touched].amax(0) == 0, NOTHING)


def weights(
    positive: Bool[Tensor, "b n"], negative: Bool[Tensor, "b n"], *, size: int, share: float, sample: bool
) -> Float[Tensor, "b n"]:
    """How much each box counts when `size` of an image's boxes are drawn, at most `share` of them positive.

    Args:
        sample: draw, and count the drawn ones once; else count each with its chance of being drawn.
    """
    found = positive.sum(1).clamp_max(int(size * share))
    result = torch.zeros(positive.shape, device=positive.device)
    draws = uniform(positive.shape, None, positive.device) if sample else None
    for kind, wanted in ((positive, found), (negative, size - found)):
        count = kind.sum(1)
        if draws is None:
            chance = (wanted / count.clamp_min(1)).clamp_max(1)[:, None].expand_as(result)
        else:  # the places of the draws among those of the kind
            place = draws.masked_fill(~kind, 2).argsort(1).argsort(1)
            chance = (place < wanted[:, None]).float()
        result = torch.where(kind, chance, result)
    return result
