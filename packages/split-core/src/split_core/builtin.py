"""What split_core itself offers, registered the way every plugin does it."""

from __future__ import annotations

from split_core.learn.config import CreditConfig, GateConfig, PPOConfig, SupervisedConfig
from split_core.plugins import Entry, PluginConfig, hookimpl


@hookimpl
def split_attention() -> list[Entry]:
    """The backends for attention over a packed batch."""
    return [
        Entry(
            "sdpa", "split_core.attention.sdpa:SdpaAttention", PluginConfig, "one fused SDPA per image; runs anywhere"
        ),
        Entry(
            "masked", "split_core.attention.masked:MaskedAttention", PluginConfig, "block-diagonal mask; the reference"
        ),
        Entry("varlen", "split_core.attention.varlen:VarlenAttention", PluginConfig, "torch varlen_attn, for CUDA"),
        Entry(
            "xformers",
            "split_core.attention.xformers:XformersAttention",
            PluginConfig,
            "xformers BlockDiagonalMask, for CUDA",
        ),
    ]


@hookimpl
def split_estimators() -> list[Entry]:
    """The paper's way for a policy to learn, its rivals, and one of ours."""
    return [
        Entry("ppo", "split_core.learn.ppo:PPO", PPOConfig, "whole-mask PPO under a token budget (Sec. 3.3)"),
        Entry("credit", "split_core.learn.credit:Credit", CreditConfig, "regress what each split would save"),
        Entry("gate", "split_core.learn.gate:Gate", GateConfig, "straight-through gates, relaxed splits (App. B)"),
        Entry(
            "supervised",
            "split_core.learn.supervised:Supervised",
            SupervisedConfig,
            "labelled objects as targets, a bound for analysis",
        ),
    ]
