"""Hypothesis strategies for quadtrees: sides, stages, one boolean per parent, which cells hold picture.

Structure is drawn (and shrinks); values of embeddings come from a drawn seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from split_core.types import Grid, Pyramid, Splits

seeds = st.integers(0, 2**31 - 1)
stages = st.integers(1, 3)
batches = st.integers(1, 4)


@dataclass(frozen=True)
class Case:
    """A batch of partitions and the cells of its padded fine grid that hold picture (None: the whole canvas).

    It keeps plain tensors: the run-time checks of shapes look at random items of a tuple, and hypothesis wants no
    randomness but its own while it draws.
    """

    grid: Grid
    masks: tuple[Tensor, ...]
    valid: Tensor | None

    @property
    def batch(self) -> int:
        return self.masks[0].shape[0]

    @property
    def splits(self) -> Splits:
        return Splits(self.masks, self.grid)

    @property
    def holds_picture(self) -> Tensor:
        """(b, r, c), written out."""
        return corner(self.grid, self.grid.cells).expand(self.batch, -1, -1) if self.valid is None else self.valid


def corner(grid: Grid, cells: tuple[int, int]) -> Tensor:
    """(r, c) fine cells of the padded grid, True in the top-left `cells`."""
    mask = torch.zeros(grid.shape(0), dtype=torch.bool)
    mask[: cells[0], : cells[1]] = True
    return mask


@st.composite
def grids(draw: st.DrawFn, largest: int = 10, most_stages: int = 3) -> Grid:
    """Any number of rows and columns, a multiple of the coarse patch or not."""
    cells = st.integers(1, largest)
    return Grid((draw(cells), draw(cells)), draw(st.integers(1, most_stages)))


@st.composite
def bits(draw: st.DrawFn, *shape: int) -> Tensor:
    """A boolean tensor, drawn as one whole number: it shrinks to all False."""
    count = torch.Size(shape).numel()
    number = draw(st.integers(0, 2**count - 1))
    return torch.tensor([number >> i & 1 for i in range(count)], dtype=torch.bool).view(shape)


@st.composite
def masks_of(draw: st.DrawFn, grid: Grid, batch: int) -> tuple[Tensor, ...]:
    """Per-parent booleans, nested or not; all fine and all coarse come up on purpose."""
    kind = draw(st.sampled_from(["drawn", "drawn", "drawn", "coarse", "fine"]))
    shapes = [(batch, *grid.shape(s)) for s in range(1, grid.stages + 1)]
    if kind == "drawn":
        return tuple(draw(bits(*shape)) for shape in shapes)
    return tuple(torch.full(shape, kind == "fine") for shape in shapes)


@st.composite
def validity_of(draw: st.DrawFn, grid: Grid, batch: int) -> Tensor | None:
    """None, a picture in the top-left corner of the canvas, or any cells at all; never an empty image."""
    kind = draw(st.sampled_from(["none", "corner", "any"]))
    if kind == "none":
        return None
    rows, cols = grid.cells
    corners = torch.stack(
        [corner(grid, (draw(st.integers(1, rows)), draw(st.integers(1, cols)))) for _ in range(batch)]
    )
    if kind == "corner":
        return corners
    anywhere = draw(bits(batch, *grid.shape(0))) & corner(grid, grid.cells)
    for image in range(batch):
        anywhere[image, draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = True
    return anywhere


@st.composite
def cases(draw: st.DrawFn, largest: int = 10, most_stages: int = 3, most_images: int = 4) -> Case:
    """A batch of quadtrees."""
    grid = draw(grids(largest, most_stages))
    batch = draw(st.integers(1, most_images))
    return Case(grid, draw(masks_of(grid, batch)), draw(validity_of(grid, batch)))


def random_pyramid(grid: Grid, batch: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> Pyramid:
    """Embeddings of every cell, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    levels = (torch.randn(batch, grid.size(s), dim, generator=generator, dtype=dtype) for s in range(grid.stages + 1))
    return Pyramid(tuple(levels), grid)


def random_logits(grid: Grid, batch: int, seed: int, spread: float = 2.0) -> tuple[Tensor, ...]:
    """Logits of every parent, from a seed; index s - 1."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(spread * torch.randn(batch, grid.size(s), generator=generator) for s in range(1, grid.stages + 1))
