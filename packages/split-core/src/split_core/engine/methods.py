"""The methods of a comparison, and on whose partitions each one's backbone was fine-tuned.

A method is a splitting policy or a reducer (ToMe, EViT ...), by its registered name.

    dense, random, entropy ...   fine-tuned on their own partitions
    cosine, NAME_warmstart, NAME the warm start's partitions are the cosine rule's, so the three share a backbone
    NAME_step12                  the policy as it was then (`estimator.snapshots`), at the budget as the warm start is
    tome, evit ...               fine-tuned reduced as deployed (or as their own training says), at the budget's FLOPs
    analysis policies (oracle)   not rivals; they run on the learned policy's backbone
                                 (both on the cosine rule's own if that policy decides within the backbone)

Every fine-tuning sees the same images for the same number of steps. Unlearned policies are compared at the
threshold that spends the budget (`eval.calibrate` says on which images); a learned policy at the one it deploys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from split_core import registry
from split_core.config import RunConfig
from split_core.engine.assemble import is_reducer
from split_core.errors import SplitError
from split_core.learn.config import EstimatorConfig

WARM, MATCHED = "_warmstart", "_matched"


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Args:
        name: as in results.
        policy: registered name of its policy or reducer.
        source: whose partitions its backbone was fine-tuned on: a policy's name, or NAME_warmstart.
        weights: file stem under models/ that holds backbone, head and policy.
        calibrated: its threshold is set to spend the budget; otherwise its own rule stands.
    """

    name: str
    policy: str
    source: str
    weights: str
    calibrated: bool


def plan(config: RunConfig) -> list[Method]:
    """The methods to compare, the run's own policy last (matched to the budget after as it deploys, if both)."""
    own = config.policy["name"]
    learned = is_learned(own)
    names = named(config, "eval")
    if learned and own + WARM not in names:
        names.append(own + WARM)
    for name in names:
        kind = policy_class(name.removesuffix(WARM))
        if kind.learned and not name.endswith(WARM):
            raise SplitError(
                f"eval.methods: {name} is a learned policy and this run trains {own}; train it in a run of its own "
                f"and merge the two (do=report report.runs=[...])"
            )
        if kind.analysis and not learned:
            raise SplitError(
                f"eval.methods: {name} runs on a learned policy's backbone, and policy={own} is not learned"
            )
    if policy_class(own).analysis:
        raise SplitError(f"policy={own} sees labels and is for comparison only; name it in eval.methods")
    settings = config.settings("estimator")
    kept = settings.kept if learned and isinstance(settings, EstimatorConfig) else ()
    names += [snapshot(own, step) for step in kept]
    rows = [method(name, own if learned else None) for name in [*names, own]]
    if learned and config.eval.calibrate == "test":
        rows.append(replace(rows[-1], name=own + MATCHED, calibrated=True))
    return rows


def method(name: str, learned: str | None) -> Method:
    """A row by name. `learned` is the run's learned policy, or None."""
    if learned and name == learned:
        return Method(name, name, learned + WARM, name, calibrated=False)
    if learned and stage_of(name) == learned:
        return Method(name, learned, learned + WARM, name, calibrated=True)
    kind = policy_class(name)
    source = name
    if learned and (name == "cosine" or kind.analysis):
        # A backbone that learned to take in fine tokens half-way up serves no policy that decides before it.
        source = "cosine" if policy_class(learned).carries else learned + WARM
    return Method(name, name, source, source, calibrated=kind.default_rule == "image" and not kind.exact)


def snapshot(policy: str, step: int) -> str:
    """What a learned policy is called as it was after a step."""
    return f"{policy}_step{step}"


def stage_of(name: str) -> str:
    """The policy of which this is the warm start or a snapshot; a name that is neither as it is."""
    return re.sub(rf"({WARM}|_step\d+)$", "", name)


def sources(methods: list[Method]) -> list[str]:
    """The fine-tunings that the methods need, each once, in order."""
    return list(dict.fromkeys(m.source for m in methods))


def is_learned(policy: str) -> bool:
    """Whether an estimator can train this policy."""
    return policy_class(policy).learned


def policy_class(name: str):  # type: ignore[no-untyped-def]
    """The class behind a registered policy or reducer; both say `learned`, `analysis`, `stochastic`, `default_rule`."""
    return registry.load(registry.get("reducer" if is_reducer(name) else "policy", name).entry)


def named(config: RunConfig, section: Literal["eval", "bench"]) -> list[str]:
    """Methods of a section beside the run's own policy, "all" spelt out: every policy that neither learns nor sees
    labels, and every reducer where pictures fill the canvas.

    Raises:
        SplitError: a reducer is asked for where they do not.
    """
    methods, own = getattr(config, section).methods, config.policy["name"]
    shared = getattr(registry.load(registry.get("data", config.data["name"]).entry), "shared_canvas", False)
    every = [*registry.entries("policy"), *([] if shared else registry.entries("reducer"))] if "all" in methods else []
    every = [name for name in every if not (policy_class(name).learned or policy_class(name).analysis)]
    names = [name for name in dict.fromkeys([*every, *methods]) if name not in (own, "all")]
    for name in names if shared else ():
        if is_reducer(name):
            raise SplitError(
                f"{section}.methods: {name} would read padding as picture, and pictures of data={config.data['name']} "
                "share a canvas; leave it out"
            )
    return names
