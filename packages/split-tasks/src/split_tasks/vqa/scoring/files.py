"""Reading what scores are made from; what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from split_core.errors import SplitError

Record = dict[str, Any]
K = TypeVar("K")


def read_jsonl(path: Path) -> list[Record]:
    """One json object for each line; empty lines do not count.

    Raises:
        SplitError: no such file, or a line that is no object; its number is named.
    """
    records = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise SplitError(f"{path}, line {number} is no json: {error}") from None
        if not isinstance(record, dict):
            raise SplitError(f"{path}, line {number} should be an object with question_id")
        records.append(record)
    return records


def read_json(path: Path) -> Any:
    """A json file.

    Raises:
        SplitError: no such file, or no json.
    """
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise SplitError(f"{path} is no json file: {error}") from None


def by_id(records: Iterable[Record]) -> dict[str, str]:
    """question_id (as text) -> answer.

    Raises:
        SplitError: a record without question_id or text, or a question answered twice.
    """
    answers: dict[str, str] = {}
    for record in records:
        if "question_id" not in record or "text" not in record:
            raise SplitError(f"every answer needs question_id and text; one has {', '.join(record)}")
        key = str(record["question_id"])
        if key in answers:
            raise SplitError(f"question {key} is answered twice")
        answers[key] = str(record["text"])
    return answers


def matched(answers: Mapping[K, str], wanted: Iterable[K]) -> list[str]:
    """The answers to these questions, in order.

    Raises:
        SplitError: some have none; a score over the others would be of another benchmark.
    """
    keys = list(wanted)
    if not keys:
        raise SplitError("there is no question to score")
    missing = [key for key in keys if key not in answers]
    if missing:
        raise SplitError(
            f"{len(missing)} of {len(keys)} questions have no answer, e.g. {', '.join(map(str, missing[:3]))}; "
            f"finish the answers file first"
        )
    return [answers[key] for key in keys]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SplitError(f"no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SplitError(f"{path} cannot be read: {error}") from None
