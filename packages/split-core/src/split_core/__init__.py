"""Adaptive patch splitting for Vision Transformers.

    model = split_core.wrap(timm_model, policy="entropy", budget=0.7)
    logits = model(images)

The names below load on first use, so that importing the package (for its registry, say) loads neither torch
nor a plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from split_core.engine.patchmap import draw
    from split_core.model import SplitViT
    from split_core.types import Grid, Layout, Pyramid, Splits
    from split_core.windows import Windows
    from split_core.wrapping import load_pretrained, wrap

__all__ = ["Grid", "Layout", "Pyramid", "SplitViT", "Splits", "Windows", "draw", "load_pretrained", "wrap"]


def __getattr__(name: str) -> Any:
    homes = {"draw": "engine.patchmap", "SplitViT": "model", "Windows": "windows"}
    homes |= {"load_pretrained": "wrapping", "wrap": "wrapping"}
    if name not in __all__:
        raise AttributeError(f"module 'split_core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"split_core.{homes.get(name, 'types')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
