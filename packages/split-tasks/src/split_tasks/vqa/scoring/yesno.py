"""Benchmarks of yes-or-no questions: POPE, MME."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from split_core.errors import SplitError
from split_tasks.vqa.scoring.files import Record, matched
from split_tasks.vqa.scoring.words import Scores

PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
)  # fmt: skip
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


def says_yes(said: str) -> bool:
    """POPE's reading: no if the first sentence has the word no or not, else yes."""
    words = said.split(".")[0].replace(",", "").split(" ")
    return not {"No", "not", "no"} & set(words)


def pope(answers: Mapping[str, str], questions: Sequence[Record], labels: Mapping[str, Sequence[str]]) -> Scores:
    """Accuracy, F1, precision, recall and rate of yes, in percent: by category and their means.

    Args:
        questions: LLaVA's question file: {"question_id", "category"}, in order.
        labels: category -> "yes" or "no" in the order of the category's questions.
    """
    scores: Scores = {}
    for category, truth in labels.items():
        asked = [str(row["question_id"]) for row in questions if row.get("category") == category]
        if len(asked) != len(truth):
            raise SplitError(f"pope: {category} has {len(asked)} questions and {len(truth)} labels")
        said = [says_yes(text) for text in matched(answers, asked)]
        scores |= {f"{key}_{category}": value for key, value in yes_no(said, [t == "yes" for t in truth]).items()}
    for key in ("accuracy", "f1", "precision", "recall", "yes"):
        scores[key] = sum(scores[f"{key}_{category}"] for category in labels) / len(labels)
    return scores


def yes_no(said: Sequence[bool], truth: Sequence[bool]) -> Scores:
    """Accuracy, F1, precision, recall and rate of yes, in percent; 0 where a ratio has nothing below its line."""
    pairs = list(zip(said, truth, strict=True))
    hits, yes, wanted = sum(s and t for s, t in pairs), sum(said), sum(truth)
    precision, recall = (hits / count if count else 0.0 for count in (yes, wanted))
    total = precision + recall
    return {
        "accuracy": 100 * sum(s == t for s, t in pairs) / len(pairs),
        "f1": 100 * 2 * precision * recall / total if total else 0.0,
        "precision": 100 * precision, "recall": 100 * recall, "yes": 100 * yes / len(pairs),
    }  # fmt: skip


def mme(records: Sequence[Record], truth: Mapping[tuple[str, str], str]) -> Scores:
    """MME: for each subtask accuracy plus accuracy of whole pictures (both questions right), 200 at most.

    Perception and cognition are the sums over their subtasks, where all of those were asked.

    Args:
        records: lines of the answers file; question_id is SUBTASK/PICTURE, which two questions share.
        truth: (question_id, question) -> "Yes" or "No".
    """
    said: dict[tuple[str, str], str] = {}
    for record in records:
        key = (str(record["question_id"]), mme_question(record["prompt"]))
        if key not in truth:
            raise SplitError(f"mme: there is no question {key[1]!r} about {key[0]}")
        said[key] = record["text"]
    right: dict[str, dict[str, list[bool]]] = {}
    for (picture, _), text, wanted in zip(truth, matched(said, truth), truth.values(), strict=True):
        subtask = picture.partition("/")[0]
        right.setdefault(subtask, {}).setdefault(picture, []).append(mme_reading(text) == wanted.lower())
    scores: Scores = {}
    for subtask, pictures in right.items():
        questions = [value for values in pictures.values() for value in values]
        whole = [all(values) for values in pictures.values()]
        scores[subtask] = 100 * sum(questions) / len(questions) + 100 * sum(whole) / len(whole)
    for name, subtasks in (("perception", PERCEPTION), ("cognition", COGNITION)):
        if all(subtask in scores for subtask in subtasks):
            scores[name] = sum(scores[subtask] for subtask in subtasks)
    return scores


def mme_reading(said: str) -> str | None:
    """MME's reading: yes or no if the answer is, or has it among its first four letters."""
    low = said.lower()
    return next((word for word in ("yes", "no") if low == word), None) or next(
        (word for word in ("yes", "no") if word in low[:4]), None
    )


def mme_question(prompt: str) -> str:
    """The question as MME's files have it: LLaVA's instruction is a line of its own below."""
    return prompt.split("\n")[0].strip()
