"""Phase one: the backbone learns to read mixed tokens; a learned policy imitates the cosine rule (Sec. 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from split_core.config import RunConfig
from split_core.decision import Decision
from split_core.draws import uniform
from split_core.engine import shard
from split_core.engine.assemble import chooser
from split_core.engine.checkpoint import load_weights
from split_core.engine.groups import clip, learning_rate_factor, parameter_groups
from split_core.engine.handover import take_over
from split_core.engine.loader import step_seed, to_device, training_batches, valid_of
from split_core.engine.masks import Masks, PolicyMasks, WarmStartMasks
from split_core.engine.methods import WARM, stage_of
from split_core.engine.session import Learner, Session
from split_core.features import Features
from split_core.quadtree import build_layout
from split_core.reducer import Reducer
from split_core.task import Task
from split_core.types import Splits


def adapt(session: Session, source: str) -> None:
    """Fine-tune a copy of the backbone on the partitions of `source` and save models/SOURCE.safetensors.

    Resumes from the phase's last checkpoint; does nothing if the weights are there.
    """
    config = session.config
    path = session.run_dir / "models" / f"{source}.safetensors"
    if session.finished(path):
        return
    learner = session.learner(own_settings(config, source.removesuffix(WARM)))
    masks = masks_of(session, learner, warm=source.endswith(WARM))
    facts = learner.facts
    steps = config.adapt.images // config.adapt.batch_size
    if steps:
        _train(session, learner, masks, phase=f"adapt_{source}", steps=steps)
        if config.adapt.shard:
            divided, learner = learner, session.learner(own_settings(config, source.removesuffix(WARM)))
            for name, module in learner.modules().items():
                module.load_state_dict(shard.whole(divided.modules()[name]))
    session.finish(path, learner, {"source": source, **facts, **masks.state_dict()}, phase=f"adapt_{source}")


def masks_of(session: Session, learner: Learner, *, warm: bool) -> Masks | Strengths:
    """Whose partitions the backbone learns on; of a warm start the cosine rule's, or a taught policy's."""
    if isinstance(learner.model, Reducer):
        return Strengths(session, learner)
    if not warm:
        return PolicyMasks(session, learner)
    if session.config.warmstart.policy is None:
        return WarmStartMasks(session, learner)
    take_over(session, learner)
    return PolicyMasks(session, learner)


def own_settings(config: RunConfig, policy: str) -> dict[str, Any]:
    """Settings of a method: the run's where it sets them (`policy`, `reducers`), its defaults otherwise."""
    return config.policy if config.policy["name"] == policy else {"name": policy, **config.reducers.get(policy, {})}


def load_learner(session: Session, weights: str, policy: str, *, rule: Any = None) -> Learner:
    """A model of this run by the stem of its weights, with another policy if `policy` is not the one saved with it."""
    path = session.run_dir / "models" / f"{weights}.safetensors"
    saved = session.learner(own_settings(session.config, stage_of(weights)), rule=rule, start=False)
    saved.facts = load_weights(path, saved.modules())
    if "offset" in saved.facts and chooser(saved.model).learned:
        # its logits only order parents; the budget is spent here
        decision = saved.split.decision
        saved.split.decision = Decision(decision.rule, decision.budget, saved.facts["offset"])
    if policy != stage_of(weights):
        other = session.learner(own_settings(session.config, policy), rule=rule, start=False)
        saved.split.policy, saved.split.decision = other.split.policy, other.split.decision
    return saved.eval()


