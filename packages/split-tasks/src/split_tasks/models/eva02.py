"""Model `eva02`: EVA-02 as segmentation uses it, from timm's parts: patch 16, class token, all blocks global, no norm.

timm registers patch 14 with a norm and a classifier. Rotary positions count in cells of a 16 x 16 grid, as in the
original.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from timm.models.eva import Eva
from torch import nn

from split_core.errors import SplitError
from split_core.task import ModelContext
from split_tasks.configs import Eva02Config
from split_tasks.models.weights import load_strict, read_weights

PATCH = 16
SIZES = {"tiny": (32, 3, 2), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, depth, heads; tiny is for tests."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build(config: Eva02Config, context: ModelContext) -> Eva:
    """The backbone; a classifier, if the context asks for one, reads the mean of the patch tokens.

    Raises:
        SplitError: the side is no multiple of 16, or the weights do not fit.
    """
    if config.img_size % PATCH:
        raise SplitError(f"model.img_size: {config.img_size} is no multiple of the patch, {PATCH}")
    dim, depth, heads = SIZES[config.size]
    channels = context.in_chans or 3
    model = Eva(
        img_size=config.img_size, patch_size=PATCH, in_chans=channels, num_classes=context.num_classes, embed_dim=dim,
        depth=depth, num_heads=heads, qkv_fused=False, mlp_ratio=4 * 2 / 3, swiglu_mlp=True, scale_mlp=True,
        use_rot_pos_emb=True, ref_feat_shape=(16, 16), drop_path_rate=config.drop_path, global_pool="avg",
        use_post_transformer_norm=False, use_fc_norm=False, norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )  # fmt: skip
    settings = {
        "architecture": f"eva02_{config.size}_patch16",
        "input_size": (channels, config.img_size, config.img_size),
        "mean": MEAN[:channels],
        "std": STD[:channels],
        "num_classes": context.num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    # timm sets both on models that it makes from its registry, and reads the one or the other.
    for name in ("pretrained_cfg", "default_cfg"):
        setattr(model, name, settings)
    if config.weights != "none":
        path = Path(config.weights).expanduser()
        load_strict(model, read_weights(path), source=str(path))
    return model
