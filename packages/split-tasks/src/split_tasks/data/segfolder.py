"""Data sets `segfolder` and `ade20k`: pictures with label maps of the same names.

Evaluated images keep their proportions and are read in overlapping windows of the model's size (slide evaluation);
their labels stay at the size they have on disk, and predictions are brought to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional

from split_core.errors import SplitError
from split_core.pictures import PictureError, is_picture, read_rgb
from split_core.task import DataContext, Problem
from split_tasks.configs import SegFolderConfig
from split_tasks.data import common
from split_tasks.data.labelmaps import read_indices, to_classes
from split_tasks.data.segaugment import TrainAugmentation, keep_ratio, pad, resize
from split_tasks.windows import Windows, corners

SIZE = (512, 512)
ORDER = 0
"""Seed of the one order that images are numbered in, whatever the seed of the run."""


class SegFolder:
    """Pictures and label maps (`split_core.task.Dataset`).

    Args:
        config: where they are, what the labels mean, augmentation, windows.
        context: split, image size (None is 512), channels and normalisation.

    Items in training: {"image": (c, H, W), "target": {"segments": (H, W) uint8}}. In evaluation "image" is
    (n, c, H, W), the windows of one image, and the target has "segments" at the file's size, "crops" (n, H, W), the
    labels in each window, and "windows". `collate` puts the windows of all images into one batch.

    Raises:
        SplitError: a folder is missing or empty, a picture has no label map, or the classes are not to be found.
    """

    def __init__(self, config: SegFolderConfig, context: DataContext) -> None:
        self.split = common.check_split(context.split)
        self.config, self.context = config, context
        self.size = context.image_size or SIZE
        self.classes = class_names(config)
        self.segment_classes = self.classes
        images, masks = (config.folder(kind, self.split) for kind in ("images", "masks"))
        self.pairs, self._alone = pairs(images, masks)
        if self._alone and context.strict:
            more = f" (and {len(self._alone) - 1} more)" if len(self._alone) > 1 else ""
            raise SplitError(f"data.masks: {self._alone[0]} has no label map in {masks}{more}")
        self.short = float(config.resize or min(self.size))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, labels = self.load(common.check_index(index, len(self)))
        return self._train(image, labels) if self.split == "train" else self._windows(image, labels)

    def load(self, index: int) -> tuple[Tensor, Tensor]:
        """(3, H, W) uint8 and (H, W) uint8 class indices as the files hold them.

        Raises:
            SplitError: a file cannot be read, holds a label that is no class, or the two differ in size.
        """
        picture, mask = self.pairs[index]
        image = functional.pil_to_tensor(read_rgb(picture))
        labels = self._classes(read_indices(mask), mask)
        if labels.shape != tuple(image.shape[1:]):
            raise SplitError(of_two_sizes(picture, tuple(image.shape[1:]), mask, labels.shape))
        return image, torch.from_numpy(labels)

    def problems(self) -> Iterator[Problem]:
        """Pictures without a label map, files that cannot be read, labels that are no class, and pairs of two sizes."""
        for path in self._alone:
            yield Problem("pictures without a label map", str(path))
        for picture, mask in self.pairs:
            image = values = None
            try:
                image = read_rgb(picture)
            except PictureError as error:
                yield Problem("unreadable", str(error))
            try:
                values = read_indices(mask)
                self._classes(values, mask)
            except PictureError as error:
                yield Problem("unreadable", str(error))
            except SplitError as error:
                yield Problem("label maps that hold something else than classes", str(error))
            if image is not None and values is not None and values.shape != (image.height, image.width):
                what = of_two_sizes(picture, (image.height, image.width), mask, values.shape)
                yield Problem("pairs of two sizes", what)

    def _classes(self, values: NDArray[Any], mask: Path) -> NDArray[Any]:
        config = self.config
        return to_classes(
            values, mask, classes=len(self.classes), zero_is_ignored=config.zero_is_ignored, ignore=config.ignore
        )

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Stack training samples; string the windows of evaluated images together."""
        if self.split == "train":
            return common.collate(samples)
        targets = [sample["target"] for sample in samples]
        rows = [len(sample["image"]) for sample in samples]
        windows = Windows(
            image=tuple(index for index, count in enumerate(rows) for _ in range(count)),
            corner=tuple(corner for target in targets for corner in target["windows"].corner),
            size=tuple(target["windows"].size[0] for target in targets),
        )
        target = {
            "segments": [target["segments"] for target in targets],
            "crops": torch.cat([target["crops"] for target in targets]),
            "windows": windows,
        }
        return {"image": torch.cat([sample["image"] for sample in samples]), "target": target}

    def _train(self, image: Tensor, labels: Tensor) -> dict[str, Any]:
        config = self.config
        if config.augment:
            image, labels = TrainAugmentation(
                self.size, short=self.short, longest=config.longest * self.short, scale=config.scale,
                category_share=config.category_share,
            )(image, labels)  # fmt: skip
        else:
            image, labels = self._resized(image, labels)
            top, left = (max(0, have - want) // 2 for have, want in zip(labels.shape, self.size, strict=True))
            image, labels = (part[..., top:, left:][..., : self.size[0], : self.size[1]] for part in (image, labels))
        image, labels = self._padded(image, labels)
        return {"image": image, "target": {"segments": labels}}

    def _windows(self, image: Tensor, segments: Tensor) -> dict[str, Any]:
        image, labels = self._resized(image, segments)
        size = (int(labels.shape[0]), int(labels.shape[1]))
        high, wide = self.size
        stride = (max(1, int(high * self.config.stride)), max(1, int(wide * self.config.stride)))
        places = corners(size, self.size, stride)
        image, labels = self._padded(image, labels)
        target = {
            "segments": segments,
            "crops": torch.stack([labels[top : top + high, left : left + wide] for top, left in places]),
            "windows": Windows((0,) * len(places), tuple(places), (size,)),
        }
        return {
            "image": torch.stack([image[:, top : top + high, left : left + wide] for top, left in places]),
            "target": target,
        }

    def _padded(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return pad(common.normalise(image[None].float() / 255, self.context)[0], labels, self.size)

    def _resized(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        size = (int(labels.shape[0]), int(labels.shape[1]))
        return resize(image, labels, keep_ratio(size, short=self.short, longest=self.config.longest * self.short))


def of_two_sizes(picture: Path, size: tuple[int, ...], mask: Path, other: tuple[int, ...]) -> str:
    """A line on a picture and a label map of different (height, width)."""
    return f"{picture} is {size[1]}x{size[0]} px and its label map {mask} is {other[1]}x{other[0]}"


def pairs(images: Path, masks: Path) -> tuple[list[tuple[Path, Path]], list[Path]]:
    """Every picture below `images` with the label map of the same name below `masks`, in one fixed shuffled order, and
    the pictures that have none.

    Raises:
        SplitError: a folder is missing, or there are no pictures.
    """
    for key, folder in (("images", images), ("masks", masks)):
        if not folder.is_dir():
            raise SplitError(f"data.{key}: no folder {folder}")
    found = {path.relative_to(masks).with_suffix(""): path for path in sorted(masks.rglob("*")) if is_picture(path)}
    pictures = [path for path in sorted(images.rglob("*")) if is_picture(path)]
    if not pictures:
        raise SplitError(f"data.images: {images} holds no pictures")
    names = {path: path.relative_to(images).with_suffix("") for path in pictures}
    alone = [path for path in pictures if names[path] not in found]
    pictures = [path for path in pictures if names[path] in found]
    # Sorted names follow scenes or videos; the first hundred images must not be all of one.
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(ORDER)).tolist()
    return [(pictures[i], found[names[pictures[i]]]) for i in order], alone


def class_names(config: SegFolderConfig) -> tuple[str, ...]:
    """Names of the classes: given, from a file, or numbers.

    Raises:
        SplitError: no such file, or none or too many names.
    """
    if isinstance(config.classes, int):
        return tuple(f"class {index}" for index in range(config.classes))
    if isinstance(config.classes, str):
        path = config.root.expanduser() / config.classes
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SplitError(f"data.classes: {path} cannot be read: {error}") from None
        names = tuple(_column(lines, "Name"))
    else:
        names = config.classes
    if not 0 < len(names) <= 254:
        raise SplitError(f"data.classes: {len(names)} classes; 1 to 254 can be told apart")
    return names


def _column(lines: Sequence[str], name: str) -> list[str]:
    """The lines that are not empty; of a table with tabs whose header has `name`, that column."""
    rows = [line.split("\t") for line in lines if line.strip()]
    if rows and len(rows[0]) > 1 and name in rows[0]:
        index = rows[0].index(name)
        return [row[index].strip() for row in rows[1:] if len(row) > index]
    return ["\t".join(row).strip() for row in rows]
