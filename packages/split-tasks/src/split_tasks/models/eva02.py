"""Models `eva02` and `eva02_det`: EVA-02 as segmentation and detection use it, from timm's parts: patch 16, no norm.

    eva02       class token, all blocks global
    eva02_det   no class token, most blocks within windows (`split_core.windows`)

timm registers patch 14 with a norm and a classifier. Rotary positions count in cells of a 16 x 16 grid, as in the
original; within a window, in cells of the window.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import timm
from jaxtyping import Float
from timm.models.eva import Eva
from torch import Tensor
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.task import ModelContext
from split_core.windows import Windows
from split_tasks.models.configs import Eva02Config, Eva02DetConfig
from split_tasks.models.weights import load_strict, read_weights

PATCH = 16
SIZES = {"tiny": (32, 3, 2), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, depth, heads; tiny is for tests."""
GLOBAL = {"tiny": (1,), "base": tuple(range(1, 12, 2)), "large": tuple(range(2, 24, 3))}
"""Blocks of the detector that attend across the image."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build(config: Eva02Config, context: ModelContext) -> Eva:
    """The backbone; a classifier, if the context asks for one, reads the mean of the patch tokens.

    Raises:
        SplitError: the side is no multiple of 16, or the weights do not fit.
    """
    model = _plain(config, context, class_token=True)
    if config.weights != "none":
        path = Path(config.weights).expanduser()
        load_strict(model, read_weights(path), source=str(path))
    return model


def build_detector(config: Eva02DetConfig, context: ModelContext) -> Eva:
    """The same without class token; it says in `windows` which blocks attend within what.

    Raises:
        SplitError: the side is no multiple of 16, there are no such blocks, or the weights do not fit.
    """
    model: Any = _plain(config, context, class_token=False)
    if config.window is not None:
        blocks = GLOBAL[config.size] if config.global_blocks is None else config.global_blocks
        model.windows = Windows(config.window, blocks)
    elif config.global_blocks is not None:
        raise SplitError("model.global_blocks: without model.window all blocks attend across the image")
    if config.weights != "none":
        path = Path(config.weights).expanduser()
        state = read_weights(path)
        if "pos_embed" in state:
            state["pos_embed"] = resampled(state["pos_embed"], model.patch_embed.grid_size)
        load_strict(model, state, source=str(path))
    return model


def resampled(table: Float[Tensor, "1 n d"], grid: tuple[int, int]) -> Float[Tensor, "1 _ d"]:
    """A table of positions over a square grid for another grid, as the detector makes it: bicubic, no antialias."""
    side = math.isqrt(table.shape[1])
    if side**2 != table.shape[1] or (side, side) == tuple(grid):
        return table
    image = table.float().unflatten(1, (side, side)).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=tuple(grid), mode="bicubic", align_corners=False)
    return image.flatten(2).transpose(1, 2).to(table.dtype)


def _plain(config: Eva02Config, context: ModelContext, *, class_token: bool) -> Eva:
    """Made by timm's registry, so that a wrapped model can be saved (`split_core.hub`)."""
    if config.img_size % PATCH:
        raise SplitError(f"model.img_size: {config.img_size} is no multiple of the patch, {PATCH}")
    dim, depth, heads = SIZES[config.size]
    channels = context.in_chans or 3
    shown = {
        "input_size": (channels, config.img_size, config.img_size), "mean": MEAN[:channels], "std": STD[:channels],
    }  # fmt: skip
    model = timm.create_model(
        "eva02_base_patch14_224", pretrained=False, pretrained_cfg_overlay=shown, img_size=config.img_size,
        patch_size=PATCH, in_chans=channels, num_classes=context.num_classes, embed_dim=dim, depth=depth,
        num_heads=heads, qkv_fused=False, mlp_ratio=4 * 2 / 3, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True,
        ref_feat_shape=(16, 16), drop_path_rate=config.drop_path, global_pool="avg", class_token=class_token,
        use_post_transformer_norm=False, use_fc_norm=False,
    )  # fmt: skip
    return cast(Eva, model)
