"""Which timm models can be wrapped or reduced, and the one clear line for those that cannot."""

from __future__ import annotations

from timm.layers.attention_pool import AttentionPoolLatent
from timm.layers.patch_embed import PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from split_core.backbone.blocks import BETWEEN
from split_core.backbone.probe import check_untouched, probe, probe_pool
from split_core.backbone.tower import VisionTower
from split_core.errors import SplitError

Backbone = VisionTransformer | Eva | VisionTower
FAMILIES = (VisionTransformerDistilled, VisionTransformer, Eva, VisionTower)
"""Subclasses first: a model is judged by the first of these that it is."""
REPLACED = (
    "forward", "forward_features", "_pos_embed", "forward_head", "pool",
    "tokens", "patch_embed", "pos_embed", "cls_token",
)  # fmt: skip
"""Methods whose work SplitViT does itself, as far as a family has them, so that a model must not bring its own."""
BYPASSED = (
    "",
    "patch_embed",
    "patch_embed.proj",
    "patch_drop",
    "blocks",
    "embeddings",
    "embeddings.position_embedding",
)
"""Modules outside blocks and pooling whose call is never made, or (the folded embedding's) not always."""


def check_backbone(model: object) -> Backbone:
    """The model, if every part of it can run on a packed mixed-resolution sequence.

    Raises:
        SplitError: names the part that cannot.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        example = model if isinstance(model, str) else "vit_small_patch16_224"
        raise SplitError(f"model={model!r}: a timm model is needed, such as timm.create_model({example!r})")
    if hasattr(model, "unwrap"):
        raise SplitError("the model is already wrapped; call .unwrap() first to wrap it differently")
    if not isinstance(model, Backbone):
        biased = any("relative_position_bias" in key or "rel_pos" in key for key, _ in model.named_parameters())
        why = "; its attention adds a bias for each pair of cells of a fixed grid" if biased else ""
        raise SplitError(
            f"cannot wrap a {name}: a timm VisionTransformer or Eva is needed (ViT, DeiT, CLIP, SigLIP, DINOv2, "
            f"DINOv3, EVA-02, PE), whose tokens are independent of a fixed grid{why}"
        )
    family = next(family for family in FAMILIES if isinstance(model, family))
    for method in REPLACED:
        own = getattr(type(model), method, None) is not getattr(family, method, None)
        if own or (hasattr(family, method) and method in vars(model)):
            raise SplitError(
                f"cannot wrap a {name}, which has its own {method}: packed tokens do not pass through it, so the "
                f"result would differ. Wrap a plain timm VisionTransformer or Eva"
            )
    parts = dict(model.named_modules())
    for path in BYPASSED:
        if path in parts:
            check_untouched(path, parts[path])
    if isinstance(model, VisionTower):
        _check_convolution(model.patch_embed.proj)
        for index, block in enumerate(model.blocks):
            probe(block, index, model.embed_dim)
        return model
    if not isinstance(model.patch_drop, nn.Identity | None):
        raise SplitError(
            "cannot wrap a model with patch_drop: it removes tokens that the layout counts. "
            "Create it with patch_drop_rate=0"
        )
    if type(model.patch_embed) is not PatchEmbed:
        raise SplitError(
            f"cannot wrap a {name} whose patch embedding is a {type(model.patch_embed).__name__}, not one convolution"
        )
    _check_convolution(model.patch_embed.proj)
    if isinstance(model.patch_embed.norm, nn.Identity):
        check_untouched("patch_embed.norm", model.patch_embed.norm)
    _check_pooling(model)
    rope = "per_head" if getattr(model, "rope_mixed", False) else "shared"
    for index, block in enumerate(model.blocks):
        probe(
            block, index, model.embed_dim, prefix=model.num_prefix_tokens,
            rope=rope if getattr(model, "rope", None) is not None else None,
        )  # fmt: skip
    return model


def check_reducible(model: nn.Module) -> Backbone:
    """The model, if tokens may leave its sequence between layers.

    Raises:
        SplitError: names what forbids it.
    """
    vit = check_backbone(model)
    if getattr(vit, "windows", None) is not None:
        raise SplitError(
            f"cannot reduce the tokens of a {type(model).__name__} with window attention between layers: a merged "
            "token may lie in several windows. Use a model without windows, or a splitting policy"
        )
    for index, block in enumerate(vit.blocks):
        if type(block) not in BETWEEN:
            raise SplitError(
                f"blocks.{index} is a {type(block).__name__}, which has no place to reduce tokens between "
                f"attention and MLP; supported are {', '.join(kind.__name__ for kind in BETWEEN)}"
            )
    return vit


def _check_convolution(proj: nn.Module) -> None:
    """The patch embedding is folded and applied at every scale, so it must be what its weights say."""
    if type(proj) is not nn.Conv2d:
        raise SplitError(f"cannot wrap a model whose patch embedding is a {type(proj).__name__}, not one Conv2d")
    apart = proj.stride == proj.kernel_size and proj.padding in ((0, 0), "valid")
    if not apart or proj.dilation != (1, 1) or proj.groups != 1:
        raise SplitError(
            f"cannot wrap a model whose patches overlap or leave gaps: its patch embedding is {proj}; stride equal to "
            f"kernel_size, no padding, dilation or groups are needed"
        )


def _check_pooling(model: Backbone) -> None:
    if model.global_pool not in ("token", "avg", "map"):
        raise SplitError(
            f"cannot wrap a model with global_pool={model.global_pool!r}; 'token', 'avg' and 'map' are supported"
        )
    pool = model.attn_pool
    if pool is None:
        return
    if type(pool) is not AttentionPoolLatent or pool.pool not in ("token", "avg"):
        raise SplitError(
            f"cannot wrap a model whose attention pooling is a {type(pool).__name__}; AttentionPoolLatent to one token "
            f"or their mean is supported"
        )
    if pool.pos_embed is not None:
        raise SplitError("cannot wrap a model whose attention pooling adds positions of a fixed grid")
    probe_pool(pool, model.embed_dim)
