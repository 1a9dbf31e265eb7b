"""What the backbone made of a batch, and the ways heads read it: prefix tokens, patch tokens, means, dense maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from split_core.packing import Packed, area_mean, dense_map, detail_map, token_mean
from split_core.types import Layout

Pooling = Literal["area", "token"]


@dataclass(frozen=True)
class Features:
    """What the backbone made of a batch.

    Args:
        tokens: (T, d) after the final norm, prefix tokens included.
        packed: where each token stands.
        layout: what each patch token covers.
        taps: (T, d) tokens after the blocks that were asked for, before the final norm.
    """

    tokens: Float[Tensor, "T d"]
    packed: Packed
    layout: Layout
    taps: tuple[Float[Tensor, "T d"], ...] = ()

    @property
    def batch(self) -> int:
        """Images, or images times rollouts."""
        return self.layout.batch

    @property
    def patches(self) -> Float[Tensor, "t d"]:
        """Patch tokens in the layout's order."""
        return self.tokens.index_select(0, self.packed.patch_index)

    @property
    def prefix(self) -> Float[Tensor, "b k d"]:
        """Class and register tokens."""
        return self.tokens[self.packed.prefix_index]

    def dense(self, tap: int | None = None) -> Float[Tensor, "b d r c"]:
        """A value for every fine cell of the canvas: that of the token over it, at the end or at the tap-th tap."""
        tokens = self.tokens if tap is None else self.taps[tap]
        return dense_map(tokens.index_select(0, self.packed.patch_index), self.layout)

    def spread(self, values: Float[Tensor, "t q q d"]) -> Float[Tensor, "b d _ _"]:
        """A picture of q x q values for every patch token (in the order of `packed.patch_index`), over the canvas."""
        return detail_map(values, self.layout)

    def mean(self, pooling: Pooling, *, prefix: bool = False) -> Float[Tensor, "b d"]:
        """Mean of the patch tokens, weighted by the area they cover or equally; with `prefix`, of those too."""
        layout = self.layout
        pooled = (area_mean if pooling == "area" else token_mean)(self.patches, layout)
        if not prefix:
            return pooled
        count = (layout.valid_cells if pooling == "area" else layout.counts)[:, None]
        return (pooled * count + self.prefix.sum(1)) / (count + self.prefix.shape[1])

    def weighted(
        self, pooling: Pooling, *, prefix: bool
    ) -> tuple[Float[Tensor, "n d"], Int[Tensor, " n"], Float[Tensor, " n"]]:
        """Tokens, the image of each, and how much it counts: the cells it covers, or 1; prefix tokens count 1."""
        segments, index = self.packed.segments, self.packed.patch_index
        area = self.layout.area if pooling == "area" else torch.ones_like(self.layout.image)
        weight = area.to(self.tokens.dtype)
        if not prefix:
            return self.patches, self.layout.image, weight
        return self.tokens, segments.image, torch.ones_like(self.tokens[:, 0]).index_copy(0, index, weight)
