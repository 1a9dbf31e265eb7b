"""The nouns of the method, and the legend of axes that every signature uses.

    b  images of a batch (or rollouts: K * b)      s  scale, 0 = fine (p px) .. S = coarse (2^S p px)
    n  cells of one scale's grid                   m  cells of all scales, fine first (the whole pyramid)
    t  packed patch tokens of a batch              T  packed tokens with the prefix (class, registers)
    d  embedding width                             r c  rows and columns of the padded fine grid

Data flow (paper, Fig. 2):  images -> Pyramid -> logits -> Splits -> Layout -> Packed -> blocks -> Features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from split_core.kept import lasting


@dataclass(frozen=True)
class Grid:
    """Sizes of the quadtree over one canvas: everything that depends on H, W, p and S alone.

    Args:
        cells: rows and columns of fine cells that hold at least one pixel, ceil(H / p), ceil(W / p).
        stages: S, the number of split stages.
        window: tokens are ordered by square windows of this side in fine cells (`split_core.windows`), which divide
            the grid; 0 for plain raster order.
    """

    cells: tuple[int, int]
    stages: int
    window: int = 0

    def shape(self, scale: int) -> tuple[int, int]:
        """Rows and columns at `scale` of the grid padded (bottom, right) to whole coarse patches."""
        unit = 1 << self.stages
        rows, cols = (-(-c // unit) * unit for c in self.cells)
        return rows >> scale, cols >> scale

    def size(self, scale: int) -> int:
        """Number of cells n at `scale`."""
        rows, cols = self.shape(scale)
        return rows * cols

    def offset(self, scale: int) -> int:
        """Where `scale` starts when the scales are concatenated, fine first."""
        return sum(self.size(s) for s in range(scale))

    @property
    def total(self) -> int:
        """m: the cells of all scales together."""
        return self.offset(self.stages + 1)

    @property
    def padded(self) -> bool:
        """Whether some fine cells of the padded grid lie wholly outside the image."""
        return self.shape(0) != self.cells


@dataclass(frozen=True)
class Look:
    """What the first blocks of the backbone make of the coarsest patches: context to decide by (not in the paper).

    Args:
        tokens: (b, n_S, d) coarse tokens after those blocks; zero for cells without picture.
        change: (b, n_S, d) what the blocks added to each.
        prefix_change: (b, k, d) the same for the prefix tokens.
    """

    tokens: Float[Tensor, "b n d"]
    change: Float[Tensor, "b n d"]
    prefix_change: Float[Tensor, "b k d"]

    def detach(self) -> Look:
        """The same values outside the autograd graph."""
        return Look(self.tokens.detach(), self.change.detach(), self.prefix_change.detach())


@dataclass(frozen=True)
class Pyramid:
    """Pre-positional embeddings of every patch at every scale (Sec. 3.1).

    Args:
        levels: S + 1 tensors (b, n_s, d), fine first, each in raster order of its grid.
        grid: the sizes.
        valid: (b, r, c) fine cells that hold picture; None when all do.
        look: the coarse level through the first blocks, where the policy wants it (`SplitPolicy.depth`).
    """

    levels: tuple[Float[Tensor, "b _ d"], ...]
    grid: Grid
    valid: Bool[Tensor, "b r c"] | None = None
    look: Look | None = None

    @property
    def batch(self) -> int:
        return self.levels[0].shape[0]

    def children(self, scale: int) -> Float[Tensor, "b n 4 d"]:
        """The four children of every parent at `scale`, in raster order inside the parent."""
        level = self.levels[scale - 1]
        b, _, d = level.shape
        rows, cols = self.grid.shape(scale)
        quads = level.view(b, rows, 2, cols, 2, d).transpose(2, 3)
        return quads.reshape(b, rows * cols, 4, d)

    def detach(self) -> Pyramid:
        """The same values outside the autograd graph (a policy never trains the backbone in PPO)."""
        look = None if self.look is None else self.look.detach()
        return Pyramid(tuple(level.detach() for level in self.levels), self.grid, self.valid, look)


@dataclass(frozen=True)
class Splits:
    """One boolean per parent and stage: does it split?  masks[s - 1] is (b, rows_s, cols_s).

    A mask may hold True below a parent that did not split; `nested` clears those.
    """

    masks: tuple[Bool[Tensor, "b _ _"], ...]
    grid: Grid

    @property
    def batch(self) -> int:
        return self.masks[0].shape[0]

    def nested(self) -> Splits:
        """The same partition with every split below an unsplit parent cleared."""
        masks: list[Tensor] = list(self.masks)
        for s in range(len(masks) - 1, 0, -1):
            masks[s - 1] = masks[s - 1] & upsample(masks[s])
        return Splits(tuple(masks), self.grid)


@dataclass(frozen=True)
class Cover:
    """Which token stands for which fine cells, however that came about.

    Splitting makes a `Layout`, which knows more; merging and dropping between layers make `Reduced` covers
    (`split_core.reducer`). Heads, dense maps, means and counts read no more than this.

    Args:
        image: (t,) image of each token.
        cu_seqlens: (b + 1,) int32, where each image's tokens start.
        lengths: the tokens of each image as Python integers (the forward's only device read).
        owner: (b, r, c) fine cell -> token; -1 in padding, and where a token was dropped.
        valid_cells: (b,) N, the fine cells that hold picture.
        grid: the sizes.
        full: no owner is -1.
    """

    image: Int[Tensor, " t"]
    cu_seqlens: Int[Tensor, " b1"]
    lengths: tuple[int, ...]
    owner: Int[Tensor, "b r c"]
    valid_cells: Int[Tensor, " b"]
    grid: Grid
    full: bool

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        """t, the patch tokens of the whole batch."""
        return sum(self.lengths)

    @property
    def all_fine(self) -> bool:
        """Whether every image is the dense model's: each cell of the grid a token of its own."""
        return self.full and set(self.lengths) == {self.grid.size(0)}

    @property
    def counts(self) -> Int[Tensor, " b"]:
        """n_i, the patch tokens of each image."""
        return self.cu_seqlens.diff().long()

    @property
    def token_fraction(self) -> Float[Tensor, " b"]:
        """P(x, M) = n / N over patch tokens and valid cells; prefix tokens do not count."""
        return self.counts / self.valid_cells

    def per_layer(self, depth: int) -> list[tuple[Any, Any]]:
        """Patch tokens that attention and MLP of each of `depth` blocks read, image by image: here the same in all."""
        counts = self.counts.cpu().numpy()
        return [(counts, counts)] * depth

    @lasting
    def area(self) -> Int[Tensor, " t"]:
        """Valid fine cells that each token covers; they sum to N over an image of which nothing was dropped."""
        owned = self.owner.flatten()
        sizes = torch.zeros(self.total + 1, dtype=torch.long, device=owned.device)
        return sizes.scatter_add_(0, owned + 1, torch.ones_like(owned))[1:]

    def fine(self) -> Bool[Tensor, "b r c"]:
        """Fine cells that have a token of their own."""
        if self.total == 0:
            return self.owner >= 0
        return (self.area[self.owner.clamp_min(0)] == 1) & (self.owner >= 0)


@dataclass(frozen=True)
class Runs:
    """Groups of consecutive tokens: the windows of all images that hold any.

    Args:
        cu_seqlens: (w + 1,) int32, where each starts.
        lengths: their tokens as Python integers.
    """

    cu_seqlens: Int[Tensor, " w1"]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Layout(Cover):
    """Which token is where: the one owner of that knowledge (Sec. 3.1-3.3).

    The tokens of an image partition its valid fine cells. They stand in raster order of their top-left
    fine cell, image after image; with windows, window after window within the image and in raster order within each, so
    that an image's tokens and a window's are both consecutive. Prefix tokens are not in a layout; `Packed` adds them.

    Args (besides those of `Cover`):
        scale: (t,) scale s of each token; it covers 2^s x 2^s fine cells.
        row, col: (t,) its top-left fine cell.
        windows: where each window's tokens stand; None without windows.
    """

    scale: Int[Tensor, " t"]
    row: Int[Tensor, " t"]
    col: Int[Tensor, " t"]
    windows: Runs | None = None

    @lasting
    def cell(self) -> Int[Tensor, " t"]:
        """Row of each token in the concatenated pyramid (m cells, fine first)."""
        return self._cell(self.grid, self.row, self.col)

    @lasting
    def window_cell(self) -> Int[Tensor, " t"]:
        """The same in the pyramid of its window alone."""
        side = self.grid.window
        return self._cell(Grid((side, side), self.grid.stages), self.row % side, self.col % side)

    def _cell(self, grid: Grid, row: Int[Tensor, " t"], col: Int[Tensor, " t"]) -> Int[Tensor, " t"]:
        sizes = [(grid.offset(s), grid.shape(s)[1]) for s in range(grid.stages + 1)]
        table = torch.tensor(sizes, device=self.scale.device)[self.scale]
        return table[:, 0] + (row >> self.scale) * table[:, 1] + (col >> self.scale)

    def window_pairs(self) -> Any:
        """Pairs of tokens that share a window, image by image: what attention computes in a block with windows."""
        assert self.windows is not None
        squares = self.windows.cu_seqlens.diff().double().square()
        image = self.image[self.windows.cu_seqlens[:-1].long()]
        return squares.new_zeros(self.batch).index_add(0, image, squares).cpu().numpy()

    @lasting
    def ancestor(self) -> Int[Tensor, " t"]:
        """The coarsest cell over each token, in raster order of the coarse grid."""
        stages = self.grid.stages
        return (self.row >> stages) * self.grid.shape(stages)[1] + (self.col >> stages)

    def fine(self) -> Bool[Tensor, "b r c"]:
        """Fine cells that got a token of their own."""
        if self.total == 0:
            return self.owner >= 0
        return (self.scale[self.owner.clamp_min(0)] == 0) & (self.owner >= 0)


def upsample(mask: Tensor, factor: int = 2) -> Tensor:
    """Repeat every cell of (..., rows, cols) factor x factor times: a parent's value for its children."""
    if factor == 1:
        return mask
    *lead, rows, cols = mask.shape
    return (
        mask[..., :, None, :, None]
        .expand(*lead, rows, factor, cols, factor)
        .reshape(*lead, rows * factor, cols * factor)
    )
