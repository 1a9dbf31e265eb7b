"""`wrap`: a timm model and the name of a policy in, an adaptive model out, or one clear line; and a saved one back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast, get_args

import torch
from pydantic import ValidationError
from torch import nn

from split_core import hub, registry, saved
from split_core.backbone.check import Backbone, check_backbone
from split_core.decision import Decision, Rule
from split_core.errors import SplitError, unknown
from split_core.features import Pooling
from split_core.model import SplitViT
from split_core.policy import BackboneInfo, SplitPolicy
from split_core.pyramid import Down
from split_core.rope import Place
from split_core.saved import Spec
from split_core.windows import Windows


def wrap(
    model: nn.Module, policy: str | Mapping[str, Any] | SplitPolicy = "entropy", *, stages: int | Integral = 1,
    budget: float | Real | None = None, rule: Rule | None = None, windows: Windows | Mapping[str, Any] | None = None,
    **options: Any,
) -> SplitViT:  # fmt: skip
    """Give a timm Vision Transformer adaptive patches.

    Args:
        model: a timm VisionTransformer or Eva, or a `VisionTower`. It is used as it is, not copied.
        policy: registered name, {"name": ..., setting: value}, or a SplitPolicy.
        stages: S, how often a coarse patch may split: coarse patches have side 2^S p.
        budget: token fraction rho to aim at.
        rule: decision rule (see `split_core.decision`). By default a learned policy splits where its
            probability exceeds one half; an unlearned one spends the budget of each image exactly, best first.
        windows: within which most blocks attend, as a `Windows` or its settings; by default what the model says of
            itself in an attribute of that name, if it has one.
        options: attention, down, pooling, antialias, rope, compile_blocks of `SplitViT`.

    Raises:
        SplitError: the model cannot be wrapped, or a name or value is wrong; the message says which.
    """
    check_options(stages=stages, policy=policy, budget=budget, **options)
    stages, budget = int(stages), None if budget is None else float(budget)
    vit = check_backbone(model)
    windows = Windows.of(getattr(vit, "windows", None) if windows is None else windows)
    if windows is not None:
        options["windows"] = windows
    settings = None
    if isinstance(policy, SplitPolicy):
        scorer = policy
    else:
        try:
            choice = registry.choose("policy", policy)
            scorer = registry.build("policy", choice, backbone_info(vit, stages=stages, budget=budget))
            settings = {"name": choice.name, **choice.settings.model_dump(mode="json")}
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
    model = SplitViT(vit, scorer, stages=stages, decision=decision, **options)
    if settings is not None:
        model.spec = Spec(policy=settings, stages=stages, budget=budget, options=hub.options(model))
    return model


def load_pretrained(
    source: str | Path, *, revision: str | None = None, budget: float | Real | None = None, rule: Rule | None = None,
    **options: Any,
) -> SplitViT:  # fmt: skip
    """The model that `save_pretrained` or `push_to_hub` wrote, in eval mode.

    Args:
        source: a folder, or "owner/name" on the Hugging Face Hub.
        revision: branch, tag or commit of the repository.
        budget: token fraction to spend instead of the saved decision's, best first unless `rule` says otherwise.
        rule: decision rule instead of the saved one.
        options: attention, compile_blocks and pooling instead of the saved ones. The other options of `wrap` belong to
            the weights.

    Raises:
        SplitError: it cannot be found, is damaged, does not fit (names every key that does not), or an option cannot
            be given here.
    """
    for name in options:
        if name not in LOADING:
            raise SplitError(f"{name} belongs to the saved weights; {', '.join(LOADING)} can be chosen when loading")
    check_options(stages=1, policy="", budget=budget, **options)
    folder = hub.fetch(source, revision=revision)
    path = folder / hub.CONFIG
    config = saved.read(path)
    try:
        model = wrap(
            hub.build_backbone(config), config.spec.policy, stages=config.spec.stages, budget=config.spec.budget,
            **config.spec.options.model_dump(),
        )  # fmt: skip
    except SplitError as error:
        raise SplitError(f"{path}: {error}") from error
    for name, value in options.items():
        setattr(model, name, value)
    model.decision = _redecided(config.decision, model.policy, budget, rule)
    model.to(getattr(torch, config.dtype))
    hub.load_state(model, folder)
    return model.eval()


LOADING = ("budget", "rule", "attention", "compile_blocks", "pooling")
"""What may be chosen anew for trained weights."""


def _redecided(decision: Decision, policy: SplitPolicy, budget: float | Real | None, rule: Rule | None) -> Decision:
    """The saved decision with another budget or rule."""
    if budget is None and rule is None:
        return decision
    if not policy.ranks:
        raise SplitError(
            f"budget={budget}, rule={rule}: a {type(policy).__name__} does not rank patches; leave them out"
        )
    spends: tuple[Rule, ...] = ("image", "batch")
    if rule is None:
        rule = decision.rule if decision.rule in spends else "image"
    if budget is not None and rule not in spends:
        raise SplitError(f"budget={budget} has no effect under rule={rule!r}; {' and '.join(spends)} spend a budget")
    return replace(decision, rule=rule, budget=decision.budget if budget is None else float(budget))


OPTIONS: dict[str, tuple[Any, ...]] = {
    "attention": (), "down": get_args(Down), "pooling": get_args(Pooling), "antialias": (True, False),
    "rope": get_args(Place), "compile_blocks": (True, False),
}  # fmt: skip
"""What `wrap` passes on, and the values each may have; the registry says for attention."""


def check_options(*, stages: Any, policy: Any, budget: Any, **options: Any) -> None:
    """One clear line for an argument of `wrap` that is of the wrong kind."""
    if not isinstance(stages, Integral) or isinstance(stages, bool) or int(stages) < 1:
        raise SplitError(f"stages={stages!r}: a whole number of at least 1 is needed")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, Real)):
        raise SplitError(f"budget={budget!r}: a number in (0, 1] is needed, or None")
    if not isinstance(policy, str | Mapping | SplitPolicy):
        raise SplitError(f"policy={policy!r}: a name, a mapping with a name, or a SplitPolicy is needed")
    for name, value in options.items():
        if name not in OPTIONS:
            raise SplitError(unknown("option of wrap", name, OPTIONS))
        if name == "attention" and isinstance(value, str) and value != "auto":
            registry.get(name, value)
            continue
        allowed = OPTIONS[name] or ("auto", *registry.entries(name))
        if value not in allowed:
            raise SplitError(f"{name}={value!r}: one of {', '.join(map(str, allowed))} is needed")


def backbone_info(vit: Backbone, *, stages: int, budget: float | None) -> BackboneInfo:
    """What policies may know of a timm model."""
    config = getattr(vit, "pretrained_cfg", None) or {}
    mean, std = (tuple(config.get(key) or (0.5, 0.5, 0.5)) for key in ("mean", "std"))
    return BackboneInfo(vit.embed_dim, tuple(vit.patch_embed.patch_size), stages, budget, mean, std, len(vit.blocks))
