"""Warm start: cosine pseudo-labels for the decision network (Sec. 3.4).

    d_ik = (1 - cos(z_i, z_ik)) / 2        m_i = [max_k d_ik > tau]

The network imitates m with binary cross-entropy while the backbone is fine-tuned on the partitions that m
describes. The paper does not say whether that loss reaches the embeddings; here it does not (they would drift
to make the labels easy), so the backbone learns from the task alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from split_core.calibrate import offset_for, scores
from split_core.decision import existing
from split_core.policy import StageView
from split_core.quadtree import valid_at
from split_core.types import Pyramid, Splits


def cosine_dissimilarity(view: StageView) -> Float[Tensor, "b n"]:
    """max_k (1 - cos(z_parent, z_child_k)) / 2 in [0, 1], float32."""
    return dissimilarity(view.pyramid, view.scale)


def dissimilarity(pyramid: Pyramid, scale: int) -> Float[Tensor, "b n"]:
    """`cosine_dissimilarity` for the parents at `scale`.

    Children wholly outside the picture embed padding and do not count; a parent with no other scores 0.
    """
    parents = pyramid.levels[scale].float().unsqueeze(2)
    cosine = F.cosine_similarity(parents, pyramid.children(scale).float(), dim=-1)
    if pyramid.valid is not None or pyramid.grid.padded:
        level = valid_at(pyramid.grid, pyramid.valid, cosine.device)[scale - 1]
        b, rows, cols = level.shape
        inside = level.view(b, rows // 2, 2, cols // 2, 2).transpose(2, 3).reshape(b, -1, 4)
        cosine = cosine.masked_fill(~inside, 1)
    return (1 - cosine.amin(2)) / 2


def pseudo_labels(pyramid: Pyramid, tau: float) -> Splits:
    """The partition that the cosine rule describes at threshold tau."""
    masks = []
    with torch.no_grad():
        for s in range(1, pyramid.grid.stages + 1):
            masks.append((dissimilarity(pyramid, s) > tau).unflatten(1, pyramid.grid.shape(s)))
    return Splits(tuple(masks), pyramid.grid)


def imitation_loss(
    logits: tuple[Float[Tensor, "b _"], ...], labels: Splits, valid: Bool[Tensor, "b r c"] | None = None
) -> Float[Tensor, ""]:
    """Mean binary cross-entropy over the parents that exist under the labels."""
    total, count = (logits[0].new_zeros((), dtype=torch.float32) for _ in range(2))
    for logit, mask, asked in zip(logits, labels.masks, existing(labels, valid), strict=True):
        loss = F.binary_cross_entropy_with_logits(logit.float(), mask.flatten(1).float(), reduction="none")
        total = total + (loss * asked).sum()
        count = count + asked.sum()
    return total / count


def start_tau(pyramids: Iterable[Pyramid], budget: float) -> float:
    """tau at which the labels of these batches spend `budget`, so that dual ascent only has to follow drift.

    The paper starts from a fixed tau; embeddings of different backbones put d on different scales.
    """
    sample = []
    for pyramid in pyramids:
        values = [dissimilarity(pyramid, s) for s in range(1, pyramid.grid.stages + 1)]
        sample.append(scores(values, pyramid.grid, pyramid.valid))
    return -offset_for(sample, budget)
