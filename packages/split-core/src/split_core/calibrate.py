"""Find the threshold at which a policy spends a wanted token fraction on a data sample (Table 11's "recalibrated").

Thresholds do not carry over between data sets, and a learned policy's .5 threshold need not spend what its samples
did; comparisons at equal tokens need both set right. One offset on all logits serves every stage: a parent splits if
its own logit and all those above it exceed -offset, that is, if their minimum does. Sorting those minima gives the
token fraction at every offset at once, for any S.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from split_core.decision import Decision, reachable
from split_core.errors import SplitError
from split_core.model import SplitViT
from split_core.quadtree import split_cost, valid_at
from split_core.types import Grid


@dataclass(frozen=True)
class Scores:
    """What a batch's logits say about every threshold.

    Args:
        score: (k,) lowest logit on the path from the root to each parent, all stages and images.
        gain: (k,) token fraction of its image that the parent's split adds.
        floor: (b,) token fraction of each image when nothing splits.
    """

    score: Float[Tensor, " k"]
    gain: Float[Tensor, " k"]
    floor: Float[Tensor, " b"]


def scores(logits: Sequence[Float[Tensor, "b _"]], grid: Grid, valid: Bool[Tensor, "b r c"] | None = None) -> Scores:
    """Scores of one batch; logits[s - 1] = (b, n_s) for s = 1 .. S."""
    b, device = logits[0].shape[0], logits[0].device
    levels = valid_at(grid, valid, device)
    cells, coarse = (level.flatten(1).sum(1).double() for level in (levels[0], levels[-1]))
    gains = [(cost / cells[:, None]).expand(b, -1).flatten() for cost in split_cost(grid, valid, device)]
    score = torch.cat([level.flatten() for level in reachable(logits, grid)])
    return Scores(score, torch.cat(gains), (coarse / cells).expand(b))


def offset_for(sample: Sequence[Scores], fraction: float) -> float:
    """What to add to every logit so that the threshold rule's mean token fraction comes nearest to `fraction`.

    Exact up to ties: without them within half of one split's gain (about 1 / number of parents of the sample). Parents
    with equal scores split together, and so, for S > 1, does a parent with those below it that scored higher. The
    threshold lies midway between the last score that splits and the next.

    Raises:
        SplitError: an empty sample, or a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise SplitError(f"token fraction {fraction} must lie in (0, 1]")
    floor = torch.cat([part.floor for part in sample]) if sample else torch.zeros(0)
    if floor.numel() == 0:
        raise SplitError("calibration needs at least one image")
    # Parents wholly in padding, or with one child in the picture, change no token count.
    score, order = torch.cat([part.score.double() for part in sample]).sort(descending=True)
    spent = floor.mean() + torch.cat([part.gain for part in sample])[order].cumsum(0) / floor.numel()
    ends = torch.cat([score[1:] < score[:-1], score.new_ones(1, dtype=torch.bool)])
    score, spent = score[ends], spent[ends]
    spent = torch.cat([floor.mean()[None], spent])
    best = int((spent - fraction).abs().argmin())
    if best == 0:
        return -float(score[0]) - 1.0
    if best == len(score):
        return 1.0 - float(score[-1])
    return -float((score[best - 1] + score[best]) / 2)


def threshold_for(sample: Sequence[Scores], fraction: float) -> Decision:
    """The threshold rule with that offset.

    Raises:
        SplitError: as `offset_for`.
    """
    return Decision("threshold", fraction, offset_for(sample, fraction))


@torch.no_grad()
def scores_of(
    model: SplitViT, images: Float[Tensor, "b ch H W"], valid: Bool[Tensor, "b r c"] | None = None, **seen: Any
) -> Scores:
    """Scores of a batch under the model's policy. `seen`: extras of `StageView` (objects, generator)."""
    pyramid = model.pyramid(images, valid)
    return scores(model.logits(pyramid, images, **seen), pyramid.grid, pyramid.valid)


def calibrate(model: SplitViT, batches: Iterable[Float[Tensor, "b ch H W"]], fraction: float, **seen: Any) -> Decision:
    """The threshold rule at which the model's policy spends `fraction` of the tokens on a sample of images.

    Args:
        model: its policy is read, its decision is left as it is.
        batches: normalised images.
        fraction: mean token fraction wanted.
        seen: extras of `StageView` (generator).

    Raises:
        SplitError: no images, or a fraction outside (0, 1].
    """
    return threshold_for([scores_of(model, images, **seen) for images in batches], fraction)
