"""Benchmarks whose answers are a word or a phrase: VQA v2, TextVQA, GQA."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from split_core.errors import SplitError
from split_tasks.vqa.scoring.files import Record, matched
from split_tasks.vqa.scoring.normalise import normalise, normalise_textvqa, soft_accuracy

Scores = dict[str, float]


def vqa(answers: Mapping[str, str], truth: Any) -> Scores:
    """VQA v2 in percent: overall, and by type of answer.

    As its evaluation does it, answers take the standard form only where the annotators disagree.

    Args:
        truth: the annotations file: {"annotations": [{"question_id", "answers": [{"answer"}], "answer_type"}]}.
    """
    rows = truth["annotations"]
    totals: dict[str, list[float]] = {}
    for row, said in zip(rows, matched(answers, (str(row["question_id"]) for row in rows)), strict=True):
        given = [" ".join(entry["answer"].split()) for entry in row["answers"]]
        said = " ".join(said.split())
        if len(set(given)) > 1:
            given, said = [normalise(answer) for answer in given], normalise(said)
        value = soft_accuracy(said, given)
        for key in ("accuracy", *([f"accuracy_{row['answer_type']}"] if "answer_type" in row else [])):
            totals.setdefault(key, []).append(value)
    return percent(totals)


def textvqa(records: Sequence[Record], truth: Any) -> Scores:
    """TextVQA soft accuracy in percent; the prompts may hold OCR tokens or not.

    Args:
        records: lines of the answers file. LLaVA's question_id is the image's, which several questions share, so
            that the question is read from the line's prompt.
        truth: the annotations file: {"data": [{"image_id", "question", "answers": [text, ...]}]}.
    """
    known = {(str(row["image_id"]), row["question"].strip().lower()): row["answers"] for row in truth["data"]}
    said: dict[tuple[str, str], str] = {}
    for record in records:
        key = (str(record["question_id"]), plain_question(record["prompt"]).lower())
        if key not in known:
            raise SplitError(f"textvqa: the annotations have no question {key[1]!r} about image {key[0]}")
        said[key] = record["text"]
    values = [
        soft_accuracy(normalise_textvqa(text), [normalise_textvqa(answer) for answer in answers])
        for text, answers in zip(matched(said, known), known.values(), strict=True)
    ]
    return percent({"accuracy": values})


def gqa(answers: Mapping[str, str], truth: Any) -> Scores:
    """GQA in percent: the answer in lower case and without its last period is the right one, or not.

    Args:
        truth: the questions file: {question_id: {"answer"}}.
    """
    said = matched(answers, truth)
    right = [float(text.rstrip(".").lower() == row["answer"]) for text, row in zip(said, truth.values(), strict=True)]
    return percent({"accuracy": right})


def plain_question(prompt: str) -> str:
    """The question inside a TextVQA prompt of LLaVA's: with OCR tokens before or after it, or with none."""
    short = re.search(r"Question: (.*?) Short answer:", prompt, re.DOTALL)
    if prompt.startswith("OCR tokens: ") and short:
        return short[1].strip()
    lines = prompt.strip().split("\n")
    return lines[1 if lines[0].startswith("Reference OCR token:") and len(lines) > 1 else 0].strip()


def without_ocr(prompt: str) -> str:
    """A TextVQA prompt without its line of OCR tokens."""
    return "\n".join(line for line in prompt.split("\n") if not line.startswith("Reference OCR token:"))


def percent(values: Mapping[str, Sequence[float]]) -> Scores:
    """Means times 100."""
    return {key: 100 * sum(each) / len(each) for key, each in values.items()}
