"""`wrap`: a timm model and the name of a policy in, an adaptive model out, or one clear line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from pydantic import ValidationError
from torch import nn

from split_core import registry
from split_core.backbone.check import Backbone, check_backbone
from split_core.decision import Decision, Rule
from split_core.errors import SplitError, unknown
from split_core.features import Pooling
from split_core.model import SplitViT
from split_core.policy import BackboneInfo, SplitPolicy
from split_core.pyramid import Down
from split_core.rope import Place


def wrap(
    model: nn.Module, policy: str | Mapping[str, Any] | SplitPolicy = "entropy", *, stages: int = 1,
    budget: float | None = None, rule: Rule | None = None, **options: Any,
) -> SplitViT:  # fmt: skip
    """Give a timm Vision Transformer adaptive patches.

    Args:
        model: a timm VisionTransformer or Eva. It is used as it is, not copied.
        policy: registered name, {"name": ..., setting: value}, or a SplitPolicy.
        stages: S, how often a coarse patch may split: coarse patches have side 2^S p.
        budget: token fraction rho to aim at.
        rule: decision rule (see `split_core.decision`). By default a learned policy splits where its
            probability exceeds one half; an unlearned one spends the budget of each image exactly, best first.
        options: attention, down, pooling, antialias, rope of `SplitViT`.

    Raises:
        SplitError: the model cannot be wrapped, or a name or value is wrong; the message says which.
    """
    check_options(stages=stages, policy=policy, budget=budget, **options)
    vit = check_backbone(model)
    if isinstance(policy, SplitPolicy):
        scorer = policy
    else:
        try:
            scorer = registry.build("policy", policy, backbone_info(vit, stages=stages, budget=budget))
        except ValidationError as error:
            fault = error.errors()[0]
            raise SplitError(f"policy.{'.'.join(map(str, fault['loc']))}={fault['input']!r}: {fault['msg']}") from error
    if not scorer.ranks or (rule is None and budget is None):
        rule = "threshold"
    elif rule is None:
        rule = cast(Rule, scorer.default_rule)
    decision = Decision(rule, budget)
    weight = vit.patch_embed.proj.weight
    scorer.to(weight.device, weight.dtype)
    return SplitViT(vit, scorer, stages=stages, decision=decision, **options)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "attention": (str,), "down": get_args(Down), "pooling": get_args(Pooling), "antialias": (True, False),
    "rope": get_args(Place),
}  # fmt: skip
"""What `wrap` passes on, and the values each may have (a type where any value of it may)."""


def check_options(*, stages: Any, policy: Any, budget: Any, **options: Any) -> None:
    """One clear line for an argument of `wrap` that is of the wrong kind."""
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise SplitError(f"stages={stages!r}: a whole number of at least 1 is needed")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float)):
        raise SplitError(f"budget={budget!r}: a number in (0, 1] is needed, or None")
    if not isinstance(policy, str | Mapping | SplitPolicy):
        raise SplitError(f"policy={policy!r}: a name, a mapping with a name, or a SplitPolicy is needed")
    for name, value in options.items():
        if name not in OPTIONS:
            raise SplitError(unknown("option of wrap", name, OPTIONS))
        allowed = OPTIONS[name]
        if not (isinstance(value, str) if allowed == (str,) else value in allowed):
            raise SplitError(f"{name}={value!r}: one of {', '.join(map(str, allowed))} is needed")


def backbone_info(vit: Backbone, *, stages: int, budget: float | None) -> BackboneInfo:
    """What policies may know of a timm model."""
    config = getattr(vit, "pretrained_cfg", None) or {}
    mean, std = (tuple(config.get(key) or (0.5, 0.5, 0.5)) for key in ("mean", "std"))
    return BackboneInfo(vit.embed_dim, tuple(vit.patch_embed.patch_size), stages, budget, mean, std, len(vit.blocks))
