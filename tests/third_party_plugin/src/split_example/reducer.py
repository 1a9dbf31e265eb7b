"""A reducer wraps the timm model and drops or merges tokens in front of its blocks or inside them."""

from __future__ import annotations

from split_core.flops import Layers
from split_core.reduced import Tokens
from split_core.reducer import Reducer
from split_example.configs import EveryOtherConfig


class EveryOther(Reducer):
    """Drops every other patch token before block `at`; the one before it stands for its cells from there on."""

    def plan(self, config: EveryOtherConfig, patches: int) -> Layers:
        half = -(-patches // 2)
        return [(patches, patches) if index < config.at else (half, half) for index in range(len(self.vit.blocks))]

    def before(self, index: int, tokens: Tokens) -> Tokens:
        if index != self.config.at:
            return tokens
        cell = None if tokens.cell is None else tokens.cell[:, ::2]  # for models with rotary positions
        return tokens.with_patches(tokens.patches[:, ::2], tokens.owner // 2, None, cell)
