"""Splits -> Layout: integers only (Sec. 3.1, Eq. 2).

The leaves of the quadtree partition the valid fine cells. Reading the padded fine grid in raster order and
keeping the top-left cell of every leaf gives the tokens of all images at once, already in the order the
backbone (and a causal language model) wants; an image's tokens are then one contiguous segment. A grid with
windows is read window by window instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from split_core.types import Grid, Layout, Runs, Splits, upsample


def build_layout(splits: Splits, valid: Bool[Tensor, "b r c"] | None = None) -> Layout:
    """The partition that `splits` describe, as one Layout.

    Reads the device once, for the tokens of each image (of each window, which add up to them); every other step is
    tensor arithmetic whose number of operations does not depend on the batch size.

    Args:
        splits: one boolean per parent and stage.
        valid: fine cells that hold picture; None means every cell of grid.cells. A cell outside makes no
            token, and a leaf makes one if any of its cells is valid.

    Raises:
        ValueError: an image has no valid cell.
    """
    grid = splits.grid
    if valid is None and grid.padded:
        valid = canvas_cells(grid, splits.masks[0].device).expand(splits.batch, -1, -1)
    scale = leaf_scale(splits)
    anchor = is_anchor(scale, grid)
    if valid is not None:
        anchor &= leaf_any(valid, scale, grid)
    ordered, cells = in_order(anchor, grid), grid.size(0)
    per_run = ordered.unflatten(1, (-1, grid.window**2 or cells)).sum(2)  # a run is a window, or else an image
    runs = per_run.tolist()
    lengths = tuple(map(sum, runs))
    if 0 in lengths:
        raise ValueError(f"image {lengths.index(0)} of the batch has no valid cell, so it would have no token")
    first = torch.nonzero_static(ordered.flatten(), size=sum(lengths)).squeeze(1)
    image = first.div(cells, rounding_mode="floor")
    row, col = _place(first % cells, grid)
    per_image = per_run.sum(1)
    cu_seqlens = F.pad(per_image.cumsum(0), (1, 0)).int()
    windows = _windows(per_run, runs) if grid.window else None
    owner = _owner(ordered, scale, grid)
    full = valid is None
    if valid is None:
        valid_cells = torch.full_like(per_image, cells)
    else:
        owner = owner.masked_fill(~valid, -1)
        valid_cells = valid.flatten(1).sum(1)
    return Layout(
        image, cu_seqlens, lengths, owner, valid_cells, grid, full,
        scale=in_order(scale, grid).flatten()[first], row=row, col=col, windows=windows,
    )  # fmt: skip


def in_order(values: Shaped[Tensor, "b r c *rest"], grid: Grid) -> Shaped[Tensor, "b n *rest"]:
    """Values of the fine cells in the order in which tokens stand: raster order, or that of each window in turn."""
    if not grid.window:
        return values.flatten(1, 2)
    side = grid.window
    return values.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3).flatten(1, 4)


def rank(row: Int[Tensor, "..."], col: Int[Tensor, "..."], grid: Grid) -> Int[Tensor, "..."]:
    """Where fine cells stand in that order; rows and columns broadcast."""
    cols, side = grid.shape(0)[1], grid.window
    if not side:
        return row * cols + col
    window = (row // side) * (cols // side) + col // side
    return (window * side + row % side) * side + col % side


def leaf_scale(splits: Splits) -> Int[Tensor, "b r c"]:
    """Scale of the leaf that covers each fine cell: S minus the splits above it."""
    nested = splits.nested()
    scale = torch.full((splits.batch, *splits.grid.shape(0)), splits.grid.stages, device=splits.masks[0].device)
    for s, mask in enumerate(nested.masks, start=1):
        scale -= upsample(mask, 1 << s).long()
    return scale


def is_anchor(scale: Int[Tensor, "b r c"], grid: Grid) -> Bool[Tensor, "b r c"]:
    """Cells that are the top-left cell of the leaf that covers them."""
    rows, cols = (torch.arange(n, device=scale.device) for n in grid.shape(0))
    return ((rows[:, None] | cols) & ((1 << scale) - 1)) == 0


def leaf_any(valid: Bool[Tensor, "b r c"], scale: Int[Tensor, "b r c"], grid: Grid) -> Bool[Tensor, "b r c"]:
    """For each fine cell: does the leaf over it hold any valid cell?"""
    result = valid.clone()
    level = valid
    for s in range(1, grid.stages + 1):
        level = pool_any(level)
        result = torch.where(scale == s, upsample(level, 1 << s), result)
    return result


def pool_any(mask: Bool[Tensor, "b r c"]) -> Bool[Tensor, "b _ _"]:
    """A parent is set if any of its four children is."""
    b, rows, cols = mask.shape
    return mask.view(b, rows // 2, 2, cols // 2, 2).any(4).any(2)


def canvas_cells(grid: Grid, device: torch.device | str = "cpu") -> Bool[Tensor, "1 r c"]:
    """Fine cells of the padded grid that hold at least one pixel of the canvas."""
    rows, cols = (torch.arange(n, device=device) for n in grid.shape(0))
    return ((rows[:, None] < grid.cells[0]) & (cols < grid.cells[1]))[None]


def picture_cells(sizes: Int[Tensor, "b 2"], grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"]:
    """Fine cells of the padded grid that hold picture, for pictures of these heights and widths at its top left."""
    starts = (torch.arange(n, device=sizes.device) * p for n, p in zip(grid.shape(0), patch_size, strict=True))
    rows, cols = (start < size[:, None] for start, size in zip(starts, sizes.T, strict=True))
    return rows[:, :, None] & cols[:, None]


def valid_at(
    grid: Grid, valid: Bool[Tensor, "b r c"] | None, device: torch.device
) -> tuple[Bool[Tensor, "b _ _"], ...]:
    """Cells of every scale that hold picture, fine first; batch 1 when all images agree."""
    levels = [canvas_cells(grid, device) if valid is None else valid]
    for _ in range(grid.stages):
        levels.append(pool_any(levels[-1]))
    return tuple(levels)


def split_cost(grid: Grid, valid: Bool[Tensor, "b r c"] | None, device: torch.device) -> tuple[Int[Tensor, "b _"], ...]:
    """Tokens that splitting each parent adds, per scale 1 .. S: its children that hold picture, minus one."""
    levels = valid_at(grid, valid, device)
    costs = []
    for s in range(1, grid.stages + 1):
        child = levels[s - 1]
        b, rows, cols = child.shape
        children = child.view(b, rows // 2, 2, cols // 2, 2).sum((2, 4))
        costs.append((children - levels[s].long()).flatten(1))
    return tuple(costs)


def leaf_weights(
    gates: Sequence[Float[Tensor, "b _"]], grid: Grid, valid: Bool[Tensor, "b r c"] | None = None
) -> tuple[Float[Tensor, "b _"], ...]:
    """How far each cell is a leaf when parents split in part, or independently with these probabilities.

    Differentiable: the product of the gates above a cell, times one minus its own; at binary gates 1 for the leaves
    of the partition and 0 for the rest. Cells without picture weigh nothing.

    Args:
        gates: index s - 1, values in [0, 1].

    Returns: index s = 0 .. S, (b, n_s).
    """
    levels = valid_at(grid, valid, gates[0].device)
    reach = levels[-1].to(gates[0].dtype).expand(gates[0].shape[0], -1, -1)
    weights = []
    for s in range(grid.stages, 0, -1):
        gate = gates[s - 1].unflatten(1, grid.shape(s))
        weights.append((reach * (1 - gate)).flatten(1))
        reach = upsample(reach * gate) * levels[s - 1]
    return (reach.flatten(1), *weights[::-1])


def expected_fraction(
    gates: Sequence[Float[Tensor, "b _"]], grid: Grid, valid: Bool[Tensor, "b r c"] | None = None
) -> Float[Tensor, " b"]:
    """E[P(x, M)] in closed form for independent splits with these probabilities; differentiable."""
    cells = valid_at(grid, valid, gates[0].device)[0].flatten(1).sum(1)
    return torch.cat(leaf_weights(gates, grid, valid), 1).sum(1) / cells


def uniform_probability(grid: Grid, fraction: float) -> float:
    """The probability at which every parent must split for an expected token fraction on the whole canvas."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        gates = [torch.full((1, grid.size(s)), middle, dtype=torch.float64) for s in range(1, grid.stages + 1)]
        low, high = (low, middle) if float(expected_fraction(gates, grid)) > fraction else (middle, high)
    return (low + high) / 2


