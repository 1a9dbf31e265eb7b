"""From the name of a method to its model. A method is a splitting policy or a reducer; past this module, `chooser` and
`operate`, the engine does not ask which: both are read through `forward_features`, `forward_head` and `embed.grid`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from split_core import registry
from split_core.config import RunConfig
from split_core.decision import Decision
from split_core.model import SplitViT
from split_core.policy import SplitPolicy
from split_core.reducer import Reducer, build_reducer
from split_core.wrapping import wrap


def assemble(
    vit: nn.Module, spec: str | Mapping[str, Any], config: RunConfig, *, budget: float | None, rule: Any = None
) -> SplitViT | Reducer:
    """The model of a method around a timm model.

    Args:
        spec: a policy or reducer by name, or with settings.
        budget: token fraction that a policy aims at; a reducer stays as it is set until `Reducer.spend`.
        rule: decision rule of a policy.

    Raises:
        SplitError: the model cannot be read this way.
    """
    if is_reducer(spec if isinstance(spec, str) else spec["name"]):
        reducer = build_reducer(spec, vit)
        reducer.attention = config.attention["name"]
        return reducer
    return wrap(vit, spec, stages=config.stages, budget=budget, rule=rule, attention=config.attention["name"])


def is_reducer(name: str) -> bool:
    """Whether a method of this name reduces tokens between layers."""
    return name in registry.entries("reducer") and name not in registry.entries("policy")


def chooser(model: SplitViT | Reducer) -> SplitPolicy | Reducer:
    """Whom to ask what a method is (`learned`, `analysis`, `stochastic`): the policy, or the reducer itself."""
    return model if isinstance(model, Reducer) else model.policy


def operate(model: SplitViT | Reducer, point: Any) -> None:
    """Let a model spend what `point` says: a `Decision`, or settings of a reducer."""
    if isinstance(model, Reducer):
        model.config = point
    else:
        model.decision = point


def describe(model: SplitViT | Reducer) -> str:
    """How a model decides, in a word or a setting."""
    if isinstance(model, Reducer):
        return ", ".join(
            f"{key}={_short(value)}" for key, value in model.config.model_dump().items() if value is not None
        )
    assert isinstance(model.decision, Decision)
    return model.decision.rule


def not_shared(model: SplitViT | Reducer) -> tuple[str, ...]:
    """Beginnings of names of weights that another run does not give: policies, pyramids, what reducers learn."""
    return ("model.policy.", "model.embed.", *scorers(model)) if isinstance(model, Reducer) else scorers(model)


def scorers(model: SplitViT | Reducer) -> tuple[str, ...]:
    """Beginnings of names of what decides about tokens: a policy's, or what a reducer adds to the model."""
    if isinstance(model, Reducer):
        return tuple(f"model.{name}." for name, _ in model.named_children() if name not in ("vit", "embed"))
    return ("model.policy.",)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
