"""Attention whose keys count in part: softmax numerators times a weight of each key (not in the paper).

With weights 0 and 1 it is attention among the keys of weight 1; in between it is differentiable in the weights, which
is what an estimator needs that asks what one more token would change (`split_core.learn.union`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.attention.base import AttentionBackend
from split_core.packing import Segments

LARGEST_LOG = 10.0
"""How far a key without weight may score above all keys with one: exp of it bounds the derivative in its weight."""


class WeightedAttention(AttentionBackend):
    """Weighted attention over images of one length.

    Args:
        weight: (b, L) of every key, >= 0; each image has at least one positive.
    """

    name = "weighted"

    def __init__(self, weight: Float[Tensor, "b L"]) -> None:
        self.weight = weight

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        """Raises ValueError for images of several lengths, or dropout."""
        length = self.weight.shape[1]
        if segments.uniform != length or dropout:
            raise ValueError(f"weighted attention wants images of {length} tokens each, and no dropout")
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        weight = self.weight[:, None, None, :].to(v.dtype)
        score = (q * scale) @ k.transpose(2, 3)
        # The maximum over keys that count: over all of them, every key with weight could underflow to zero.
        top = score.detach().masked_fill(weight == 0, -torch.inf).amax(-1, keepdim=True)
        share = (score - top).clamp(max=LARGEST_LOG).exp() * weight
        out = (share / share.sum(-1, keepdim=True)) @ v
        return out.transpose(1, 2).flatten(0, 1)
