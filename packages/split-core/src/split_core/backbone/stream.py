"""What a block must know of a packed sequence besides its tokens, and DropPath, which must know where an image ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from timm.layers.drop import DropPath
from torch import Tensor, nn

from split_core.attention import AttentionBackend
from split_core.packing import Packed, Segments
from split_core.types import Layout


@dataclass(frozen=True)
class Stream:
    """What one block must know. Blocks may differ in it: in rotary rows, or in which tokens attend to each other.

    Args:
        segments: which consecutive tokens attend to each other: images.
        attention: mixes the tokens of a segment.
        rope: sines, then cosines, of every token's angles (e the width of a head), alike for all heads or for each;
            0 and 1 for tokens that are not turned. None for blocks without rotary positions.
        between: called with the tokens between attention and MLP; what it returns goes on (reducers merge and drop
            tokens there). Executors of blocks that have no such place never call it, and the caller must notice.
    """

    segments: Segments
    attention: AttentionBackend
    rope: Float[Tensor, "T *h e"] | None = None
    between: Callable[[Tensor], tuple[Tensor, Segments]] | None = None


Streams = Callable[[int], Stream]
"""Number of a block -> its stream."""


def streams(
    packed: Packed, layout: Layout, attention: AttentionBackend, table: Float[Tensor, "*L m1 *h e"] | None, *,
    per_block: bool = False,
) -> Streams:  # fmt: skip
    """The stream of every block of a forward.

    Args:
        table: rotary rows of every cell of the pyramid and, last, the row of tokens without a cell.
        per_block: the table has a first axis for the block. Its rows are then gathered when the block runs, because
            those of all blocks together would be larger than the activations.
    """
    if table is None:
        common = Stream(packed.segments, attention)
        return lambda _: common
    rows = table.shape[1 if per_block else 0]
    row = torch.full((packed.segments.total,), rows - 1, device=table.device)
    row = row.index_copy(0, packed.patch_index, layout.cell)
    if per_block:
        return lambda index: Stream(packed.segments, attention, table[index].index_select(0, row))
    common = Stream(packed.segments, attention, table.index_select(0, row))
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
