"""The light head of segmentation: one linear layer on the tokens, so that its cost falls with their number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from split_core.features import Features


class LinearHead(nn.Module):
    """Logits of a small picture for every token, stretched over the area that the token covers.

    Args:
        dim: width of the tokens.
        taps: how many blocks are read; each has a norm of its own.
        classes: outputs.
        detail: q, side of each token's picture. A coarse token's is as large and covers more pixels, so that a split
            quadruples the resolution.
        dropout: of the normalised tokens.
    """

    def __init__(self, dim: int, *, taps: int, classes: int, detail: int, dropout: float) -> None:
        super().__init__()
        self.detail = detail
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(taps))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(dim * taps, detail * detail * classes)

    def forward(self, features: Features) -> Float[Tensor, "b k h w"]:
        """(b, k, q * rows, q * cols) from the taps of `features`."""
        return features.spread(self.tokens(features.taps, features.packed.patch_index))

    def tokens(self, taps: Sequence[Float[Tensor, "T d"]], patches: Tensor) -> Float[Tensor, "t q q k"]:
        """Each patch token's picture."""
        read = [norm(tap.index_select(0, patches)) for norm, tap in zip(self.norms, taps, strict=True)]
        logits = self.classifier(self.dropout(torch.cat(read, -1)))
        return logits.unflatten(-1, (self.detail, self.detail, -1))
