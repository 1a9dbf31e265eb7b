"""An attention backend computes block-diagonal attention over a packed sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from split_core.attention import AttentionBackend
from split_core.packing import Segments


class NaiveAttention(AttentionBackend):
    """Softmax(q k^T) v, written out, one image after the other."""

    name = "naive"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        lengths = list(segments.lengths)
        outputs = []
        for qi, ki, vi in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            weights = torch.einsum("ihe,jhe->hij", qi, ki).mul(scale).softmax(-1)
            outputs.append(torch.einsum("hij,jhe->ihe", F.dropout(weights, dropout), vi))
        return torch.cat(outputs)