def uniform_splits(grid: Grid, batch: int, *, split: bool, device: torch.device | str = "cpu") -> Splits:
    """Every parent splits (all fine: the dense ViT) or none does (all coarse)."""
    shapes = (grid.shape(s) for s in range(1, grid.stages + 1))
    return Splits(tuple(torch.full((batch, *shape), split, device=device) for shape in shapes), grid)


def coarse_layout(grid: Grid, batch: int, valid: Bool[Tensor, "b r c"] | None, device: torch.device) -> Layout:
    """The partition in which nothing splits; without `valid` it depends on sizes alone and is kept between calls."""
    if valid is not None:
        return build_layout(uniform_splits(grid, batch, split=False, device=device), valid)
    return _coarse_layout(grid, batch, device)


@lru_cache(maxsize=8)
def _coarse_layout(grid: Grid, batch: int, device: torch.device) -> Layout:
    with torch.inference_mode(False):  # its indices may serve training later
        return build_layout(uniform_splits(grid, batch, split=False, device=device))


def _place(index: Int[Tensor, " t"], grid: Grid) -> tuple[Int[Tensor, " t"], Int[Tensor, " t"]]:
    """Row and column of the fine cell at each place of the order: what `rank` undoes."""
    cols, side = grid.shape(0)[1], grid.window
    if not side:
        return index.div(cols, rounding_mode="floor"), index % cols
    window, inside = index // side**2, index % side**2
    across = cols // side
    return (window // across) * side + inside // side, (window % across) * side + inside % side


def _windows(per_run: Int[Tensor, "b w"], runs: Sequence[Sequence[int]]) -> Runs:
    """The windows that hold tokens. `runs` are the same counts as Python integers."""
    lengths = tuple(n for image in runs for n in image if n)
    counts = per_run.flatten()
    counts = counts[torch.nonzero_static(counts, size=len(lengths)).squeeze(1)]
    return Runs(F.pad(counts.cumsum(0), (1, 0)).int(), lengths)


def _owner(ordered: Bool[Tensor, "b n"], scale: Int[Tensor, "b r c"], grid: Grid) -> Int[Tensor, "b r c"]:
    """Token index of the leaf over each fine cell: look up the running count of anchors at its top-left cell."""
    token = ordered.flatten().long().cumsum(0).sub_(1)
    rows, cols = (torch.arange(n, device=scale.device) for n in grid.shape(0))
    keep = ~((1 << scale) - 1)
    top_left = rank(rows[:, None] & keep, cols & keep, grid)
    base = torch.arange(scale.shape[0], device=scale.device)[:, None, None] * grid.size(0)
    return token[(base + top_left).flatten()].view_as(scale)
