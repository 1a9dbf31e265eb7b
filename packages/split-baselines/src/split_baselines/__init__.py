"""Rivals to learned patch splitting, for comparison.

    reduced = split_baselines.apply(timm_model, "tome", r=8)     # or budget=0.7: the FLOPs of 0.7 of the tokens
    logits = reduced(images)
    reduced.layout.layers                                        # tokens per layer
    timm_model = split_baselines.remove(reduced)

A model is composed, never changed: `remove` gives back the very timm model. The names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from split_baselines.api import apply, remove

__all__ = ["apply", "remove"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'split_baselines' has no attribute {name!r}")
    return getattr(importlib.import_module("split_baselines.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