class AdaptStep(nn.Module):
    """One forward of this phase as a module, so that data-parallel wrappers see every parameter used."""

    def __init__(self, model: Any, task: Task, dense_fraction: float) -> None:
        super().__init__()
        self.model, self.task, self.dense_fraction = model, task, dense_fraction

    def forward(
        self, images: Tensor, target: Mapping[str, Any], masks: Any, generator: torch.Generator,
        valid: Tensor | None = None, *, told: bool = True,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Loss and numbers of a batch; `told`: the error too, which may cost another pass through the task's head."""
        features, fraction, further = self.read(images, masks, generator, valid)
        output = self.task.output(self.model, features, target)
        loss = self.task.loss(output, target, features)
        result = {"loss": loss, "token_fraction": fraction}
        if told:
            with torch.no_grad():
                result["error"] = self.task.error(output, target).mean()
        for name, value in further.items():
            result |= {"loss": result["loss"] + value, name: value.detach()}
        return result

    def read(
        self, images: Tensor, masks: Any, generator: torch.Generator, valid: Tensor | None = None
    ) -> tuple[Features, Tensor, dict[str, Tensor]]:
        """Features of a batch, the token fraction spent on it, and losses beside the task's."""
        pyramid = self.model.pyramid(images, valid)
        splits = masks(pyramid.detach(), images, generator)
        layout = build_layout(splits, pyramid.valid)
        fraction = layout.token_fraction.mean()  # of the masks themselves: tau follows it
        if self.dense_fraction:
            layout = build_layout(self._some_dense(splits, generator), pyramid.valid)
        features = self.model.encode(pyramid, layout)
        imitation = (
            masks.policy_loss(self.model.logits(pyramid.detach(), images), splits, pyramid.valid)
            if self.model.policy.learned
            else None
        )
        return features, fraction, {} if imitation is None else {"imitation": imitation}

    def _some_dense(self, splits: Splits, generator: torch.Generator) -> Splits:
        """Let a share of the images keep every fine token, so that the dense accuracy is not forgotten."""
        rows = uniform((splits.batch,), generator, splits.masks[0].device) < self.dense_fraction
        return Splits(tuple(mask | rows[:, None, None] for mask in splits.masks), splits.grid)


class ReducedStep(AdaptStep):
    """The same for a reducer, which decides by itself."""

    def read(
        self, images: Tensor, masks: Any, generator: torch.Generator, valid: Tensor | None = None
    ) -> tuple[Features, Tensor, dict[str, Tensor]]:
        masks.draw(generator)
        features = self.model.forward_features(images, generator=generator, valid=valid)
        return features, features.layout.token_fraction.mean(), dict(features.losses)


class Strengths:
    """What a reducer has in place of `Masks`: it meets the budget, or one drawn for each step, at equal FLOPs."""

    def __init__(self, session: Session, learner: Learner) -> None:
        assert isinstance(learner.model, Reducer)
        self.range, self.model = session.config.adapt.budget_range, learner.model
        self.model.spend(session.config.budget)

    def draw(self, generator: torch.Generator) -> None:
        """Set the strength of this step."""
        if self.range is not None:
            low, high = self.range
            self.model.spend(low + (high - low) * float(torch.rand((), generator=generator)))

    def after(self, fraction: float) -> dict[str, float]:
        """Nothing follows the token fraction."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: the strength follows from the settings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


def _train(session: Session, learner: Learner, masks: Masks | Strengths, *, phase: str, steps: int) -> None:
    config = session.config
    step_of = ReducedStep if isinstance(learner.model, Reducer) else AdaptStep
    step_module = step_of(learner.model, learner.task, config.adapt.dense_fraction)
    groups = parameter_groups(learner, config)  # what is frozen has to be known before anything is divided
    state_of, load = plain_state, load_plain
    if config.adapt.shard:
        shard.shard(step_module, session.ranks, config.precision)
        groups, state_of, load = parameter_groups(learner, config), shard.state, shard.load
    optimizer = torch.optim.AdamW(groups)
    peaks = [group["lr"] for group in optimizer.param_groups]
    saver = session.saver(phase)
    start = 0
    resumed = saver.resume()
    if resumed is not None:
        start, state = resumed
        load(step_module, optimizer, state)
        masks.load_state_dict(state["masks"])
    session.log.rewind(phase, start)
    wrapped = step_module
    if not config.adapt.shard:
        wrapped, optimizer = session.accelerator.prepare(step_module, optimizer)
    wrapped.train()
    ranks = session.ranks
    share = ranks.share("adapt.batch_size", config.adapt.batch_size)
    batches = training_batches(
        session.data("train"), share, range(start, steps), seed=config.seed, workers=config.workers,
        rank=ranks.rank, world=ranks.world,
    )  # fmt: skip
    for step, batch in session.log.track(batches, total=steps, title=phase, start=start):
        torch.manual_seed(step_seed(config.seed, phase, step) + ranks.rank)
        batch = to_device(batch, session.device)
        generator = ranks.generator(step_seed(config.seed, f"{phase}/masks", step), len(batch["image"]))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(step, steps, config.adapt.warmup)
        told = (step + 1) % config.log_every == 0 or step + 1 == steps
        with session.accelerator.autocast():
            valid = valid_of(learner.model, batch)
            result = wrapped(batch["image"], batch["target"], masks, generator, valid, told=told)
        session.accelerator.backward(result["loss"])
        session.accelerator.unscale_gradients(optimizer)  # once for all groups
        clip(optimizer.param_groups, config.adapt.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        numbers = ranks.means({name: value.item() for name, value in result.items()})
        extra = masks.after(numbers["token_fraction"])
        if told:
            session.log.write(phase, step, numbers | extra)
        saver.offer(
            step + 1,
            steps,
            lambda: {
                **state_of(step_module, optimizer),
                "masks": masks.state_dict(),
            },
        )


def plain_state(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights and moments for a checkpoint; `shard.state` where they are divided among processes."""
    return {"weights": module.state_dict(), "optimizer": optimizer.state_dict()}


def load_plain(module: nn.Module, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Inverse of `plain_state`."""
    module.load_state_dict(saved["weights"])
    optimizer.load_state_dict(saved["optimizer"])
