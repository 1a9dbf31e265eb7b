"""A batch on its way through a reducer: its tokens between two layers, what they stand for, and what heads read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.features import Features, Pooling
from split_core.packing import Packed, Segments, dense_map
from split_core.positions import PositionTable
from split_core.rope import RopeTable
from split_core.types import Cover, Grid


class FineEmbed(nn.Module):
    """The timm model's own embedding of any H and W: patches with their positions, then the prefix in front.

    `rope` holds the rotary positions of its cells, where the model has them.
    """

    def __init__(self, vit: Any) -> None:
        super().__init__()
        object.__setattr__(self, "vit", vit)  # registered where it belongs
        self.positions = PositionTable(vit)
        self.rope = RopeTable(vit)
        self.patch_size: tuple[int, int] = tuple(vit.patch_embed.patch_size)

    vit: Any

    def grid(self, size: tuple[int, int] | torch.Size) -> Grid:
        """Cells of a canvas of (H, W) pixels; no stages."""
        (height, width), (ph, pw) = size, self.patch_size
        return Grid((-(-height // ph), -(-width // pw)), 0)

    def forward(self, images: Float[Tensor, "b ch H W"]) -> Float[Tensor, "b t d"]:
        """What enters the first block. The image is zero-padded bottom and right to whole patches."""
        vit, grid = self.vit, self.grid(images.shape[-2:])
        (rows, cols), (ph, pw) = grid.cells, self.patch_size
        images = F.pad(images, (0, cols * pw - images.shape[-1], 0, rows * ph - images.shape[-2]))
        x = vit.patch_embed.norm(vit.patch_embed.proj(images).flatten(2).transpose(1, 2))
        positions, prefix = self.positions.patches(grid), self.positions.prefix()
        if positions is not None:
            x = x + positions
        if prefix is not None:
            x = torch.cat([prefix.to(x.dtype).expand(len(x), -1, -1), x], 1)
        return vit.norm_pre(vit.pos_drop(x))


@dataclass(frozen=True)
class Tokens:
    """A batch between two layers.

    Args:
        x: (b, k + n, d) prefix tokens, then n patch tokens.
        prefix: k.
        owner: (b, N) which patch token stands for each fine cell, 0 .. n - 1, or -1 for none.
        weight: (b, n) as how many tokens each counts; None is one each.
        losses: what training adds to the task's loss, by name.
        table: rotary rows of the cells that entered (`RopeTable.cells`); None for models without rotary positions.
        cell: (b, n) the row of `table` that each patch token keeps, whatever it takes in: that of the cell where it
            stands. A token that stands nowhere has `still`, and is not turned. None without a table.
    """

    x: Float[Tensor, "b t d"]
    prefix: int
    owner: Int[Tensor, "b N"]
    weight: Float[Tensor, "b n"] | None = None
    losses: tuple[tuple[str, Float[Tensor, ""]], ...] = ()
    table: Float[Tensor, "*L m1 *h e"] | None = None
    cell: Int[Tensor, "b n"] | None = None

    @property
    def count(self) -> int:
        """n."""
        return self.x.shape[1] - self.prefix

    @property
    def patches(self) -> Float[Tensor, "b n d"]:
        return self.x[:, self.prefix :]

    @property
    def segments(self) -> Segments:
        """Equal lengths, known without reading the device."""
        b, t, _ = self.x.shape
        starts = torch.arange(0, (b + 1) * t, t, device=self.x.device, dtype=torch.int32)
        return Segments(starts, (t,) * b, t)

    @property
    def still(self) -> int:
        """The last row of the table, which turns nothing: where prefix tokens stand."""
        assert self.table is not None
        return self.table.shape[0 if self.table.ndim == 2 else 1] - 1

    def rope(self, index: int) -> Float[Tensor, "T *h e"] | None:
        """Rotary rows of the tokens in block `index`, as `Stream.rope`."""
        if self.table is None or self.cell is None:
            return None
        table = self.table if self.table.ndim == 2 else self.table[index]
        return table.index_select(0, F.pad(self.cell, (self.prefix, 0), value=self.still).flatten())

    def with_patches(
        self, patches: Float[Tensor, "b n d"], owner: Int[Tensor, "b N"], weight: Float[Tensor, "b n"] | None,
        cell: Int[Tensor, "b n"] | None,
    ) -> Tokens:  # fmt: skip
        """Other patch tokens behind the same prefix."""
        x = torch.cat([self.x[:, : self.prefix], patches], 1)
        return replace(self, x=x, owner=owner, weight=weight, cell=cell)


@dataclass(frozen=True)
class Reduced(Cover):
    """A cover that reductions left, with the patch tokens that attention and MLP of each block read."""

    layers: tuple[tuple[int, int], ...]

    def per_layer(self, depth: int) -> list[tuple[Any, Any]]:
        """As the reductions left them, alike for all images."""
        return [(np.full(self.batch, attended), np.full(self.batch, fed)) for attended, fed in self.layers]

    @property
    def token_fraction(self) -> Float[Tensor, " b"]:
        """Tokens of an average layer as a share of the valid cells: the last layer's alone would flatter."""
        mean = sum(a + b for a, b in self.layers) / (2 * len(self.layers))
        return mean / self.valid_cells


