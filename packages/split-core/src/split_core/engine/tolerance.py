"""What becomes of pictures that cannot be read: `on_error=raise|skip|count`.

A damaged picture is left out of its batch; nothing ever takes its place, so an evaluation says how many images it
really saw. `skip` names each one when it is met, `count` only the first few at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from split_core.pictures import PictureError
from split_core.task import Dataset

logger = logging.getLogger(__name__)
NAMED = 5
"""Files that the summary names."""


@dataclass
class LeftOut:
    """Pictures that were left out of a run so far.

    Args:
        named: say each one when it is first met.
        lines: what is wrong with each, by split and number.
    """

    named: bool
    lines: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, split: str, index: int, line: str) -> None:
        """Note a picture; one that was met before counts once."""
        if (split, index) not in self.lines and self.named:
            logger.warning("left out: %s", line)
        self.lines[split, index] = line

    def summary(self) -> str | None:
        """How many there were and the first few; None when there were none."""
        if not self.lines:
            return None
        lines = list(self.lines.values())
        more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        return f"{len(lines)} pictures could not be read and were left out: {'; '.join(lines[:NAMED])}{more}"


class Tolerant:
    """A data set whose damaged pictures are left out of the batches (`split_core.task.Dataset`).

    Args:
        data: the data set.
        split: its name, for the notes.
        left_out: where they are noted, in the main process.
    """

    def __init__(self, data: Dataset, split: str, left_out: LeftOut) -> None:
        self.data, self.split, self.left_out = data, split, left_out
        self.classes = data.classes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        """A sample, or in place of a damaged one (index, line)."""
        try:
            return self.data[index]
        except PictureError as error:
            return index, str(error)

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """A batch of the whole ones, with "left_out" for the others; nothing else where none is whole."""
        damaged = [sample for sample in samples if isinstance(sample, tuple)]
        whole = [sample for sample in samples if not isinstance(sample, tuple)]
        return {**(self.data.collate(whole) if whole else {}), "left_out": damaged}

    def note(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch without its notes, which are taken down here; in the main process, after any workers."""
        for index, line in batch.pop("left_out"):
            self.left_out.add(self.split, index, line)
        return batch
