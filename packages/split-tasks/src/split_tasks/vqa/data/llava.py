"""Data set `llava`: conversations about pictures in the json that LLaVA is trained on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from split_core.errors import SplitError
from split_core.pictures import PictureError, read_rgb
from split_core.task import DataContext, Problem
from split_tasks.data import common
from split_tasks.data.seeded import uniforms
from split_tasks.vqa.configs import LlavaDataConfig
from split_tasks.vqa.data.pictures import as_input
from split_tasks.vqa.prompts import IMAGE, Turn

SIZE = (336, 336)
VIDEO_OR_MANY = "several pictures in one conversation are for the model class (AdaptiveLlava), not for training yet"


class LlavaConversations:
    """Records with a picture (`split_core.task.Dataset`); those of text alone teach nothing about patches: left out.

    Args:
        config: files, and the share that is used.
        context: split, seed (decides the share), image size (None is 336) and normalisation.

    Items: {"image": (c, H, W), "target": {"id": str, "turns": tuple of (question, answer)}}. val and test are the same
    held-out records: LLaVA's benchmarks have files of their own (`split_tasks.vqa.answer`).

    Raises:
        SplitError: a file or folder is missing, or a record is not as LLaVA's; it is named.
    """

    classes: tuple[str, ...] = ()

    def __init__(self, config: LlavaDataConfig, context: DataContext) -> None:
        self.split = common.check_split(context.split)
        self.context, self.size, self.root = context, context.image_size or SIZE, config.root.expanduser()
        if not self.root.is_dir():
            raise SplitError(f"data.root: no folder {self.root}")
        records = [record for record in read_records(config.annotations.expanduser()) if record.get("image")]
        if not records:
            raise SplitError(f"data.annotations: {config.annotations} has no record with a picture")
        order = uniforms(seed=context.seed, stream="llava/subset", items=range(len(records)), draws=1)[:, 0].argsort()
        used = order[: max(2, round(config.subset * len(records)))]
        held = min(len(used) - 1, max(1, round(config.val * len(used))))
        chosen: np.ndarray = used[held:] if self.split == "train" else used[:held]
        self.records = [records[i] for i in sorted(chosen.tolist())]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[common.check_index(index, len(self))]
        picture = read_rgb(self.root / picture_path(record))
        target = {"id": str(record.get("id", record["image"])), "turns": turns_of(record)}
        return {"image": as_input(picture, self.context, self.size), "target": target}

    def problems(self) -> Iterator[Problem]:
        """Pictures that are missing or cannot be read, records that are not as LLaVA's, and ids that occur again."""
        names: dict[str, None] = {}
        for record in self.records:
            try:
                names.setdefault(picture_path(record))
                turns_of(record)
            except SplitError as error:
                yield Problem("records that are not as LLaVA's", str(error))
        for name in names:
            try:
                if (self.root / name).is_file():
                    read_rgb(self.root / name)
                else:
                    yield Problem("missing pictures", name)
            except PictureError as error:
                yield Problem("unreadable", str(error))
        for name, times in Counter(str(record["id"]) for record in self.records if "id" in record).items():
            if times > 1:  # LLaVA's own files have several conversations about one picture under its id
                yield Problem("ids of several records", f"{name} ({times} times)", fault=False)

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples into a batch."""
        return common.collate(samples)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The list in the file.

    Raises:
        SplitError: no such file, or no list of records.
    """
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SplitError(f"data.annotations: no file {path}") from None
    except (OSError, ValueError) as error:
        raise SplitError(f"data.annotations: {path} is no json file: {error}") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise SplitError(f"data.annotations: {path} should hold a list of records, as LLaVA's do")
    return records


def picture_path(record: Mapping[str, Any]) -> str:
    """The record's only picture."""
    image = record["image"]
    if isinstance(image, str):
        return image
    if isinstance(image, list) and len(image) == 1 and isinstance(image[0], str):
        return image[0]
    raise SplitError(f"record {record.get('id')}: image={image!r}; {VIDEO_OR_MANY}")


def turns_of(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """(question, answer) pairs of a record.

    Raises:
        SplitError: turns that do not alternate between human and gpt, or more than one placeholder.
    """
    name, said = f"record {record.get('id')}", record.get("conversations")
    try:
        speakers = [turn["from"] for turn in said]  # type: ignore[union-attr]
        texts = [str(turn["value"]) for turn in said]  # type: ignore[union-attr]
    except (TypeError, KeyError):
        raise SplitError(f"{name}: conversations should be a list of {{from, value}}") from None
    if not speakers or speakers != ["human", "gpt"] * (len(speakers) // 2):
        order = ", ".join(map(str, speakers)) or "nowhere"
        raise SplitError(f"{name}: its turns should go human, gpt, human, gpt ..., and go {order}")
    found = sum(text.count(IMAGE) for text in texts)
    if found > 1:
        raise SplitError(f"{name}: {found} {IMAGE} placeholders for one picture")
    return tuple(zip((text.strip() for text in texts[::2]), (text.strip() for text in texts[1::2]), strict=True))
