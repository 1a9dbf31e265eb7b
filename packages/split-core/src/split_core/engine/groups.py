"""Which parameters fine-tuning moves, how fast each, and how far in one step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from timm.models import group_parameters
from torch import Tensor, nn

from split_core.config import RunConfig
from split_core.engine.assemble import scorers
from split_core.engine.session import Learner

VIT = "model.vit."


def parameter_groups(learner: Learner, config: RunConfig) -> list[dict[str, Any]]:
    """Backbone, new layers (head, pyramid, task) and what decides about tokens: each at its own rate, none frozen.

    Returns: AdamW's groups, each with the name of its "part". The backbone is one, or one for each layer that moves
        (`adapt.layer_decay`).
    """
    head = tuple(f"{VIT}{name}." for name in ("head", "fc_norm", "head_dist"))
    idle = ("vit.norm.",) if learner.model.taps else ()  # heads on taps read what stands before the final norm
    if config.warmstart.policy is not None:
        idle = (*idle, "policy.")  # it was taught elsewhere, and the estimator's turn comes later
    deciding = scorers(learner.model)
    parts: dict[str, list[tuple[str, Tensor]]] = {"backbone": [], "head": [], "policy": []}
    named = [(f"{part}.{key}", p) for part, module in learner.modules().items() for key, p in module.named_parameters()]
    for name, parameter in named:
        frozen = any(name.removeprefix("model.").startswith(prefix) for prefix in (*config.adapt.freeze, *idle))
        parameter.requires_grad_(not frozen)
        if frozen:
            continue
        if name.startswith(deciding):
            parts["policy"].append((name, parameter))
        elif name.startswith(VIT) and not name.startswith(head):
            parts["backbone"].append((name, parameter))
        else:
            parts["head"].append((name, parameter))
    rates = {"backbone": config.adapt.backbone_lr, "head": config.adapt.head_lr, "policy": config.warmstart.policy_lr}
    if not rates["backbone"]:
        for _, unmoved in parts.pop("backbone"):
            unmoved.requires_grad_(False)
    distance = {} if config.adapt.layer_decay is None else layer_distances(learner.model.vit)
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for part, members in parts.items():
        for name, member in members:
            far = distance.get(name.removeprefix(VIT), 0) if part == "backbone" else 0
            fresh = {
                "part": part, "params": [], "lr": rates[part] * (config.adapt.layer_decay or 1.0) ** far,
                "weight_decay": config.adapt.weight_decay if part != "policy" else 0.0,
            }  # fmt: skip
            groups.setdefault((part, far), fresh)["params"].append(member)
    return list(groups.values())


def layer_distances(vit: nn.Module) -> dict[str, int]:
    """How many layers from the output each parameter of a ViT is, as BEiT counts; timm knows which is whose.

    What follows the blocks is at 0, the last block and the norm behind it at 1, embeddings and positions at one more
    than there are blocks.
    """
    model: Any = vit
    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    return {name: len(model.blocks) + 1 - layer for name, layer in layers.items()}


def clip(groups: Iterable[Mapping[str, Any]], most: float) -> None:
    """Limit the gradient of each part: apart, so that the policy's must not shrink the backbone's step."""
    parts: dict[str, list[Tensor]] = {}
    for group in groups:
        parts.setdefault(group["part"], []).extend(group["params"])
    for parameters in parts.values():
        nn.utils.clip_grad_norm_(parameters, most)


def learning_rate_factor(step: int, steps: int, warmup: float) -> float:
    """Linear rise over the first share of the steps, then half a cosine down to zero."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
