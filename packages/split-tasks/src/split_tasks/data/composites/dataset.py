"""Data set `composites`: photographic cut-outs on photographs, with exact labels for every task."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from split_core.errors import SplitError
from split_core.pictures import is_picture
from split_core.task import DataContext
from split_tasks.configs import CompositesConfig
from split_tasks.data import common
from split_tasks.data.cache import cache_dir, progress
from split_tasks.data.composites import fetch, questions
from split_tasks.data.composites.library import Library, Original, Piece, build_library
from split_tasks.data.composites.scene import Scene, compose, draws
from split_tasks.data.seeded import uniforms

SIZE = (224, 224)


class Composites:
    """Composites (`split_core.task.Dataset`), generated: item i is a pure function of (seed, split, i).

    Args:
        config: what is pasted how.
        context: split, seed, image size (None is 224), channels and normalisation.
        library: the material.

    Items: {"image": (c, H, W), "target": {"label": class of the main object, "labels": (n,), "boxes": (n, 4) float
    (left, top, right, bottom) in px, "segments": (H, W) uint8 (0 background, 1 + class), "mask": (H, W) bool,
    "question", "answer", "kind": str, "answer_index": int}}; the last four with config.questions; with config.masks
    "masks": (n, H, W) bool, the visible pixels of each object.

    Attributes:
        classes: names in index order.
        segment_classes: names of the values of "segments".
        box_classes: names of the values of "labels".
        answers: every possible answer; answer_index points into it.
        has_masks: objects come with their own pixels.
    """

    def __init__(self, config: CompositesConfig, context: DataContext, library: Library) -> None:
        self.split = common.check_split(context.split)
        self.config, self.context, self.library = config, context, library
        self.size = context.image_size or SIZE
        self.classes: tuple[str, ...] = library.classes
        if len(self.classes) > 254:
            raise SplitError(f"composites: {len(self.classes)} classes are more than a mask can tell apart (254)")
        self.segment_classes = ("background", *self.classes)
        self.box_classes = self.classes
        self.has_masks = config.masks
        self.answers = questions.answers(self.classes)
        divide = {"cutouts": config.share != "cutouts", "photographs": config.share != "backgrounds"}
        self.groups: list[list[Piece]] = [
            share_of([p for p in library.cutouts if p.group == name], self.split, divide["cutouts"], f"class '{name}'")
            for name in self.classes
        ]
        self.photographs = share_of(library.photographs, self.split, divide["photographs"], "the backgrounds")

    def __len__(self) -> int:
        return self.config.images(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        scene, asked = self.scene(index)
        pixels = torch.from_numpy(scene.pixels).permute(2, 0, 1)[None].float() / 255
        target: dict[str, Any] = {
            "label": scene.objects[0].label,
            "labels": torch.tensor([placed.label for placed in scene.objects]),
            "boxes": torch.tensor([placed.box for placed in scene.objects], dtype=torch.float32),
            "segments": torch.from_numpy(scene.segments),
            "mask": torch.from_numpy(scene.segments > 0),
        }
        if self.has_masks:
            number = torch.arange(1, len(scene.objects) + 1, dtype=torch.uint8)
            target["masks"] = torch.from_numpy(scene.owner) == number[:, None, None]
        if asked is not None:
            target |= {"question": asked.text, "answer": asked.answer, "kind": asked.kind}
            target["answer_index"] = self.answers.index(asked.answer)
        return {"image": common.normalise(pixels, self.context)[0].contiguous(), "target": target}

    def scene(self, index: int) -> tuple[Scene, questions.Question | None]:
        """Item `index` before it becomes tensors, and its question."""
        item = common.check_index(index, len(self))
        n = draws(self.config)
        u = uniforms(
            seed=self.context.seed, stream=f"composites/{self.split}", items=[item], draws=n + questions.DRAWS
        )[0]
        scene = compose(
            self.library, self.groups, self.photographs, size=self.size, config=self.config, u=u[questions.DRAWS :]
        )
        asked = questions.ask(scene, self.classes, u[: questions.DRAWS].tolist()) if self.config.questions else None
        return scene, asked

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples into a batch."""
        return common.collate(samples)


def share_of(pieces: Sequence[Piece], split: str, divide: bool, what: str) -> list[Piece]:
    """The pieces that `split` may use: all, or its part of a fixed division (about 60, 15 and 25 in a hundred).

    Raises:
        ValueError: too few to divide.
    """
    # By content: adding or renaming files elsewhere does not move a picture from train to test.
    ordered = sorted(pieces, key=lambda piece: (piece.sha256, piece.name))
    if not divide:
        return ordered
    test, val = max(1, round(len(ordered) * 0.25)), max(1, round(len(ordered) * 0.15))
    if len(ordered) < test + val + 1:
        raise SplitError(
            f"composites: {what} has {len(ordered)} pictures, which cannot be divided among train, val and test: "
            f"add some, or set data.share"
        )
    bounds = {"test": (0, test), "val": (test, test + val), "train": (test + val, len(ordered))}
    first, last = bounds[split]
    return ordered[first:last]


def build(config: CompositesConfig, context: DataContext) -> Composites:
    """The data set over the fetched library or, where they are named, over the user's own folders.

    Raises:
        ValueError: the library was not fetched yet (the message names the command), or a folder does not fit.
    """
    return Composites(config, context, open_library(config.cutouts, config.backgrounds))


def open_library(cutouts: Path | None, backgrounds: Path | None) -> Library:
    """The library of `build`; a user's folders are built into the cache once, and again when they change."""
    fetched = fetch.default_library()
    if (cutouts is None or backgrounds is None) and not fetched.is_dir():
        raise SplitError(f"data=composites: its pictures are not in {fetched.parent}; get them with: {fetch.COMMAND}")
    return Library(
        fetched if cutouts is None else own_library(user_cutouts(cutouts.expanduser())),
        fetched if backgrounds is None else own_library(user_photographs(backgrounds.expanduser())),
    )


def user_cutouts(root: Path) -> list[Original]:
    """The pictures in root/<class>/.

    Raises:
        ValueError: no such folder, or it holds none.
    """
    found = [
        Original("cutout", path.stem, path.parent.name, str(root), path)
        for path in sorted(root.glob("*/*"))
        if is_picture(path) and not path.parent.name.startswith(".")
    ]
    return _some(found, root, "data.cutouts", "<class>/*.png with transparency")


def user_photographs(root: Path) -> list[Original]:
    """The pictures anywhere below root.

    Raises:
        ValueError: no such folder, or it holds none.
    """
    paths = (path for path in sorted(root.rglob("*")) if is_picture(path) and path.is_file())
    found = [Original("photograph", path.stem, "", str(root), path) for path in paths]
    return _some(found, root, "data.backgrounds", "pictures")


def _some(found: list[Original], root: Path, setting: str, what: str) -> list[Original]:
    if not root.is_dir():
        raise SplitError(f"{setting}: no folder {root}")
    if not found:
        raise SplitError(f"{setting}: {root} holds no {what}")
    return found


def own_library(originals: list[Original]) -> Path:
    """The built folder of a user's pictures, named by where they are, their sizes and times of change."""
    listing = hashlib.sha256()
    for original in originals:
        state = original.path.stat()
        listing.update(f"{original.path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    folder = cache_dir() / f"composites-own-{listing.hexdigest()[:16]}"
    if not folder.is_dir():
        build_library(folder, progress(originals, len(originals), f"Reading {originals[0].source}"))
    return folder
