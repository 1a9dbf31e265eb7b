"""Decision networks that see more than one parent (not in the paper).

A single patch before the ViT cannot tell an object from a texture. Context comes from the neighbours
(`xattn_context`: a light transformer over the parents of a stage) or from the backbone itself (`look`, `late`: the
coarsest patches go through its first blocks before anything is decided, see `SplitPolicy.depth`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from split_core.errors import SplitError
from split_core.policy import BackboneInfo, StageView
from split_core.quadtree import valid_at
from split_policies.configs import ContextConfig, LookConfig
from split_policies.learned import LearnedPolicy
from split_policies.sizes import attention_sizes, context_sizes
from split_policies.xattn import Comparison


class ContextAttention(LearnedPolicy):
    """The paper's network, whose parents also attend to each other.

    A 3x3 depthwise convolution on the parents' grid tells neighbours apart at any canvas size; a few narrow
    transformer layers carry what is seen across the image. Parents wholly in padding are seen by nobody.
    """

    def __init__(self, config: ContextConfig, info: BackboneInfo) -> None:
        mix, heads = context_sizes(info.dim, width=config.mix_width)
        hidden = attention_sizes(info.dim, hidden=config.hidden)[2]
        super().__init__(2 * info.dim + mix, hidden=hidden, config=config)
        self.comparison = Comparison(config, info)
        self.narrow = nn.Linear(2 * info.dim, mix)
        self.neighbours = nn.Conv2d(mix, mix, 3, padding=1, groups=mix)
        self.mixers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                mix, heads, 2 * mix, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(config.layers)
        )

    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        own = self.comparison(view)
        rows, cols = view.grid.shape(view.scale)
        outside = self._outside(view)
        x = self.narrow(own)
        if outside is not None:
            x = x.masked_fill(outside.unsqueeze(-1), 0)
        x = x + self.neighbours(x.transpose(1, 2).unflatten(2, (rows, cols))).flatten(2).transpose(1, 2)
        for mixer in self.mixers:
            x = mixer(x, src_key_padding_mask=outside)
        return self.head(torch.cat([own, x], dim=-1))

    def _outside(self, view: StageView) -> Bool[Tensor, "b n"] | None:
        """Parents without picture, or None where there is none."""
        if view.pyramid.valid is None and not view.grid.padded:
            return None
        inside = valid_at(view.grid, view.pyramid.valid, view.parents.device)[view.scale]
        return ~inside.flatten(1).expand(view.pyramid.batch, -1)


class Look(LearnedPolicy):
    """An MLP decides from the coarsest token over the parent after the backbone's first blocks.

    Raises:
        SplitError: the backbone has no such block.
    """

    carries: ClassVar[bool] = False  # type: ignore[misc]

    def __init__(self, config: LookConfig, info: BackboneInfo) -> None:
        compare = info.stages > 1 if config.compare is None else config.compare
        hidden = config.hidden or max(32, info.dim // 4)
        super().__init__((3 if compare else 1) * info.dim, hidden=hidden, config=config)
        self.comparison = Comparison(config, info) if compare else None
        self.depth = config.depth or max(1, info.blocks // 2)
        most = info.blocks - 1 if self.carries else info.blocks
        if info.blocks and not self.depth <= most:
            raise SplitError(
                f"policy.depth={self.depth}: a backbone of {info.blocks} blocks allows at most {most} here"
            )

    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        context = self.inputs(view.context)
        return self.head(context if self.comparison is None else torch.cat([context, self.comparison(view)], dim=-1))


class Late(Look):
    """`look` that goes on from where it looked: fine tokens skip the first blocks (see `SplitPolicy.carries`)."""

    carries: ClassVar[bool] = True  # type: ignore[misc]
