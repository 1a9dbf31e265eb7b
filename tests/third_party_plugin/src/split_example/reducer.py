"""A reducer wraps the timm model and drops or merges tokens between its blocks."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from split_example.configs import EveryOtherConfig


class EveryOther(nn.Module):
    """Drops every other patch token before block `at`."""

    def __init__(self, config: EveryOtherConfig, model: VisionTransformer) -> None:
        super().__init__()
        self.at = config.at
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        model = self.model
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for index, block in enumerate(model.blocks):
            if index == self.at:
                prefix, patches = x.tensor_split([model.num_prefix_tokens], dim=1)
                x = torch.cat([prefix, patches[:, ::2]], 1)
            x = block(x)
        return model.forward_head(model.norm(x))
