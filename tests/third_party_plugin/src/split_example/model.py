"""A model is anything that comes out as a timm VisionTransformer."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer

from split_core.task import ModelContext
from split_example.configs import SmallConfig


def build(config: SmallConfig, context: ModelContext) -> VisionTransformer:
    """A Vision Transformer with random weights."""
    return VisionTransformer(
        img_size=context.image_size or (32, 32),
        patch_size=config.patch,
        in_chans=context.in_chans or 3,
        num_classes=context.num_classes,
        embed_dim=config.dim,
        depth=config.depth,
        num_heads=2,
    )
