"""All cells of all scales in one sequence, each counting in part: a mixed forward that is differentiable in its splits.

    gate of a parent   g in [0, 1]      it splits if 1
    weight of a cell   product of the gates above it, times (1 - its own gate)

The weights multiply the keys of every attention and the tokens of every pooling. At binary gates only the leaves
count, and the result is that of the mixed sequence; one backward gives dE/dg of every parent at once. Not in the
paper, whose appendix B argues against differentiable rivals; `credit` and `gate` are built on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from split_core.attention.weighted import WeightedAttention
from split_core.errors import SplitError
from split_core.features import Features, Pooling
from split_core.model import SplitViT
from split_core.quadtree import leaf_weights, rank, valid_at
from split_core.types import Cover, Grid, Layout, Pyramid, Runs, upsample

Gates = tuple[Float[Tensor, "b _"], ...]
"""Index s - 1: (b, n_s) gates of the parents at scale s."""


@dataclass(frozen=True)
class UnionFeatures(Features):
    """Features of a union sequence: what heads read, weighted.

    Args:
        weights: (b, n_s) of the cells of each scale, fine first.
    """

    weights: tuple[Float[Tensor, "b _"], ...] = ()

    @property
    def patches(self) -> Float[Tensor, "t d"]:
        """Not to be had: each cell is there in part only.

        Raises:
            SplitError: always.
        """
        raise SplitError(
            "a head that learns through the union sequence must read features.prefix, mean() or dense(), "
            "because its patch tokens count in part"
        )

    def dense(self, tap: int | None = None) -> Float[Tensor, "b d r c"]:
        """Mixture, for every fine cell, of the cells over it at all scales, by their weights; zero without picture."""
        total = sum(
            (
                upsample((level * weight.unsqueeze(-1)).transpose(1, 2).unflatten(2, self.layout.grid.shape(s)), 1 << s)
                for s, (level, weight) in enumerate(zip(self._levels(tap), self.weights, strict=True))
            ),
            start=torch.zeros((), device=self.tokens.device, dtype=self.tokens.dtype),
        )
        return self._inside(total, 1)

    def spread(self, values: Float[Tensor, "t q q d"], tap: int | None) -> Float[Tensor, "b d _ _"]:
        """Mixture of the pictures of the cells at all scales, by their weights."""
        grid, q = self.layout.grid, values.shape[1]
        total = torch.zeros((), device=values.device, dtype=values.dtype)
        for s, (level, weight) in enumerate(zip(self._split(values), self.weights, strict=True)):
            b, (high, wide) = level.shape[0], grid.shape(s)
            pictures = (level * weight[..., None, None, None]).view(b, high, wide, q, q, -1)
            total = total + upsample(pictures.permute(0, 5, 1, 3, 2, 4).reshape(b, -1, high * q, wide * q), 1 << s)
        return self._inside(total, q)

    def _inside(self, dense: Float[Tensor, "b d _ _"], points: int) -> Float[Tensor, "b d _ _"]:
        """The canvas of a map with so many points for each fine cell, emptied where there is no picture."""
        rows, cols = self.layout.grid.cells
        if not self.layout.full:
            dense = dense * upsample(self.layout.owner >= 0, points).unsqueeze(1).to(dense.dtype)
        return dense[..., : rows * points, : cols * points]

    def weighted(
        self, pooling: Pooling, *, prefix: bool
    ) -> tuple[Float[Tensor, "n d"], Int[Tensor, " n"], Float[Tensor, " n"]]:
        """All cells, each counting its share in the partition."""
        share = _as_tokens(torch.cat(self._shares(pooling), 1), self.layout).flatten().to(self.tokens.dtype)
        index = self.packed.patch_index
        if not prefix:
            return self.tokens.index_select(0, index), self.layout.image, share
        return self.tokens, self.packed.segments.image, torch.ones_like(self.tokens[:, 0]).index_copy(0, index, share)

    def mean(self, pooling: Pooling, *, prefix: bool = False) -> Float[Tensor, "b d"]:
        """Mean over the cells by weight, and by area with `area`."""
        shares = self._shares(pooling)
        total = torch.stack([share.sum(1) for share in shares]).sum(0)[:, None]
        weighted = torch.stack(
            [(level * share.unsqueeze(-1)).sum(1) for level, share in zip(self._levels(None), shares, strict=True)]
        ).sum(0)
        if not prefix:
            return weighted / total
        return (weighted + self.prefix.sum(1)) / (total + self.prefix.shape[1])

    def _shares(self, pooling: Pooling) -> list[Float[Tensor, "b _"]]:
        grid = self.layout.grid
        if pooling == "token":
            return list(self.weights)
        areas = _areas(grid, self.layout.owner)
        return [weight * area for weight, area in zip(self.weights, areas, strict=True)]

    def _levels(self, tap: int | None) -> tuple[Float[Tensor, "b _ d"], ...]:
        return self._split(self.at(tap))

    def _split(self, values: Shaped[Tensor, "t *rest"]) -> tuple[Shaped[Tensor, "b _ *rest"], ...]:
        """Values of the tokens as those of the cells of each scale, fine first."""
        grid = self.layout.grid
        cells = values.unflatten(0, (-1, grid.total))
        if grid.window:
            cells = cells.index_select(1, _order(self.layout).argsort())
        return cells.split([grid.size(s) for s in range(grid.stages + 1)], dim=1)


def encode_union(
    model: SplitViT, pyramid: Pyramid, gates: Gates, *, taps: tuple[int, ...] | None = None, inside: bool = False
) -> UnionFeatures:
    """Run the backbone on every cell of the pyramid, each with its weight under the gates.

    Args:
        gates: of K * b images for a pyramid of b; row k * b + i is image i.
        taps: as for `SplitViT.encode`.
        inside: no gate is exactly 0 or 1; attention is then several times as fast (`WeightedAttention.positive`).
    """
    batch = gates[0].shape[0]
    valid = pyramid.valid
    if valid is not None:
        valid = valid.repeat(batch // pyramid.batch, 1, 1)
    weights = leaf_weights(gates, pyramid.grid, valid)
    layout = union_layout(pyramid.grid, batch, gates[0].device)
    if valid is not None:
        owner, cells = layout.owner.masked_fill(~valid, -1), valid.flatten(1).sum(1)
        layout = replace(layout, owner=owner, valid_cells=cells, full=False)
    prefix = model.positions.prefix()
    ones = weights[0].new_ones(batch, 0 if prefix is None else prefix.shape[0])
    weight = torch.cat([ones, _as_tokens(torch.cat(weights, 1), layout)], 1)
    attention = WeightedAttention(weight, positive=inside)
    features = model.encode(pyramid, layout, taps=taps, attention=attention)
    return UnionFeatures(features.tokens, features.packed, layout, features.taps, weights)


@lru_cache(maxsize=8)
def union_layout(grid: Grid, batch: int, device: torch.device) -> Layout:
    """Every cell of every scale as a token: no partition, but it stands where a partition's tokens would.

    They stand scale by scale, fine first; with windows, window by window and there scale by scale.

    `owner` names the fine cell itself and is -1 outside the canvas.
    """
    with torch.inference_mode(False):
        rows, cols, scales = [], [], []
        for s in range(grid.stages + 1):
            n_rows, n_cols = grid.shape(s)
            rows.append((torch.arange(n_rows, device=device) << s).repeat_interleave(n_cols))
            cols.append((torch.arange(n_cols, device=device) << s).repeat(n_rows))
            scales.append(torch.full((grid.size(s),), s, device=device))
        row, col, scale = torch.cat(rows), torch.cat(cols), torch.cat(scales)
        total = grid.total
        starts = torch.arange(batch + 1, device=device) * total
        inside = valid_at(grid, None, device)[0]
        token, windows = torch.arange(total, device=device), None
        if grid.window:
            count = grid.size(0) // grid.window**2
            order = (rank(row, col, grid) // grid.window**2).argsort(stable=True)
            row, col, scale, token = row[order], col[order], scale[order], order.argsort()
            each = total // count
            bounds = torch.arange(0, (batch * count + 1) * each, each, device=device)
            windows = Runs(bounds.int(), (each,) * (batch * count))
        owner = token[: grid.size(0)].view(1, *grid.shape(0)) + starts[:-1, None, None]
        return Layout(
            image=torch.arange(batch, device=device).repeat_interleave(total),
            scale=scale.repeat(batch),
            row=row.repeat(batch),
            col=col.repeat(batch),
            cu_seqlens=starts.int(),
            lengths=(total,) * batch,
            owner=owner.masked_fill(~inside, -1),
            valid_cells=inside.flatten(1).sum(1).expand(batch),
            grid=grid,
            full=not grid.padded,
            windows=windows,
        )


def _order(layout: Cover) -> Int[Tensor, " m"]:
    """The cell of the pyramid that each token of an image stands for, alike for all images."""
    assert isinstance(layout, Layout)
    return layout.cell[: layout.grid.total]


def _as_tokens(values: Float[Tensor, "b m"], layout: Cover) -> Float[Tensor, "b m"]:
    """A number for each cell of the pyramid in the order of a union's tokens."""
    return values.index_select(1, _order(layout)) if layout.grid.window else values


def _areas(grid: Grid, owner: Tensor) -> list[Float[Tensor, "b _"]]:
    """Valid fine cells under every cell, per scale."""
    inside = (owner >= 0).float()[:, None]
    return [F.avg_pool2d(inside, 1 << s).flatten(1) * 4**s for s in range(grid.stages + 1)]
