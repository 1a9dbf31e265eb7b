"""Templated questions about a composite: what, where, how many, which colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from split_tasks.data.composites.colour import COLOURS
from split_tasks.data.composites.scene import Scene

ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
PLACES = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)
MOST = 8
DRAWS = 3


@dataclass(frozen=True)
class Question:
    """A question, its answer, and which template made it ("what", "where", "count" or "colour")."""

    text: str
    answer: str
    kind: str


def answers(classes: Sequence[str]) -> tuple[str, ...]:
    """Every answer there can be, without repetition, in a fixed order."""
    words = [*classes, *PLACES, *(str(n) for n in range(MOST + 1)), *COLOURS]
    return tuple(dict.fromkeys(words))


def ask(scene: Scene, classes: Sequence[str], u: Sequence[float]) -> Question:
    """One question that the scene answers unambiguously.

    Args:
        scene: at least one object.
        classes: their names.
        u: DRAWS uniforms: the kind of question, the object asked about, the class counted.
    """
    labels = [placed.label for placed in scene.objects]
    single = [placed for placed in scene.objects if labels.count(placed.label) == 1]
    kinds = ["what", "count"]
    if single:
        kinds.append("where")
    coloured = [placed for placed in single if placed.piece.colour]
    if coloured:
        kinds.append("colour")
    kind = kinds[int(u[0] * len(kinds))]
    if kind == "what":
        what = "What is in the picture?" if len(labels) == 1 else "What is the largest thing in the picture?"
        return Question(what, classes[labels[0]], kind)
    if kind == "count":
        # Half of the questions are about what is there: otherwise "0" would nearly always be right.
        pool = sorted(set(labels)) if u[1] < 0.5 else range(len(classes))
        label = pool[int(u[2] * len(pool))]
        return Question(f"How many things of the kind '{classes[label]}' are there?", str(labels.count(label)), kind)
    if kind == "where":
        placed = single[int(u[1] * len(single))]
        left, top, right, bottom = placed.box
        height, width = scene.segments.shape
        place = f"{_third(top + bottom, 2 * height, ROWS)} {_third(left + right, 2 * width, COLUMNS)}"
        return Question(f"Where is the {classes[placed.label]}?", place, kind)
    placed = coloured[int(u[1] * len(coloured))]
    return Question(f"Which colour is the {classes[placed.label]}?", placed.piece.colour, kind)


def _third(twice: int, total: int, names: tuple[str, ...]) -> str:
    return names[min(3 * twice // total, 2)]