@dataclass(frozen=True)
class ReducedFeatures(Features):
    """Features of a reduced sequence.

    Args (besides those of `Features`):
        weight: (b, n) as how many tokens each patch token counts, in means too; None is one each.
        tapped: for each tap where its tokens stood and what they stood for.
        losses: what training adds to the task's loss, by name.
    """

    taps: tuple[Float[Tensor, "_ d"], ...] = ()
    weight: Float[Tensor, "b n"] | None = None
    tapped: tuple[tuple[Packed, Cover], ...] = ()
    losses: tuple[tuple[str, Float[Tensor, ""]], ...] = ()

    def mean(self, pooling: Pooling, *, prefix: bool = False) -> Float[Tensor, "b d"]:
        """Mean of the patch tokens by what each counts as; `pooling` tells apart what splitting makes, not this."""
        assert isinstance(self.layout, Reduced)
        patches = self.patches.view(self.batch, self.layout.layers[-1][1], self.tokens.shape[1])
        weight = patches.new_ones(patches.shape[:2]) if self.weight is None else self.weight.to(patches.dtype)
        total, count = (patches * weight[..., None]).sum(1), weight.sum(1, keepdim=True)
        if not prefix:
            return total / count
        return (total + self.prefix.sum(1)) / (count + self.prefix.shape[1])

    def weighted(
        self, pooling: Pooling, *, prefix: bool
    ) -> tuple[Float[Tensor, "n d"], Int[Tensor, " n"], Float[Tensor, " n"]]:
        """As `Features.weighted`, by what each token counts as."""
        ones = torch.ones_like(self.tokens[:, 0])
        index = self.packed.patch_index
        weight = ones[index] if self.weight is None else self.weight.flatten().to(ones.dtype)
        if not prefix:
            return self.patches, self.layout.image, weight
        return self.tokens, self.packed.segments.image, ones.index_copy(0, index, weight)

    def dense(self, tap: int | None = None) -> Float[Tensor, "b d r c"]:
        """As `Features.dense`; tokens are put back over the cells they stood for there (ToMe's unmerge)."""
        if tap is None:
            return super().dense()
        return dense_map(self.at(tap), self.tapped[tap][1])

    def at(self, tap: int | None) -> Float[Tensor, "t d"]:
        """As `Features.at`; how many tokens there are changes from tap to tap."""
        return super().at(None) if tap is None else self.taps[tap].index_select(0, self.tapped[tap][0].patch_index)

    def spread(self, values: Float[Tensor, "t q q d"], tap: int | None) -> Float[Tensor, "b d _ _"]:
        """As `Features.spread`; what a token stands for has no shape, so every cell of it shows the whole picture."""
        q = values.shape[1]
        dense = dense_map(values.flatten(1), self.layout if tap is None else self.tapped[tap][1])
        cells = dense.unflatten(1, (q, q, values.shape[3])).permute(0, 3, 4, 1, 5, 2)
        return cells.flatten(4, 5).flatten(2, 3)


def packed_cover(tokens: Tokens, grid: Grid, layers: tuple[tuple[int, int], ...]) -> tuple[Packed, Reduced]:
    """Where the tokens of a batch stand in the packed sequence, and what they stand for."""
    b, t, _ = tokens.x.shape
    k, n, device = tokens.prefix, tokens.count, tokens.x.device
    starts = torch.arange(b, device=device)[:, None] * t
    patch_index = (starts + k + torch.arange(n, device=device)).flatten()
    packed = Packed(tokens.x.flatten(0, 1), tokens.segments, patch_index, starts + torch.arange(k, device=device))
    first = torch.arange(b, device=device)[:, None] * n
    owner = torch.where(tokens.owner < 0, -1, tokens.owner + first).view(b, *grid.cells)
    cover = Reduced(
        image=torch.arange(b, device=device).repeat_interleave(n),
        cu_seqlens=torch.arange(0, (b + 1) * n, n, device=device, dtype=torch.int32),
        lengths=(n,) * b,
        owner=owner,
        valid_cells=torch.full((b,), grid.size(0), device=device),
        grid=grid,
        full=False,
        layers=layers,
    )
    return packed, cover
