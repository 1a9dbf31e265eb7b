"""What the backbone made of a batch, and the ways heads read it: prefix tokens, patch tokens, means, dense maps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from split_core.backbone.pooling import pool_attention
from split_core.errors import SplitError
from split_core.packing import Packed, area_mean, dense_map, detail_map, token_mean
from split_core.types import Cover, Layout

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
    layout: Cover
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
        return dense_map(self.at(tap), self.layout)

    def at(self, tap: int | None) -> Float[Tensor, "t d"]:
        """Patch tokens at the end or at the tap-th tap, to map one by one and give to `spread`."""
        tokens = self.tokens if tap is None else self.taps[tap]
        return tokens.index_select(0, self.packed.patch_index)

    def spread(self, values: Float[Tensor, "t q q d"], tap: int | None) -> Float[Tensor, "b d _ _"]:
        """A picture of q x q values for every token of `at(tap)`, each over the cells that its token covers."""
        assert isinstance(self.layout, Layout)
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


def timm_head(vit: Any, features: Features, pooling: Pooling) -> Any:
    """The timm model's own head on the pooled tokens: logits (two for a distilled model that trains as such)."""
    if vit.global_pool == "token":
        return vit.forward_head(features.prefix)
    if vit.attn_pool is None:
        pooled = features.mean(pooling, prefix=getattr(vit, "pool_include_prefix", False))
    else:  # timm's Eva pools over its prefix too
        x, image, weight = features.weighted(pooling, prefix=getattr(vit, "pool_include_prefix", True))
        pooled = pool_attention(vit.attn_pool, x, image, features.batch, weight)
    return vit.head(vit.head_drop(vit.fc_norm(pooled)))


def check_taps(taps: Any, start: int, stop: int) -> None:
    """Refuse what are not numbers of blocks from `start` to `stop` - 1, rising.

    Raises:
        SplitError: names the first that is not.
    """
    if isinstance(taps, str) or not isinstance(taps, Sequence):
        raise SplitError(f"taps={taps!r} should be a list of block numbers, e.g. [{stop - 1}]")
    for tap in taps:
        if not isinstance(tap, int) or isinstance(tap, bool) or not start <= tap < stop:
            raise SplitError(f"tap {tap!r}: the sequence passes blocks {start} to {stop - 1}")
    if any(low >= high for low, high in itertools.pairwise(taps)):
        raise SplitError(f"taps={list(taps)} should rise: the outputs come in the order of the blocks")
