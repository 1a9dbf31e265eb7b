"""xformers' memory-efficient attention with a BlockDiagonalMask (CUDA; its wheel has no CPU operator)."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from split_core.attention.base import AttentionBackend
from split_core.packing import Segments


def block_diagonal_mask(segments: Segments, device: Any) -> Any:
    """The mask object xformers wants, from lengths that are already Python integers."""
    # A build for another torch logs a misleading warning when imported; the probe runs the operator instead.
    logging.getLogger("xformers").setLevel(logging.ERROR)
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    return BlockDiagonalMask.from_seqlens(list(segments.lengths), device=device)


class XformersAttention(AttentionBackend):
    """The paper's implementation of packed attention."""

    name = "xformers"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        mask = segments.kept.get(self.name)
        if mask is None:
            mask = segments.kept[self.name] = block_diagonal_mask(segments, q.device)
        from xformers.ops import memory_efficient_attention

        return memory_efficient_attention(q[None], k[None], v[None], attn_bias=mask, scale=scale, p=dropout)[0]
