"""What a block must know of a packed sequence besides its tokens, and DropPath, which must know where an image ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from timm.layers.drop import DropPath
from torch import Tensor, nn

from split_core.attention import AttentionBackend
from split_core.packing import Packed, Segments
from split_core.rope import RopeTable
from split_core.types import Grid, Layout
from split_core.windows import Windows


@dataclass(frozen=True)
class Stream:
    """What one block must know. Blocks may differ in it: in rotary rows, or in which tokens attend to each other.

    Args:
        segments: which consecutive tokens attend to each other: those of an image, or of a window of one.
        images: where each image lies.
        attention: mixes the tokens of a segment.
        rope: sines, then cosines, of every token's angles (e the width of a head), alike for all heads or for each;
            0 and 1 for tokens that are not turned. None for blocks without rotary positions.
        between: called with the tokens between attention and MLP; what it returns goes on (reducers merge and drop
            tokens there). Executors of blocks that have no such place never call it, and the caller must notice.
        watch: shown what attention reads, and its keys before they are turned.
    """

    segments: Segments
    images: Segments
    attention: AttentionBackend
    rope: Float[Tensor, "T *h e"] | None = None
    between: Callable[[Tensor], tuple[Tensor, Segments]] | None = None
    watch: Callable[[Tensor, Tensor], None] | None = None


Streams = Callable[[int], Stream]
"""Number of a block -> its stream."""


def streams(
    packed: Packed, layout: Layout, attention: AttentionBackend, rope: RopeTable, windows: Windows | None = None
) -> Streams:
    """The stream of every block of a forward.

    Args:
        rope: the model's rotary positions, if it has any.
        windows: within which most blocks attend.
    """
    images = packed.segments
    across = _alike(Stream(images, images, attention), packed, layout.cell, rope, layout.grid)
    if windows is None:
        return across
    assert layout.windows is not None
    side, stages = windows.size, layout.grid.stages
    segments = Segments(layout.windows.cu_seqlens, layout.windows.lengths, side**2)
    # The table of one window: a canvas of its size, counted from its own corner.
    within = _alike(Stream(segments, images, attention), packed, layout.window_cell, rope, Grid((side, side), stages))
    return lambda index: across(index) if index in windows.global_blocks else within(index)


def _alike(stream: Stream, packed: Packed, cell: Int[Tensor, " t"], rope: RopeTable, grid: Grid) -> Streams:
    """Streams of blocks that differ in rotary rows at most.

    Where every block has rows of its own, they are gathered when the block runs, because those of all blocks together
    would be larger than the activations.

    Args:
        cell: row of each token in the concatenated pyramid over `grid`.
    """
    table = rope.cells(grid)
    if table is None:
        return lambda _: stream
    rows = table.shape[1 if rope.per_block else 0]
    row = torch.full((packed.segments.total,), rows - 1, device=table.device)  # the last turns nothing
    row = row.index_copy(0, packed.patch_index, cell)
    if rope.per_block:
        return lambda index: replace(stream, rope=table[index].index_select(0, row))
    common = replace(stream, rope=table.index_select(0, row))
    return lambda _: common


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as attention, it depends on the lengths of the batch
def drop_path(module: nn.Module, x: Float[Tensor, "T d"], segments: Segments) -> Tensor:
    """Stochastic depth per image: timm's module would see one sample and drop the whole batch at once."""
    if not isinstance(module, DropPath) or not module.training or not module.drop_prob:
        return x
    keep = 1 - module.drop_prob
    kept = torch.full((len(segments.lengths),), keep, device=x.device).bernoulli()
    if module.scale_by_keep:
        kept = kept / keep
    return x * kept.to(x.dtype)[segments.image, None]
