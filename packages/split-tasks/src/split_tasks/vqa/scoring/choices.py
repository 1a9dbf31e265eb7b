"""Benchmarks with lettered options: ScienceQA, MMBench."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from split_tasks.vqa.scoring.files import Record, matched
from split_tasks.vqa.scoring.words import Scores, percent

LETTERS = "ABCDE"


def sqa(
    answers: Mapping[str, str], problems: Mapping[str, Any], splits: Mapping[str, Any], split: str = "test"
) -> Scores:
    """ScienceQA in percent: all questions, and those with a picture. An answer that names no option is wrong.

    Args:
        problems: problems.json: {id: {"choices", "answer": index, "image": name or None}}.
        splits: pid_splits.json.
    """
    ids = [str(key) for key in splits[split]]
    # LLaVA answers the questions with a picture alone in the setting that papers report
    if not set(ids) <= set(answers):
        ids = [key for key in ids if problems[key].get("image")]
    right: dict[str, list[float]] = {}
    for key, said in zip(ids, matched(answers, ids), strict=True):
        value = float(letter(said, LETTERS) == LETTERS[problems[key]["answer"]])
        right.setdefault("accuracy", []).append(value)
        if problems[key].get("image"):
            right.setdefault("accuracy_image", []).append(value)
    return percent(right)


def letter(said: str, options: str) -> str | None:
    """The option that an answer names: "B", "B. a reason", or "... The answer is B." if it says so once."""
    said = said.strip()
    if said in tuple(options):
        return said
    if said[:1] in tuple(options) and said[1:3] == ". ":
        return said[0]
    found = re.findall(r"The answer is ([A-Z])\.", said)
    return found[0] if len(found) == 1 else None


def mmbench(answers: Mapping[str, str], rows: Sequence[Record]) -> Scores:
    """MMBench in percent: a question is right when it is in every order of its options that was asked.

    Args:
        rows: of the table: {"index", "answer", "category"}. Copies with turned options have the question's index plus a
            multiple of a million.
    """
    right: dict[int, bool] = {}
    kind: dict[int, str] = {}
    for row, said in zip(rows, matched(answers, (str(row["index"]) for row in rows)), strict=True):
        question = int(row["index"]) % 1_000_000
        right[question] = right.get(question, True) and letter(said, LETTERS) == str(row["answer"]).strip()
        kind.setdefault(question, str(row.get("category", "")))
    values: dict[str, list[float]] = {"accuracy": [float(value) for value in right.values()]}
    for question, value in right.items():
        if kind[question]:
            values.setdefault(f"accuracy_{kind[question]}", []).append(float(value))
    return percent(values)
