"""Resizing: the whole image at the lower resolution that gives the wanted number of patches. No layer is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from split_baselines.configs import ResizeConfig
from split_core.errors import SplitError
from split_core.flops import Layers
from split_core.reduced import Tokens
from split_core.reducer import Reducer


class Resize(Reducer):
    """Shrinks the image (antialiased, in float32) and resamples the position table to its grid; rotary positions are
    those that the model has for an image of that size.

    A fine cell of the image belongs to the token whose patch of the shrunk image lies over its middle.
    """

    def __init__(self, config: ResizeConfig, vit: nn.Module) -> None:
        super().__init__(config, vit)
        small_grid(config, tuple(self.vit.patch_embed.grid_size))

    def plan(self, config: ResizeConfig, patches: int) -> Layers:
        rows, cols = self.vit.patch_embed.grid_size
        small = small_grid(config, (rows, cols)) if rows * cols == patches else None
        count = round(config.scale**2 * patches) if small is None else small[0] * small[1]
        return [(count, count)] * len(self.vit.blocks)

    def strengths(self, cells: tuple[int, int]) -> Iterator[ResizeConfig]:
        """Grids of nearly the image's proportions (off by less than one patch), from all patches to one."""
        rows, cols = cells
        grids = [
            (r, c)
            for r in range(1, rows + 1)
            for c in range(1, cols + 1)
            if abs(r * cols - c * rows) <= max(rows, cols)
        ]
        for grid in sorted(grids, key=lambda g: (-g[0] * g[1], abs(g[0] * cols - g[1] * rows))):
            yield self.config.model_copy(update={"grid": grid})

    def enter(self, images: Float[Tensor, "b ch H W"]) -> Tokens:
        cells = self.embed.grid(images.shape[-2:]).cells
        small = small_grid(self.config, cells)
        if small == cells:
            return super().enter(images)
        size = [n * p for n, p in zip(small, self.embed.patch_size, strict=True)]
        shrunk = F.interpolate(images.float(), size=size, mode="bicubic", antialias=True, align_corners=False)
        entered = super().enter(shrunk.to(images.dtype))
        rows, cols = (
            ((torch.arange(many, device=images.device) * 2 + 1) * few).div(2 * many, rounding_mode="floor")
            for many, few in zip(cells, small, strict=True)
        )
        owner = (rows[:, None] * small[1] + cols).flatten().expand(len(images), -1)
        return replace(entered, owner=owner)


def small_grid(config: ResizeConfig, cells: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches of the shrunk image.

    Raises:
        SplitError: a grid larger than the image's.
    """
    rows, cols = config.grid or (max(1, round(config.scale * cells[0])), max(1, round(config.scale * cells[1])))
    if rows > cells[0] or cols > cells[1]:
        raise SplitError(f"grid={rows}x{cols} enlarges an image of {cells[0]}x{cells[1]} patches; resize shrinks")
    return rows, cols
