"""Bipartite soft matching (ToMe, Sec. 3): which patch tokens merge into which, as one index per token.

Tokens at even places of the sequence (A) may merge into tokens at odd places (B); prefix tokens take no part. Each
token of A points at its most similar one of B, and the r whose similarity is highest merge. The result keeps A's
others first, then B: that order is deliberate, because it changes who can meet whom in the next block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from split_core.reduced import Tokens


@dataclass(frozen=True)
class Matching:
    """Where every patch token goes.

    Args:
        target: (b, n) its place among the tokens that are left.
        left: n - r, how many those are.
    """

    target: Int[Tensor, "b n"]
    left: int


def halves(count: int, prefix: int) -> tuple[slice, slice]:
    """A and B among the patch tokens: even and odd places of the sequence with its prefix."""
    return slice(prefix % 2, count, 2), slice(1 - prefix % 2, count, 2)


def similarity(metric: Float[Tensor, "b n e"], prefix: int) -> Float[Tensor, "b a c"]:
    """Cosine of every token of A with every one of B, in float32."""
    a, b = halves(metric.shape[1], prefix)
    unit = F.normalize(metric.float(), dim=-1)
    return unit[:, a] @ unit[:, b].transpose(1, 2)


def match(metric: Float[Tensor, "b n e"], r: int, prefix: int) -> Matching:
    """The r merges of most similar tokens.

    Args:
        metric: what tokens are compared by.
        r: merges, 0 <= r <= n // 2.
        prefix: tokens in front of the patches; with some, tokens that do not merge keep their order, else (as in the
            original) they stand by falling similarity.
    """
    return match_scores(similarity(metric, prefix), metric.shape[1], r, prefix)


def match_scores(scores: Float[Tensor, "b a c"], count: int, r: int, prefix: int) -> Matching:
    """The same from similarities."""
    best, partner = scores.max(-1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    merged, others = order[:, :r], order[:, r:]
    if prefix:
        others = others.sort(dim=-1).values
    stay = others.shape[1]
    target = torch.empty(len(scores), count, dtype=torch.long, device=scores.device)
    a, b = halves(count, prefix)
    of_a = torch.empty_like(order)
    of_a.scatter_(1, others, torch.arange(stay, device=order.device).expand_as(others))
    of_a.scatter_(1, merged, stay + partner.gather(1, merged))
    target[:, a] = of_a
    target[:, b] = stay + torch.arange(scores.shape[2], device=order.device)
    return Matching(target, count - r)


def merge(tokens: Tokens, matching: Matching) -> Tokens:
    """Means by size of the tokens that share a target; sizes add up and owners follow."""
    patches, n = tokens.patches, tokens.count
    b, _, d = patches.shape
    size = patches.new_ones(b, n) if tokens.weight is None else tokens.weight.to(patches.dtype)
    rows = (matching.target + torch.arange(b, device=patches.device)[:, None] * matching.left).flatten()
    total = size.new_zeros(b * matching.left).index_add(0, rows, size.flatten())
    summed = patches.new_zeros(b * matching.left, d).index_add(0, rows, (patches * size[..., None]).flatten(0, 1))
    merged = (summed / total[:, None]).view(b, matching.left, d)
    cell = remain(tokens.cell, matching.target, matching.left, tokens.prefix)
    return tokens.with_patches(merged, follow(tokens.owner, matching.target), total.view(b, matching.left), cell)


def follow(owner: Int[Tensor, "b N"], target: Int[Tensor, "b n"]) -> Int[Tensor, "b N"]:
    """Owners after tokens moved to `target`; a target of -1 is gone, and so is what it stood for."""
    moved = target.gather(1, owner.clamp_min(0))
    return torch.where(owner < 0, -1, moved)


def remain(
    cell: Int[Tensor, "b n"] | None, target: Int[Tensor, "b n"], left: int, prefix: int
) -> Int[Tensor, "b m"] | None:
    """Cells where the tokens that are left stand: their own, whatever merged into them."""
    if cell is None:
        return None
    a, b = halves(cell.shape[1], prefix)
    stay = cell.new_empty(len(cell), left).scatter_(1, target[:, a], cell[:, a])
    return stay.scatter_(1, target[:, b], cell[:, b])  # over what A's merged tokens wrote there
