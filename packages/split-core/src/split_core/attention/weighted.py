"""Attention whose keys count in part: softmax numerators times a weight of each key (not in the paper).

With weights 0 and 1 it is attention among the keys of weight 1; in between it is differentiable in the weights, which
is what an estimator needs that asks what one more token would change (`split_core.learn.union`).

A positive weight w is a bias of log w on the logits. Fused kernels take no bias with a gradient, so it rides in an
extra channel: q' = [q, 1], k' = [k, log(w) / scale] give scale * q'.k' = scale * q.k + log w, exactly.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_core.attention.base import AttentionBackend
from split_core.packing import Segments

LARGEST_LOG = 10.0
"""How far a key without weight may score above all keys with one: exp of it bounds the derivative in its weight."""
ABSENT = -1e4
"""Logarithm of no weight at all: far below every logit of a network that is not broken, yet not infinite."""


class WeightedAttention(AttentionBackend):
    """Weighted attention over segments of one length.

    Args:
        weight: (b, L) of every key, >= 0, in the order of the tokens; a block may cut them into other segments than
            images. Where no key of a segment weighs anything (a window without picture), what its tokens get is finite
            and means nothing.
        positive: keys of weight 0 are not there at all (cells without picture) and nobody asks for their derivative.
            It then runs on fused kernels. Without it, a weight of exactly 0 has its derivative too, and the matrix of
            attention is made in full.
    """

    name = "weighted"

    def __init__(self, weight: Float[Tensor, "b L"], *, positive: bool = False) -> None:
        self.weight, self.positive = weight, positive

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        """Raises ValueError for segments of several lengths, or dropout."""
        length, width = segments.uniform, v.shape[-1]
        if length is None or segments.total != self.weight.numel() or dropout:
            raise ValueError(f"weighted attention wants images of {self.weight.shape[1]} tokens each, and no dropout")
        if self.positive:
            q, k, v = with_log_weight(q, k, v, self._log_weight().flatten(), scale)
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        if self.positive:
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)[..., :width]
            return out.transpose(1, 2).flatten(0, 1)
        weight = self.weight.reshape(-1, 1, 1, length).to(v.dtype)
        score = (q * scale) @ k.transpose(2, 3)
        # The maximum over keys that count: over all of them, every key with weight could underflow to zero.
        top = score.detach().masked_fill(weight == 0, -torch.inf).amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
        share = (score - top).clamp(max=LARGEST_LOG).exp() * weight
        total = share.sum(-1, keepdim=True)
        out = (share / total.masked_fill(total == 0, 1)) @ v
        return out.transpose(1, 2).flatten(0, 1)

    def _log_weight(self) -> Float[Tensor, "b L"]:
        absent = self.weight == 0
        return self.weight.masked_fill(absent, 1).log().masked_fill(absent, ABSENT)


def with_log_weight(
    q: Float[Tensor, "T h e"], k: Float[Tensor, "T h e"], v: Float[Tensor, "T h e"], log_weight: Float[Tensor, " T"],
    scale: float,
) -> tuple[Float[Tensor, "T h e2"], Float[Tensor, "T h e2"], Float[Tensor, "T h e2"]]:  # fmt: skip
    """q, k and v whose ordinary attention at `scale` adds `log_weight` of each key to the logits.

    The head width grows to the next multiple of 8, which kernels want; the added channels of v are zero, to be cut off.
    """
    extra = (-q.shape[-1] - 1) % 8 + 1
    bias = (log_weight / scale).clamp(min=torch.finfo(k.dtype).min / 4).to(k.dtype)
    column = bias[:, None, None].expand(-1, k.shape[1], 1)
    k = F.pad(torch.cat([k, column], -1), (0, extra - 1))
    q = F.pad(F.pad(q, (0, 1), value=1.0), (0, extra - 1))
    return q, k, F.pad(v, (0, extra))
