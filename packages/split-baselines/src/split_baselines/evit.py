"""EViT: at three blocks the patches that the class token attends to least leave, fused into one (Liang et al. 2022).

Between attention and MLP. With a the class token's row of the attention matrix, mean over heads, the ceil(keep * n)
patches of highest a stay in order, and the sum of a_i x_i over the others follows them as one more token. Rotary
positions, of which the paper does not speak, turn that token as little as a class token: its patches lie anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from split_baselines.configs import EViTConfig
from split_baselines.dropping import keeps, share_of, stages, take
from split_core.errors import SplitError
from split_core.flops import Layers
from split_core.reduced import Tokens
from split_core.reducer import Reducer
from split_core.tap import Tap


class EViT(Reducer):
    """Keeps what the class token attends to."""

    def __init__(self, config: EViTConfig, vit: nn.Module) -> None:
        super().__init__(config, vit)
        if self.vit.cls_token is None:
            raise SplitError("evit ranks patches by the class token's attention, and this model has no class token")
        stages(config, len(self.vit.blocks))

    def plan(self, config: EViTConfig, patches: int) -> Layers:
        layers, at = [], stages(config, len(self.vit.blocks))
        for index in range(len(self.vit.blocks)):
            left = left_over(config, patches) if index in at else patches
            layers.append((patches, left))
            patches = left
        return layers

    def strengths(self, cells: tuple[int, int]) -> Iterator[EViTConfig]:
        return keeps(self.config, cells[0] * cells[1])

    def reduce(self, index: int, tokens: Tokens, tap: Tap) -> Tokens:
        kept, n = share_of(self.config.keep, tokens.count), tokens.count
        if index not in stages(self.config, len(self.vit.blocks)) or kept == n:
            return tokens
        attention = tap.class_attention[:, tokens.prefix :]
        order = attention.detach().argsort(dim=1, descending=True, stable=True)
        index_kept = order[:, :kept].sort(dim=1).values
        short = take(tokens, index_kept)
        if not self.config.fuse:
            return short
        rest = order[:, kept:]
        weight = attention.gather(1, rest).to(tokens.x.dtype)
        dropped = tokens.patches.gather(1, rest[..., None].expand(-1, -1, tokens.x.shape[2]))
        fused = torch.einsum("bn,bnd->bd", weight, dropped)[:, None]
        owner = torch.where(short.owner < 0, kept, short.owner)
        cell = None if short.cell is None else F.pad(short.cell, (0, 1), value=tokens.still)
        return tokens.with_patches(torch.cat([short.patches, fused], 1), owner, None, cell)


def left_over(config: EViTConfig, count: int) -> int:
    """Patch tokens after a stage: those kept, and the fused one if any left."""
    kept = share_of(config.keep, count)
    return kept if kept == count else kept + config.fuse
