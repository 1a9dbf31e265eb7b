"""Pyramid + Layout -> Packed tokens, and back to a dense map (Sec. 3.3).

A batch becomes one sequence: for each image its prefix tokens (class, registers), then its patch tokens in
the layout's order. Attention is block-diagonal over images, so nothing is padded and nothing is wasted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from split_core.kept import lasting
from split_core.quadtree import in_order
from split_core.types import Cover, Grid, Layout, Look, Pyramid


@dataclass(frozen=True)
class Segments:
    """Where each image's tokens lie in a packed sequence, prefix included: all that attention needs. In a block with
    windows, where each window's tokens lie.

    Args:
        cu_seqlens: (b + 1,) int32 on the device.
        lengths: the same as Python integers.
        max_length: an upper bound that depends on the canvas only, so that no kernel argument needs a device read.
        kept: what a backend derives from the lengths once and uses in every block of the forward.
    """

    cu_seqlens: Int[Tensor, " b1"]
    lengths: tuple[int, ...]
    max_length: int
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @lasting
    def image(self) -> Int[Tensor, " T"]:
        """Image (or window) of every packed token."""
        images = torch.arange(len(self.lengths), device=self.cu_seqlens.device)
        return torch.repeat_interleave(images, self.cu_seqlens.diff().long(), output_size=self.total)

    @property
    def uniform(self) -> int | None:
        """The common length, when all images have the same; attention is then an ordinary batch."""
        return self.lengths[0] if self.lengths and min(self.lengths) == max(self.lengths) else None


@dataclass(frozen=True)
class Packed:
    """A batch as one sequence.

    Args:
        tokens: (T, d).
        segments: where each image lies.
        patch_index: (t,) position of every patch token of the layout.
        prefix_index: (b, k) positions of the prefix tokens.
    """

    tokens: Float[Tensor, "T d"]
    segments: Segments
    patch_index: Int[Tensor, " t"]
    prefix_index: Int[Tensor, "b k"]


def pack(
    pyramid: Pyramid,
    layout: Layout,
    positions: Float[Tensor, "m d"] | None = None,
    prefix: Float[Tensor, "k d"] | None = None,
) -> Packed:
    """Gather each token's embedding, add its position, put the prefix before each image.

    Rollouts: a layout of K * b images reads a pyramid of b (row k * b + i is image i), so the K partitions of
    an image share its embeddings.

    Args:
        positions: one row per cell of the pyramid (fine first), or None for models without a table.
        prefix: tokens before the patches of every image, with their positions added.

    Raises:
        ValueError: the layout belongs to another grid, or its images are no multiple of the pyramid's.
    """
    if layout.grid != pyramid.grid:
        raise ValueError(f"the layout is for {_described(layout.grid)}, the images have {_described(pyramid.grid)}")
    if layout.batch != pyramid.batch and (pyramid.batch == 0 or layout.batch % pyramid.batch):
        raise ValueError(f"a layout of {layout.batch} images does not fit a pyramid of {pyramid.batch}")
    patches = _patches(pyramid, layout, positions)
    dim = patches.shape[-1]
    k = 0 if prefix is None else prefix.shape[0]
    device = patches.device
    starts = layout.cu_seqlens.long() + k * torch.arange(layout.batch + 1, device=device)
    patch_index = torch.arange(layout.total, device=device) + k * (layout.image + 1)
    prefix_index = starts[:-1, None] + torch.arange(k, device=device)
    lengths = tuple(n + k for n in layout.lengths)
    segments = Segments(starts.int(), lengths, layout.grid.size(0) + k)
    if prefix is None or k == 0:
        return Packed(patches, segments, patch_index, prefix_index)
    prefix = prefix.to(patches.dtype)
    if layout.all_fine:
        parts = [prefix.expand(layout.batch, -1, -1), patches.view(layout.batch, -1, dim)]
        return Packed(torch.cat(parts, 1).flatten(0, 1), segments, patch_index, prefix_index)
    tokens = patches.new_empty(segments.total, dim)  # filled in place: copies cost as much as a block's norm
    tokens = tokens.index_copy_(0, patch_index, patches)
    tokens = tokens.index_copy_(0, prefix_index.flatten(), prefix.repeat(layout.batch, 1))
    return Packed(tokens, segments, patch_index, prefix_index)


def _described(grid: Grid) -> str:
    rows, cols = grid.cells
    return f"{rows}x{cols} patches and {grid.stages} stages" + (f" in windows of {grid.window}" if grid.window else "")


def _patches(pyramid: Pyramid, layout: Layout, positions: Float[Tensor, "m d"] | None) -> Float[Tensor, "t d"]:
    """The tokens' embeddings with their positions, in the layout's order."""
    if layout.all_fine and layout.batch == pyramid.batch:  # the fine level as it stands: no scales to gather from
        level = pyramid.levels[0] if positions is None else pyramid.levels[0] + positions[: layout.grid.size(0)]
        return in_order(level.unflatten(1, layout.grid.shape(0)), layout.grid).flatten(0, 1)
    image = layout.image if layout.batch == pyramid.batch else layout.image % pyramid.batch
    cells = torch.cat(pyramid.levels, 1).flatten(0, 1)
    patches = cells.index_select(0, image * pyramid.grid.total + layout.cell)
    return patches if positions is None else patches + positions.index_select(0, layout.cell)


def carry(look: Look, packed: Packed, layout: Layout) -> Float[Tensor, "T d"]:
    """The packed tokens as they enter the block after the look: each plus what its coarse ancestor learned there.

    A coarse token thus goes on with exactly what the blocks computed. Rollouts share the look of their image.
    """
    batch, cells, dim = look.change.shape
    rows = (layout.image % batch) * cells + layout.ancestor
    tokens = packed.tokens.index_add(0, packed.patch_index, look.change.reshape(-1, dim).index_select(0, rows))
    prefix = look.prefix_change.repeat(layout.batch // max(batch, 1), 1, 1).flatten(0, 1)
    return tokens.index_add(0, packed.prefix_index.flatten(), prefix)


def coarse_map(values: Float[Tensor, "t d"], layout: Layout) -> Float[Tensor, "b n d"]:
    """Values of an all-coarse layout on the coarse grid, raster order; zero for cells without picture."""
    cells, dim = layout.grid.size(layout.grid.stages), values.shape[1]
    rows = layout.image * cells + layout.ancestor
    return values.new_zeros(layout.batch * cells, dim).index_copy(0, rows, values).view(layout.batch, cells, dim)


def dense_map(values: Float[Tensor, "t d"], layout: Cover) -> Float[Tensor, "b d r c"]:
    """Every fine cell gets its owner's value (nearest, as APT); cells without a token get zero.

    The map has the canvas's own cells, not those that padding to whole coarse patches added.
    """
    rows, cols = layout.grid.cells
    owner = layout.owner[:, :rows, :cols]
    dense = values.index_select(0, owner.flatten().clamp_min(0)).view(*owner.shape, values.shape[1])
    if not layout.full:
        dense = dense * (owner >= 0).unsqueeze(-1).to(dense.dtype)
    return dense.permute(0, 3, 1, 2)


def detail_map(values: Float[Tensor, "t q q d"], layout: Layout) -> Float[Tensor, "b d _ _"]:
    """A picture of q x q values for every token, stretched over the cells that it covers; zero without a token.

    The map has q x q points for each fine cell of the canvas: a token at scale s repeats each value 2^s x 2^s times.
    With q = 1 it is `dense_map`.
    """
    q, dim = values.shape[1], values.shape[3]
    device = values.device
    y, x = (torch.arange(n * q, device=device) for n in layout.grid.cells)
    owner = layout.owner[:, y // q][:, :, x // q]
    token = owner.clamp_min(0)
    row, col, scale = layout.row[token], layout.col[token], layout.scale[token]
    inside_y = (y[:, None] - row * q) >> scale
    inside_x = (x - col * q) >> scale
    index = (token * q + inside_y) * q + inside_x
    dense = values.reshape(-1, dim).index_select(0, index.flatten()).view(*index.shape, dim)
    if not layout.full:
        dense = dense * (owner >= 0).unsqueeze(-1).to(dense.dtype)
    return dense.permute(0, 3, 1, 2)


def area_mean(values: Float[Tensor, "t d"], layout: Cover) -> Float[Tensor, "b d"]:
    """Mean over an image's tokens weighted by the cells they cover: the mean of its dense map."""
    weight = (layout.area / layout.valid_cells[layout.image]).to(values.dtype)
    return values.new_zeros(layout.batch, values.shape[1]).index_add(0, layout.image, values * weight[:, None])


def token_mean(values: Float[Tensor, "t d"], layout: Cover) -> Float[Tensor, "b d"]:
    """Mean over an image's tokens, each counting once whatever it covers."""
    weight = (1 / layout.counts)[layout.image].to(values.dtype)
    return values.new_zeros(layout.batch, values.shape[1]).index_add(0, layout.image, values * weight[:, None])
