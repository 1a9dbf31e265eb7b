"""`apply` and `remove`: one line to reduce a timm model's tokens, one to have it back."""

from __future__ import annotations

from typing import Any

from torch import nn

from split_core.reducer import Reducer, build_reducer


def apply(
    model: nn.Module, name: str, *, budget: float | None = None, attention: str = "auto", **settings: Any
) -> Reducer:
    """A timm Vision Transformer with a reducer around its blocks.

    Args:
        model: a timm VisionTransformer or Eva. It is used as it is, neither copied nor changed.
        name: of the reducer, e.g. "tome"; `python launch/run.py do=plugins` lists them.
        budget: choose the strength so that no more is computed than by splitting at this token fraction.
        attention: backend name, or "auto".
        settings: the reducer's own, e.g. r=8.

    Raises:
        SplitError: no such reducer or setting, or a model that it cannot work on; the message says which.
    """
    reducer = build_reducer({"name": name, **settings}, model, budget=budget)
    reducer.attention = attention
    return reducer


def remove(model: nn.Module) -> nn.Module:
    """The timm model inside a reduced one; a model that is not reduced comes back as it is."""
    return model.unwrap() if isinstance(model, Reducer) else model
