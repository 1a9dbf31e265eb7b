"""What this distribution offers. Importing it imports no torch: targets are strings, loaded on first use."""

from __future__ import annotations

from split_core.plugins import Entry, PluginConfig, hookimpl
from split_example import configs


@hookimpl
def split_policies() -> list[Entry]:
    return [Entry("bright", "split_example.policy:Bright", configs.BrightConfig, "bright parents split")]


@hookimpl
def split_tasks() -> list[Entry]:
    return [Entry("quadrant", "split_example.task:Quadrant", configs.QuadrantConfig, "which quarter holds the square")]


@hookimpl
def split_datasets() -> list[Entry]:
    return [Entry("squares", "split_example.data:Squares", configs.SquaresConfig, "a bright square on noise")]


@hookimpl
def split_models() -> list[Entry]:
    return [Entry("small", "split_example.model:build", configs.SmallConfig, "a small ViT with random weights")]


@hookimpl
def split_reducers() -> list[Entry]:
    return [Entry("every_other", "split_example.reducer:EveryOther", configs.EveryOtherConfig, "drops half the tokens")]


@hookimpl
def split_attention() -> list[Entry]:
    return [Entry("naive", "split_example.attention:NaiveAttention", PluginConfig, "explicit softmax, image by image")]


@hookimpl
def split_estimators() -> list[Entry]:
    return [Entry("reinforce", "split_example.estimator:Reinforce", configs.ReinforceConfig, "plain policy gradient")]
