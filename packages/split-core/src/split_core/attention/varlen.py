"""torch's own variable-length flash attention (torch >= 2.10, CUDA, half precision)."""

from __future__ import annotations

from torch import Tensor

from split_core.attention.base import AttentionBackend
from split_core.packing import Segments


class VarlenAttention(AttentionBackend):
    """One kernel for the whole packed batch; lengths stay on the device."""

    name = "varlen"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if dropout:
            raise ValueError(
                "attention backend 'varlen' has no dropout; use attention=sdpa or a model with attn_drop 0"
            )
        cu, longest = segments.cu_seqlens, segments.max_length
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale)
        assert isinstance(out, Tensor)  # a pair only when the log-sum-exp is asked for
        return out
