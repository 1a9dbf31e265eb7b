"""Index files: a split as a table of paths and labels, checked whole before anything is read."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from split_core.errors import SplitError
from split_core.task import Problem

COLUMNS = ("path", "label")
Row = tuple[str, str]


def read_index(path: Path) -> list[Row]:
    """(path, label) of every line of a csv file with these two columns.

    Raises:
        SplitError: the file cannot be read, a column is missing or a line is short.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file, strict=True)
            missing = [name for name in COLUMNS if name not in (lines.fieldnames or ())]
            if missing:
                raise SplitError(f"{path} has no column {missing[0]} (it has: {', '.join(lines.fieldnames or ())})")
            rows = []
            for line in lines:
                if not line["path"] or not line["label"]:
                    raise SplitError(f"{path}, line {lines.line_num}: path and label should both be given")
                rows.append((line["path"], line["label"]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SplitError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise SplitError(f"{path} lists no pictures")
    return rows


def index_problems(rows: Sequence[Row], root: Path, classes: Sequence[str]) -> Iterator[Problem]:
    """Everything wrong with a split's rows: missing files, repeated paths, labels that train lacks."""
    known = set(classes)
    for name, times in Counter(name for name, _ in rows).items():
        if times > 1:
            yield Problem("listed more than once", name)
        if not (root / name).is_file():
            yield Problem("missing", name)
    for label in sorted({label for _, label in rows} - known):
        yield Problem("label that train does not have", label)


def sound(rows: Sequence[Row], root: Path, classes: Sequence[str]) -> list[Row]:
    """The rows that are left when every problem is left out."""
    return [row for row in dict.fromkeys(rows) if (root / row[0]).is_file() and row[1] in classes]


def in_one_line(problems: Sequence[Problem]) -> str:
    """Every kind with its number and the first few."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem.what)
    return "; ".join(
        f"{len(found)} {kind}: {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}"
        for kind, found in kinds.items()
    )
