"""Model `digits_vit`: a ViT of 0.1 M parameters for the 40x40 digits, patch 4."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from timm.models.vision_transformer import VisionTransformer

from split_core.errors import SplitError
from split_core.task import ModelContext
from split_tasks.configs import DigitsViTConfig
from split_tasks.models.weights import load_strict, read_weights

IMAGE_SIZE, PATCH = (40, 40), 4
MEAN, STD = (0.5,), (0.25,)
SHIPPED = "assets/digits_vit.safetensors"


def build(config: DigitsViTConfig, context: ModelContext) -> VisionTransformer:
    """The tiny ViT.

    Args:
        config: its sizes and weights.
        context: classes, image size (None is 40x40) and channels (None is 1).

    Raises:
        ValueError: the weights are missing or do not fit.
    """
    size, channels = context.image_size or IMAGE_SIZE, context.in_chans or 1
    model = VisionTransformer(
        img_size=size,
        patch_size=PATCH,
        in_chans=channels,
        num_classes=context.num_classes,
        embed_dim=config.dim,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        global_pool=config.pool,
    )
    settings = {
        "architecture": "digits_vit",
        "input_size": (channels, *size),
        "mean": MEAN * channels,
        "std": STD * channels,
        "num_classes": context.num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    # timm sets both on models that it makes from its registry, and reads the one or the other.
    for name in ("pretrained_cfg", "default_cfg"):
        setattr(model, name, settings)
    if config.weights != "none":
        path = shipped() if config.weights == "shipped" else Path(config.weights).expanduser()
        load_strict(model, read_weights(path), source=str(path))
    return model


def shipped() -> Path:
    """The weights inside this package.

    Raises:
        ValueError: this installation has none.
    """
    path = Path(str(resources.files("split_tasks").joinpath(SHIPPED)))
    if not path.is_file():
        raise SplitError(f"model.weights: this installation has no {SHIPPED}; use model.weights=none or a file")
    return path
