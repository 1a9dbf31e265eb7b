"""Which timm models can be wrapped, and the one clear line for those that cannot."""

from __future__ import annotations

from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from split_core.backbone.blocks import probe
from split_core.errors import SplitError

REPLACED = ("forward", "forward_features", "_pos_embed", "forward_head", "pool")
"""Methods whose work SplitViT does itself, so that a model must not bring its own."""


def check_backbone(model: nn.Module) -> VisionTransformer:
    """The model, if every part of it can run on a packed mixed-resolution sequence.

    Raises:
        SplitError: names the part that cannot.
    """
    name = type(model).__name__
    if hasattr(model, "unwrap"):
        raise SplitError("the model is already wrapped; call .unwrap() first to wrap it differently")
    if not isinstance(model, VisionTransformer):
        raise SplitError(
            f"cannot wrap a {name}: a timm VisionTransformer is needed (ViT, DeiT, CLIP, DINOv2, AugReg), "
            f"whose tokens are independent of a fixed grid"
        )
    for method in REPLACED:
        if getattr(type(model), method) is not getattr(VisionTransformer, method) or method in vars(model):
            raise SplitError(
                f"cannot wrap a {name}, which has its own {method}: packed tokens do not pass through it, so the "
                f"result would differ. Wrap a plain timm VisionTransformer"
            )
    if not isinstance(model.patch_drop, nn.Identity):
        raise SplitError(
            "cannot wrap a model with patch_drop: it removes tokens that the layout counts. "
            "Create it with patch_drop_rate=0"
        )
    if getattr(model, "attn_pool", None) is not None:
        raise SplitError(f"cannot wrap a {name} with attention pooling (global_pool='map') yet")
    if model.global_pool not in ("token", "avg"):
        raise SplitError(f"cannot wrap a model with global_pool={model.global_pool!r}; 'token' and 'avg' are supported")
    if not isinstance(model.patch_embed, PatchEmbed):
        raise SplitError(
            f"cannot wrap a {name} whose patch embedding is a {type(model.patch_embed).__name__}, not one convolution"
        )
    for index, block in enumerate(model.blocks):
        probe(block, index, model.embed_dim)
    return model
