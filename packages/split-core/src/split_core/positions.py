"""Absolute positions for every token of a Layout: one table row per pyramid cell.

The pretrained table is resampled to each scale's grid (bicubic, in float32, always by target size). A coarse
token thus gets the position a smaller picture would have had there. Families differ in whether the prefix
tokens have rows of their own; `PositionTable` hides that.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.types import Grid


class PositionTable(nn.Module):
    """The table of a timm VisionTransformer, resampled per grid and kept until it changes.

    Args:
        vit: the model; read are pos_embed, cls_token, reg_token, no_embed_class, num_prefix_tokens and the
            patch grid the table was made for.
        antialias: how timm resamples the table (its own default is True); a table that was trained with
            another convention must be resampled to the native size beforehand.
    """

    def __init__(self, vit: VisionTransformer, *, antialias: bool = True) -> None:
        super().__init__()
        object.__setattr__(self, "vit", vit)
        self.antialias = antialias
        self._kept: dict[Grid, tuple[tuple[object, ...], Tensor]] = {}

    vit: VisionTransformer

    def patches(self, grid: Grid) -> Float[Tensor, "m d"] | None:
        """Rows for every cell of every scale, fine first; None if the model has no table."""
        table = self.vit.pos_embed
        if table is None:
            return None
        if torch.is_grad_enabled() and table.requires_grad:
            return self._resample(grid)  # the table is being trained: it differs at every step
        version = (table.data_ptr(), table._version, table.dtype, table.device)
        kept = self._kept.get(grid)
        if kept is None or kept[0] != version:
            with torch.inference_mode(False), torch.no_grad():  # rows kept here may serve training later
                kept = (version, self._resample(grid))
            if len(self._kept) >= 8:  # a stream of odd sizes must not grow without end
                self._kept.pop(next(iter(self._kept)))
            self._kept[grid] = kept
        return kept[1]

    def prefix(self) -> Float[Tensor, "k d"] | None:
        """Class and register tokens with their positions, in the model's order (class first)."""
        parts = [t[0] for t in (self.vit.cls_token, getattr(self.vit, "reg_token", None)) if t is not None]
        if not parts:
            return None
        tokens = torch.cat(parts)
        if self.vit.pos_embed is not None and not self.vit.no_embed_class:
            tokens = tokens + self.vit.pos_embed[0, : tokens.shape[0]]
        return tokens

    def _resample(self, grid: Grid) -> Tensor:
        assert self.vit.pos_embed is not None
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

    def train(self, mode: bool = True) -> PositionTable:
        """Switching mode drops the kept tables, so that even edits through `.data` are seen afterwards."""
        self._kept = {}
        return super().train(mode)

    def __getstate__(self) -> dict:  # type: ignore[type-arg]
        return {**self.__dict__, "_kept": {}}
