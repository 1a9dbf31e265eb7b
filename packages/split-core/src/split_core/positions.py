"""Absolute positions for every token of a Layout: one table row per pyramid cell.

The pretrained table is resampled to each scale's grid (bicubic, in float32, always by target size). A coarse
token thus gets the position a smaller picture would have had there. Families differ in whether the prefix
tokens have rows of their own; `PositionTable` hides that.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.kept import Version, version_of
from split_core.types import Grid

KEPT = 8
"""Grids whose rows are kept: a stream of odd sizes must not grow without end."""


class GridTable(nn.Module):
    """Rows for the cells of a pyramid, made once per grid and kept until what they are made from changes.

    Args:
        vit: the model whose tensors are read; it stays registered elsewhere.
    """

    def __init__(self, vit: Any) -> None:
        super().__init__()
        object.__setattr__(self, "vit", vit)
        self._kept: dict[Grid, tuple[Version, torch.dtype, Tensor]] = {}

    vit: Any

    def _sources(self) -> tuple[Tensor, ...]:
        """The tensors that the rows depend on; none means that there are no rows."""
        raise NotImplementedError(f"{type(self).__name__} does not define _sources")

    def _resample(self, grid: Grid) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define _resample")

    def _rows(self, grid: Grid) -> Tensor | None:
        sources = self._sources()
        if not sources:
            return None
        trained = torch.is_grad_enabled() or self.training  # a look runs without gradients while its table learns
        if trained and any(source.requires_grad for source in sources):
            return self._resample(grid)  # they differ at every step, whatever a sharded one's version says
        version, dtype = version_of(sources), self.vit.patch_embed.proj.weight.dtype
        if version is None:
            return self._resample(grid)
        kept = self._kept.get(grid)
        if kept is None or kept[:2] != (version, dtype):
            with torch.inference_mode(False), torch.no_grad():  # rows kept here may serve training later
                kept = (version, dtype, self._resample(grid))
            if len(self._kept) >= KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[grid] = kept
        return kept[2]

    def train(self, mode: bool = True) -> GridTable:
        """Switching mode drops the kept rows, so that even edits through `.data` are seen afterwards."""
        self._kept = {}
        return super().train(mode)

    def __getstate__(self) -> dict:  # type: ignore[type-arg]
        return {**self.__dict__, "_kept": {}}


class PositionTable(GridTable):
    """The table of a timm model, resampled per grid.

    Args:
        vit: the model; read are pos_embed, cls_token, dist_token, reg_token, no_embed_class, num_prefix_tokens and
            the patch grid the table was made for.
        antialias: how timm resamples the table (its own default is True); a table that was trained with
            another convention must be resampled to the native size beforehand.
    """

    def __init__(self, vit: Any, *, antialias: bool = True) -> None:
        super().__init__(vit)
        self.antialias = antialias

    def patches(self, grid: Grid) -> Float[Tensor, "m d"] | None:
        """Rows for every cell of every scale, fine first; None if the model has no table."""
        return self._rows(grid)

    def _sources(self) -> tuple[Tensor, ...]:
        return () if self.vit.pos_embed is None else (self.vit.pos_embed,)

    def prefix(self) -> Float[Tensor, "k d"] | None:
        """Class, distillation and register tokens with their positions, in the model's order."""
        named = (getattr(self.vit, name, None) for name in ("cls_token", "dist_token", "reg_token"))
        parts = [t[0] for t in named if t is not None]
        if not parts:
            return None
        tokens = torch.cat(parts)
        if self.vit.pos_embed is not None and not self.vit.no_embed_class:
            tokens = tokens + self.vit.pos_embed[0, : tokens.shape[0]]
        return tokens

    def _resample(self, grid: Grid) -> Tensor:
        table = self.vit.pos_embed[0]
        rows = table if self.vit.no_embed_class else table[self.vit.num_prefix_tokens :]
        old = self.vit.patch_embed.grid_size
        # Laid out as timm does, channels last: on CPU torch's antialiased resize of a contiguous image to one column
        # is wrong (seen in 2.14), and permute(2, 0, 1)[None] counts as contiguous.
        image = rows.float().reshape(1, *old, -1).permute(0, 3, 1, 2)
        levels = []
        for s in range(grid.stages + 1):
            shape = tuple(-(-c // (1 << s)) for c in grid.cells)
            level = (
                image
                if shape == tuple(old)
                else F.interpolate(image, size=shape, mode="bicubic", antialias=self.antialias)
            )
            padded = grid.shape(s)
            # Cells wholly in padding make no token; their rows only keep the index arithmetic simple.
            level = F.pad(level, (0, padded[1] - shape[1], 0, padded[0] - shape[0]))
            levels.append(level[0].flatten(1).T)
        return torch.cat(levels).to(table.dtype)
