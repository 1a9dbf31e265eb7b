"""Answers files that a killed evaluation goes on with: no question twice, none lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from split_core.errors import SplitError
from split_core.files import unwritable
from split_tasks.vqa.scoring.files import Record

Key = tuple[str, str]
"""question_id and prompt: ids repeat where a benchmark numbers pictures."""


def key_of(record: Record) -> Key:
    """Of a line of an answers file, or of a question file (whose prompt is called text)."""
    return str(record["question_id"]), str(record.get("prompt", record["text"]))


class AnswersFile:
    """A jsonl file {question_id, prompt, text, ...} that grows batch by batch, each written through to the disk.

    Args:
        path: it may exist; a last line that a kill cut short is dropped.

    Raises:
        SplitError: another line than the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[Key] = set()
        whole = 0
        content = path.read_bytes() if path.is_file() else b""
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            last = whole + len(line) == len(content)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("cut short")
                if line.strip():
                    self.done.add(key_of(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                if last:
                    break
                raise SplitError(f"{path}, line {number} is no answer; mend or remove the file") from None
            whole += len(line)
        self._whole = whole

    def left(self, questions: Sequence[Record]) -> list[Record]:
        """The questions without an answer, in order.

        Raises:
            SplitError: the file answers questions that are none of these.
        """
        asked: set[Key] = set()
        for key in map(key_of, questions):
            if key in asked:
                raise SplitError(f"two questions have the same question_id and text: {key[0]}, {key[1]!r}")
            asked.add(key)
        other = sorted(self.done - asked)
        if other:
            raise SplitError(
                f"{self.path} answers other questions (e.g. {other[0][0]}): it belongs to another question file; name "
                f"another answers file"
            )
        return [question for question in questions if key_of(question) not in self.done]

    @contextmanager
    def open(self) -> Iterator[AnswersFile]:
        """For `write`; one process at a time.

        Raises:
            SplitError: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as raw:
                raw.truncate(self._whole)
        except OSError as error:
            raise unwritable(self.path, error) from error
        with self.path.open("a", encoding="utf-8") as file:
            self._file: TextIO = file
            yield self

    def write(self, questions: Sequence[Record], texts: Sequence[str], **further: Any) -> None:
        """A batch of answers; `further` goes on every line."""
        for question, text in zip(questions, texts, strict=True):
            line = {"question_id": question["question_id"], "prompt": question["text"], "text": text, **further}
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done |= {key_of(question) for question in questions}
