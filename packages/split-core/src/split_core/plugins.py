"""What a plugin offers: typed entries, returned from hooks.  Importing this module imports no torch.

A distribution that extends the system declares an entry point in the group "split" and implements any of
the hooks below with `hookimpl`; each returns a list of `Entry`. See docs/plugins.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import pluggy
from pydantic import BaseModel, ConfigDict

PROJECT = "split"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PluginConfig(BaseModel):
    """Base of every plugin's settings: unknown keys are errors, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


@dataclass(frozen=True)
class Entry:
    """One named thing a plugin offers.

    Args:
        name: what people type, e.g. ``policy=xattn``.
        target: "module:attribute", imported on first use and called as ``target(config, context)``;
            what `context` is depends on the kind (see `Hooks`).
        config: pydantic class of its settings; its module must not import torch.
        summary: one line for listings and help.
    """

    name: str
    target: str
    config: type[PluginConfig]
    summary: str


class Hooks:
    """The hooks, one per kind of thing that has alternatives."""

    @hookspec
    def split_policies(self) -> list[Entry]:  # type: ignore[empty-body]
        """Policies: ``target(config, BackboneInfo) -> split_core.policy.SplitPolicy``."""

    @hookspec
    def split_tasks(self) -> list[Entry]:  # type: ignore[empty-body]
        """Tasks: ``target(config, TaskContext) -> split_core.task.Task``."""

    @hookspec
    def split_datasets(self) -> list[Entry]:  # type: ignore[empty-body]
        """Data: ``target(config, DataContext) -> split_core.task.Dataset`` (a map-style data set)."""

    @hookspec
    def split_models(self) -> list[Entry]:  # type: ignore[empty-body]
        """Backbones: ``target(config, ModelContext) -> a timm model`` (timm hub, a file, a package)."""

    @hookspec
    def split_reducers(self) -> list[Entry]:  # type: ignore[empty-body]
        """Layer-wise rivals (ToMe, EViT ...): ``target(config, timm_model) -> nn.Module``."""

    @hookspec
    def split_attention(self) -> list[Entry]:  # type: ignore[empty-body]
        """Attention backends: ``target(config, None) -> split_core.attention.AttentionBackend``."""

    @hookspec
    def split_estimators(self) -> list[Entry]:  # type: ignore[empty-body]
        """How a policy learns: ``target(config, EstimatorContext) -> split_core.learn.Estimator``."""


KINDS = {
    "policy": "split_policies",
    "task": "split_tasks",
    "data": "split_datasets",
    "model": "split_models",
    "reducer": "split_reducers",
    "attention": "split_attention",
    "estimator": "split_estimators",
}
"""Kind, as typed on the command line -> hook."""
