"""Data set `easy_vqa`: questions about one coloured shape on a plain ground, from the PyPI package easy-vqa (MIT)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from split_core.errors import SplitError
from split_core.pictures import read_rgb
from split_core.task import DataContext
from split_tasks.data import common
from split_tasks.data.digits_source import package_file
from split_tasks.data.seeded import uniforms
from split_tasks.vqa.configs import EasyVQAConfig
from split_tasks.vqa.data.pictures import as_input

SIZE = (112, 112)
SHAPES = frozenset({"circle", "rectangle", "triangle"})


@dataclass(frozen=True)
class Item:
    """A question: text, answer, number of its picture in the package's split."""

    question: str
    answer: str
    picture: int

    @property
    def kind(self) -> str:
        """shape, colour or yesno: by its answer."""
        if self.answer in ("yes", "no"):
            return "yesno"
        return "shape" if self.answer in SHAPES else "colour"


class EasyVQA:
    """The package's questions (`split_core.task.Dataset`); those of its test pictures are the test split.

    Args:
        config: pictures kept for val, kinds of question.
        context: split, seed (decides the pictures of val), image size (None is 112) and normalisation.

    Items: {"image": (c, H, W), "target": {"question", "answer", "kind": str}}.

    Raises:
        SplitError: the package is not installed.
    """

    def __init__(self, config: EasyVQAConfig, context: DataContext) -> None:
        self.split = common.check_split(context.split)
        self.context, self.size = context, context.image_size or SIZE
        self.source = "test" if self.split == "test" else "train"
        self.root = package_file(
            "easy_vqa", "easy-vqa", "data", "answers.txt", what="data=easy_vqa", how="split-tasks[vqa]"
        ).parent
        self.classes = tuple((self.root / "answers.txt").read_text().split())
        asked = _questions(self.root / self.source / "questions.json")
        if self.split != "test":
            count = 1 + max(item.picture for item in asked)
            # pictures, not questions: several ask about the same one
            order = uniforms(seed=context.seed, stream="easy_vqa/val", items=range(count), draws=1)[:, 0].argsort()
            kept = set(order[: config.val].tolist())
            asked = tuple(item for item in asked if (item.picture in kept) == (self.split == "val"))
        self.items = tuple(item for item in asked if item.kind in config.kinds)
        if not self.items:
            raise SplitError("data.kinds: no question is left")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.items[common.check_index(index, len(self))]
        picture = read_rgb(self.root / self.source / "images" / f"{item.picture}.png")
        target = {"question": item.question, "answer": item.answer, "kind": item.kind}
        return {"image": as_input(picture, self.context, self.size), "target": target}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples into a batch."""
        return common.collate(samples)


@cache
def _questions(path: Path) -> tuple[Item, ...]:
    return tuple(Item(*row) for row in json.loads(path.read_text(encoding="utf-8")))
