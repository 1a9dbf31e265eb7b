"""Phase two: the policy learns from the task's error while everything else is frozen (Sec. 3.3)."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from split_core import registry
from split_core.config import RunConfig
from split_core.engine.adapt import load_learner
from split_core.engine.calibration import calibrated, objects_of
from split_core.engine.checkpoint import save_weights
from split_core.engine.handover import after
from split_core.engine.loader import step_seed, to_device, training_batches, valid_of
from split_core.engine.methods import WARM, snapshot
from split_core.engine.session import Learner, Session
from split_core.features import Features
from split_core.learn.config import EstimatorConfig
from split_core.learn.estimator import ErrorMapOf, ErrorOf, Estimator, EstimatorContext, Lesson
from split_core.quadtree import build_layout, uniform_splits
from split_core.task import Target, repeat_target


def estimate(session: Session) -> None:
    """Train the run's policy from its warm start and save models/POLICY.safetensors.

    Resumes from the phase's last checkpoint; does nothing if the weights are there.
    """
    config = session.config
    name = config.policy["name"]
    path = session.run_dir / "models" / f"{name}.safetensors"
    if session.finished(path):
        return
    settings = config.settings("estimator")
    assert isinstance(settings, EstimatorConfig)
    steps = settings.steps
    learner = load_learner(session, name + WARM, name, rule=config.decision)
    for module in learner.modules().values():
        module.requires_grad_(False)
    learner.split.policy.requires_grad_(True)
    context = EstimatorContext(config.budget, steps, session.ranks.mean)
    estimator: Estimator = registry.build("estimator", config.estimator, context)
    if steps:
        seconds = _train(session, learner, estimator, settings, steps)
    facts = learned(config, learner, steps, seconds) if steps else {"source": name + WARM}
    if steps and not estimator.holds_budget:
        facts["offset"] = calibrated(session, learner.eval(), "train").offset
    session.finish(path, learner, facts, phase=f"estimate_{name}")


def learned(config: RunConfig, learner: Learner, steps: int, seconds: float) -> dict[str, Any]:
    """What the weights' file of a policy says after so many steps."""
    own = {
        "estimator": config.estimator["name"], "learned_images": steps * config.estimator["batch_size"],
        "learned_seconds": seconds,
    }  # fmt: skip
    return {"source": config.policy["name"] + WARM, **after(learner.facts.get("taught"), own)}


def _train(session: Session, learner, estimator: Estimator, settings: EstimatorConfig, steps: int) -> float:  # type: ignore[no-untyped-def]
    """Returns the seconds it took, those before a resumption included: of all cores on a CPU, where others may keep the
    process waiting, by the clock elsewhere."""
    config, model = session.config, learner.split
    phase = f"estimate_{config.policy['name']}"
    optimizer = torch.optim.Adam(model.policy.parameters(), lr=settings.lr)
    saver = session.saver(phase)
    clock = time.process_time if session.device.type == "cpu" else time.perf_counter
    start, before, began = 0, 0.0, clock()
    resumed = saver.resume()
    if resumed is not None:
        start, state = resumed
        before = state["seconds"]
        model.policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        estimator.load_state_dict(state["estimator"])
    session.log.rewind(phase, start)
    optimizer = session.accelerator.prepare(optimizer)
    ranks = session.ranks
    share = ranks.share("estimator.batch_size", settings.batch_size)
    # The warm start saw the first images; what comes after them is fresh as long as the data lasts.
    first = -(-config.adapt.images // settings.batch_size)
    batches = training_batches(
        session.data("train"),
        share,
        range(first + start, first + steps),
        seed=config.seed,
        workers=config.workers,
        rank=ranks.rank,
        world=ranks.world,
    )
    for position, batch in session.log.track(batches, total=steps, title=phase, start=start):
        step = position - first
        torch.manual_seed(step_seed(config.seed, phase, step) + ranks.rank)
        batch = to_device(batch, session.device)
        generator = ranks.generator(step_seed(config.seed, f"{phase}/masks", step), len(batch["image"]))
        images, target = batch["image"], batch["target"]
        objects = objects_of(learner, target, model.embed.grid(images.shape[-2:]))
        valid = valid_of(model, batch)
        lesson = Lesson(
            images,
            error_of(session, learner, images, target, valid),
            generator,
            objects,
            map_of(session, learner, images, target),
            valid,
        )
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (settings.decay(step / steps))
        _learn(session, model, estimator, lesson, optimizer, settings.grad_clip)
        if (step + 1) % config.log_every == 0 or step + 1 == steps:
            session.log.write(phase, step, ranks.means(estimator.metrics()))
        if step + 1 in settings.kept:
            _keep(session, learner, step + 1, before + clock() - began)
        saver.offer(
            step + 1,
            steps,
            lambda: {
                "policy": model.policy.state_dict(),
                "optimizer": optimizer.state_dict(),
                "estimator": estimator.state_dict(),
                "seconds": before + clock() - began,
            },
        )
    return before + clock() - began


def _keep(session: Session, learner: Learner, step: int, seconds: float) -> None:
    """Save the policy as it is now beside the one that it becomes."""
    path = session.run_dir / "models" / f"{snapshot(session.config.policy['name'], step)}.safetensors"
    facts = learned(session.config, learner, step, seconds)
    session.ranks.same(lambda: save_weights(path, learner.modules(), facts))


def _learn(session, model, estimator: Estimator, lesson: Lesson, optimizer, grad_clip) -> None:  # type: ignore[no-untyped-def]
    """All optimizer steps of one batch."""
    with session.accelerator.autocast():
        for loss in estimator.losses(model, lesson):
            session.accelerator.backward(loss)
            session.ranks.average_gradients(model.policy)
            if grad_clip is not None:
                session.accelerator.unscale_gradients(optimizer)
                nn.utils.clip_grad_norm_(model.policy.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad()


def error_of(
    session: Session, learner: Learner, images: Tensor, target: Target, valid: Tensor | None = None
) -> ErrorOf:
    """E(x, M) as the run's `error` defines it: the task's, or the distance to what the all-fine model says."""
    model, task = learner.split, learner.task

    def of_task(features: Features) -> Tensor:
        repeated = repeat_target(target, features.batch // images.shape[0])
        return task.error(task.output(model, features, repeated), repeated)

    if session.config.error == "task":
        return of_task
    with torch.no_grad(), session.accelerator.autocast():
        pyramid = model.pyramid(images, valid)
        fine = uniform_splits(pyramid.grid, pyramid.batch, split=True, device=images.device)
        dense = task.output(model, model.encode(pyramid, build_layout(fine, pyramid.valid)), target)

    def of_distance(features: Features) -> Tensor:
        repeated = repeat_target({**target, "dense": dense}, features.batch // images.shape[0])
        return task.distance(task.output(model, features, repeated), repeated["dense"])

    return of_distance


def map_of(session: Session, learner: Learner, images: Tensor, target: Target) -> ErrorMapOf | None:
    """Where the task's error lies; None for a distance to the all-fine model, which has no map."""
    if session.config.error != "task":
        return None

    def of_task(features: Features) -> Tensor | None:
        repeated = repeat_target(target, features.batch // images.shape[0])
        return learner.task.error_map(learner.task.output(learner.split, features, repeated), repeated)

    return of_task
