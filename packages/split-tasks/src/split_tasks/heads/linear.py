"""The light head of segmentation: one linear layer on the tokens, so that its cost falls with their number."""

from __future__ import annotations

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
        self.classifiers = nn.ModuleList(nn.Linear(dim, detail * detail * classes, bias=i == 0) for i in range(taps))

    def forward(self, features: Features) -> Float[Tensor, "b k h w"]:
        """(b, k, q * rows, q * cols) from the taps of `features`; what the blocks say is added up."""
        maps = [features.spread(self.pictures(features.at(tap), tap), tap) for tap in range(len(self.norms))]
        return torch.stack(maps).sum(0)

    def pictures(self, tokens: Float[Tensor, "t d"], tap: int) -> Float[Tensor, "t q q k"]:
        """Each token's logits."""
        logits = self.classifiers[tap](self.dropout(self.norms[tap](tokens)))
        return logits.unflatten(-1, (self.detail, self.detail, -1))
