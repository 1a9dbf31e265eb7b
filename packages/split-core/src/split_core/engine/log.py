"""What a run says: metrics.jsonl, TensorBoard, and a progress bar on a terminal or plain lines in a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from split_core.engine.results import read_metrics
from split_core.files import append_line, write_whole

T = TypeVar("T")


class RunLog:
    """Writes numbers of a run; one per run_dir.

    Args:
        run_dir: metrics.jsonl and tensorboard/ go here.
        every: steps between lines.
        writes: whether this process is the one that writes; the others of a run are silent.
    """

    def __init__(self, run_dir: Path, every: int, *, writes: bool = True) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.every = every
        self._folder = run_dir / "tensorboard"
        self._board: SummaryWriter | None = None
        self.writes = writes
        self.console = Console(file=sys.stdout, quiet=not writes)

    def close(self) -> None:
        """Write out what TensorBoard still holds; what a full disk refuses is in metrics.jsonl or lost with it."""
        if self._board is not None:
            with suppress(OSError):
                self._board.close()
            self._board = None

    def rewind(self, phase: str, step: int) -> None:
        """Drop a phase's lines from `step` on: a resumed run writes them again."""
        if not self.writes or not self.path.is_file():
            return
        kept = [row for row in read_metrics(self.path) if row["phase"] != phase or row["step"] < step]
        write_whole(self.path, "".join(f"{json.dumps(row)}\n" for row in kept))

    def write(self, phase: str, step: int, numbers: Mapping[str, float]) -> None:
        """One step's numbers, to the file at once and to TensorBoard."""
        if not self.writes:
            return
        append_line(self.path, json.dumps({"phase": phase, "step": step, **numbers}))
        if self._board is None:  # made on the first number: commands that log none leave no folder
            self._board = SummaryWriter(str(self._folder))
        for name, value in numbers.items():
            self._board.add_scalar(f"{phase}/{name}", value, step)

    def say(self, text: str) -> None:
        """A line for the reader."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def track(self, items: Iterable[T], *, total: int, title: str, start: int = 0) -> Iterator[T]:
        """Iterate with a bar on a terminal, and with a plain line now and then elsewhere."""
        if not self.writes:
            yield from items
            return
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(),
            )  # fmt: skip
            with Progress(*columns, console=self.console) as progress:
                task = progress.add_task(title, total=total, completed=start)
                for item in items:
                    yield item
                    progress.advance(task)
            return
        began, said = time.monotonic(), time.monotonic()
        for done, item in enumerate(items, start=start + 1):
            yield item
            now = time.monotonic()
            if now - said >= 15 or done == total:
                said = now
                self.say(f"{title}: {done}/{total} after {now - began:.0f} s")
