"""Saving and resuming one phase: when, on which process, and what besides the phase's own state belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from split_core.engine.checkpoint import Checkpoints
from split_core.engine.interrupt import Interrupt
from split_core.engine.ranks import Ranks
from split_core.errors import Stopped


class Saver:
    """Checkpoints of one phase, agreed upon by all processes.

    Args:
        checkpoints: where they are.
        ranks: the processes; rank 0 writes, all hold the same state.
        every: steps between checkpoints.
        interrupt: requests to stop.
        scaler: of fp16 losses, which is part of the state; None where there is none.
    """

    def __init__(
        self, checkpoints: Checkpoints, ranks: Ranks, *, every: int, interrupt: Interrupt, scaler: Any = None
    ) -> None:
        self.checkpoints, self.ranks, self.every = checkpoints, ranks, every
        self.interrupt, self.scaler = interrupt, scaler

    def resume(self) -> tuple[int, dict[str, Any]] | None:
        """Steps done and the state after them, the same on every process; None at the start of the phase."""
        step = self.ranks.same(self.checkpoints.newest)
        if step is None:
            return None
        state = self.checkpoints.load(step)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        return step, state

    def offer(self, step: int, steps: int, state: Callable[[], Mapping[str, Any]]) -> None:
        """After step number `step` of `steps`: save if it is time, or if any process was asked to stop.

        Raises:
            Stopped: somebody was asked to; everything up to this step is saved.
            SplitError: the checkpoint cannot be written, on every process.
        """
        stop = self.ranks.any(self.interrupt.asked)
        if stop or (step % self.every == 0 and step < steps):
            content = {**state(), "scaler": None if self.scaler is None else self.scaler.state_dict()}
            self.ranks.same(lambda: self.checkpoints.save(step, content))
        if stop:
            again = self.ranks.any(self.interrupt.again)
            raise Stopped(
                f"stopped as asked after step {step} of {steps} of {self.checkpoints.folder.name}", again=again
            )
