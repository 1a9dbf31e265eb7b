"""Opening a run: everything that can be wrong is found here, before run_dir is claimed or anything is trained."""

from __future__ import annotations

from split_core import resolve
from split_core.config import RunConfig
from split_core.decision import check_reachable
from split_core.engine.handover import load_policy
from split_core.engine.lock import RunLock
from split_core.engine.session import Session
from split_core.engine.shard import check_precision
from split_core.errors import SplitError
from split_core.task import Task


def open_run(config: RunConfig) -> Session:
    """Build the session, then claim run_dir: a wrong path or file must leave nothing behind."""
    session = Session(config)
    for split in ("train", "val", config.eval.split):
        session.data(split)
    if config.eval.calibrate == "test" and len(session.data(config.eval.split)) <= config.eval.images:
        raise SplitError(
            f"eval.calibrate=test needs more images than are evaluated: {config.eval.split} has "
            f"{len(session.data(config.eval.split))} and eval.images is {config.eval.images}"
        )
    trains = config.do == "train"
    if trains:
        _check_shares(session)
    learner = session.learner(config.policy, start=trains)
    if trains and config.warmstart.policy is not None:
        load_policy(config.warmstart.policy, learner)
    _check_error(config, learner.task)
    model = learner.model
    grid = model.embed.grid(tuple(model.vit.patch_embed.img_size))
    for budget in (config.budget, *(config.adapt.budget_range or ())):
        check_reachable(budget, grid)
    session.ranks.same(lambda: claim(session))
    return session


def _check_shares(session: Session) -> None:
    """Refuse batches that do not divide among the processes, and what cannot be divided."""
    config = session.config
    session.ranks.share("adapt.batch_size", config.adapt.batch_size)
    session.ranks.share("estimator.batch_size", config.estimator["batch_size"])
    if config.adapt.shard:
        check_precision(config.precision)


def _check_error(config: RunConfig, task: Task) -> None:
    """Refuse what the task's error cannot do now, not after the fine-tuning of every method."""
    if config.error == "distill" and type(task).distance is Task.distance:
        raise SplitError(f"error=distill: {type(task).__name__} defines no distance between outputs; use error=task")
    if getattr(config.settings("estimator"), "reach", None) is not None and not (
        task.maps_error and config.error == "task"
    ):
        raise SplitError(
            "estimator.reach: the error of this run has no place in the picture (tasks seg and det with error=task have"
            " one); use estimator.reach=null"
        )


def claim(session: Session) -> None:
    """Take run_dir for this run, on the process that writes.

    Raises:
        SplitError: another process has it, it holds another run, or it cannot be written.
    """
    resolve.check_run_dir(session.config)
    session.lock = RunLock(session.run_dir)
    try:
        resolve.claim_run_dir(session.config)
    except SplitError:
        session.lock.release()
        raise
