"""Reference backend: full attention under a block-diagonal boolean mask. Quadratic in the whole batch; for tests."""

from __future__ import annotations

from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from split_core.attention.base import AttentionBackend
from split_core.packing import Segments


def block_diagonal(segments: Segments) -> Bool[Tensor, "T T"]:
    """True where query and key belong to the same image."""
    return segments.image[:, None] == segments.image[None, :]


class MaskedAttention(AttentionBackend):
    """The definition, spelled out; every other backend is judged by it."""

    name = "masked"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = block_diagonal(segments)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, dropout_p=dropout)
        return out[0].transpose(0, 1)
