"""ToMe: in every block the r most similar pairs of tokens become one (Bolya et al. 2023).

Between attention and MLP, tokens are compared by their keys, averaged over heads. `Tokens.weight` holds sizes:
merging averages by them, and attention is proportional to them. No training is needed; fine-tuning runs the same.

Of rotary positions the paper does not speak. Keys are compared before they are turned, so that tokens merge by what
they say; a merged token stands where the token stands that the other merged into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from split_baselines.configs import MergeConfig
from split_baselines.merging import Matching, match, merge
from split_core.errors import SplitError
from split_core.flops import Layers
from split_core.reduced import Tokens
from split_core.reducer import Reducer
from split_core.tap import Tap


class ToMe(Reducer):
    """Merges tokens by the similarity of their keys."""

    def __init__(self, config: MergeConfig, vit: nn.Module) -> None:
        super().__init__(config, vit)
        rates(config, len(self.vit.blocks))

    def plan(self, config: MergeConfig, patches: int) -> Layers:
        layers = []
        for rate in rates(config, len(self.vit.blocks)):
            left = patches - min(rate, patches // 2)
            layers.append((patches, left))
            patches = left
        return layers

    def strengths(self, cells: tuple[int, int]) -> Iterator[MergeConfig]:
        depth = len(self.vit.blocks)
        for merged in range(depth * (cells[0] * cells[1] // 2) + 1):  # a block merges at most half of what it has
            yield self.config.model_copy(update={"r": merged / depth})

    def reduce(self, index: int, tokens: Tokens, tap: Tap) -> Tokens:
        r = min(rates(self.config, len(self.vit.blocks))[index], tokens.count // 2)
        if r == 0:
            return tokens
        return merge(tokens, self.matching(index, tap, r))

    def key_weight(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        """Sizes always serve merging; attention where it is proportional."""
        return tokens.weight if self.config.proportional else None

    def matching(self, index: int, tap: Tap, r: int) -> Matching:
        """Which r tokens merge in this block, and into which."""
        with torch.no_grad():
            return match(tap.keys[:, tap.prefix :], r, tap.prefix)


def rates(config: MergeConfig, depth: int) -> list[int]:
    """Tokens merged in each block. Whole numbers whose running sums round those of the wanted rates.

    Raises:
        SplitError: a list of another length than the model's depth.
    """
    if isinstance(config.r, Sequence):
        if len(config.r) != depth:
            raise SplitError(f"r={list(config.r)} gives {len(config.r)} numbers, and the model has {depth} blocks")
        return list(config.r)
    slope = [1 + config.inflect * (1 - 2 * i / max(1, depth - 1)) for i in range(depth)]
    ends = [round(config.r * sum(slope[: i + 1]) + 1e-9) for i in range(depth)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
