"""results.json and its like: written whole or not at all, read with one clear line on what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from split_core.errors import SplitError
from split_core.files import read_records, unreadable, write_whole

RESULTS = "results.json"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all; folders are made."""
    write_whole(path, json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def read_results(path: Path, *, hint: str) -> dict[str, Any]:
    """A file that `write_json` wrote, with rows.

    Args:
        path: the file.
        hint: what to do when it is not there.

    Raises:
        SplitError: it is missing, damaged or holds no rows.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SplitError(f"{path} is missing: {hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise SplitError(f"{path} holds no results: {hint}")
    return content


def metric_of(row: Mapping[str, Any]) -> str | None:
    """Name of the task's metric in a row: the number that comes with a standard error."""
    return next((key.removesuffix("_se") for key in row if key.endswith("_se")), None)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl: phase, step and numbers. Others are passed over, a missing file has none."""
    return [record for record in read_records(path) if _is_step(record)]


def _is_step(record: Mapping[str, Any]) -> bool:
    numbers = {key: value for key, value in record.items() if key != "phase"}
    whole = isinstance(record.get("phase"), str) and isinstance(record.get("step"), int)
    return whole and all(isinstance(value, int | float) for value in numbers.values())


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
