"""Data set `imagefolder`: a user's own images in ImageNet's layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from split_core.errors import SplitError, first_line
from split_core.pictures import PictureError, is_picture, read_picture
from split_core.task import DataContext, Problem
from split_tasks.configs import ImageFolderConfig
from split_tasks.data import common
from split_tasks.data.index import in_one_line, index_problems, read_index, sound

logger = logging.getLogger(__name__)
SIZE = (224, 224)
ORDER = 0
"""Seed of the one order that images are numbered in, whatever the seed of the run."""
MODES = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}


class ImageFolder:
    """Images in root/{train,val,test}/<class>/* (`split_core.task.Dataset`).

    Args:
        config: root and transforms. Evaluation: the shorter side is resized so that the central crop keeps
            crop_pct of it. Training uses the same (the paper trains without augmentation, App. A) unless
            random_resized_crop or flip are set.
        context: split, image size (None is 224), channels and normalisation; random crops follow its seed.

    Items: {"image": (c, H, W), "target": {"label": int}}.

    Raises:
        ValueError: a folder is missing or empty, or the classes of val are not those of train.
    """

    def __init__(self, config: ImageFolderConfig, context: DataContext) -> None:
        self.split = common.check_split(context.split)
        self.config, self.context = config, context
        self.root = config.root.expanduser()
        index = index_file(self.root, self.split)
        self._wrong_rows: list[Problem] = []
        found, self.classes = self._folders() if index is None else self._listed(index)
        # On disk the classes follow one another; the first thousand images must not be all of one.
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(ORDER)).tolist()
        self.samples = [found[i] for i in order]
        self._told_of_frames = False
        height, width = context.image_size or SIZE
        self.transform = evaluation_transform((height, width), config)

    def _folders(self) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
        """Paths with labels, and the classes, from root/split/<class>/*."""
        folder = split_folder(self.root, self.split)
        try:
            files = datasets.ImageFolder(str(folder), is_valid_file=lambda path: is_picture(Path(path)))
        except FileNotFoundError as error:
            raise SplitError(f"data.root: {first_line(error)}") from None
        classes = tuple(files.classes)
        if self.split != "train" and (self.root / "train").is_dir():
            check_classes(classes, tuple(datasets.folder.find_classes(str(self.root / "train"))[0]), folder)
        return files.samples, classes

    def _listed(self, index: Path) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
        """The same from root/split.csv; all that is wrong with it is said in one go."""
        rows = read_index(index)
        train = index_file(self.root, "train")
        classes = tuple(sorted({label for _, label in (read_index(train) if train else rows)}))
        self._wrong_rows = list(index_problems(rows, self.root, classes))
        if self._wrong_rows and self.context.strict:
            raise SplitError(f"{index}: {in_one_line(self._wrong_rows)}")
        rows = sound(rows, self.root, classes)
        number = {label: i for i, label in enumerate(classes)}
        return [(str(self.root / name), number[label]) for name, label in rows], classes

    def problems(self) -> Iterator[Problem]:
        """Rows of the table that are wrong, pictures that cannot be read or are not what they seem; reads them all."""
        yield from self._wrong_rows
        for path, _ in self.samples:
            try:
                picture = read_picture(path, max_pixels=self.config.max_pixels)
            except PictureError as error:
                yield Problem("unreadable", str(error))
            else:
                if picture.frames > 1:
                    yield Problem("animated, of which the first frame is taken", path, fault=False)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.samples[common.check_index(index, len(self))]
        picture = read_picture(path, max_pixels=self.config.max_pixels)
        if picture.frames > 1 and not self._told_of_frames:
            self._told_of_frames = True
            logger.warning("%s is animated: its first frame is taken, and so it is with others (said once)", path)
        image = picture.image
        transform = self._augmentation(index) if self.split == "train" and self._augments else self.transform
        pixels: Tensor = v2.functional.pil_to_tensor(transform(image)).float() / 255
        return {"image": common.normalise(pixels[None], self.context)[0], "target": {"label": label}}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples into a batch."""
        return common.collate(samples)

    @property
    def _augments(self) -> bool:
        return self.config.random_resized_crop is not None or self.config.flip > 0

    def _augmentation(self, index: int) -> Callable[[Image.Image], Image.Image]:
        """The training transform of item `index`; drawn anew at each access from torch's global generator.

        Augmentation is the one thing here that is not a function of the index: a fixed crop would be none.
        """
        size = self.context.image_size or SIZE
        mode = MODES[self.config.interpolation]
        steps: list[Any] = []
        if self.config.random_resized_crop is not None:
            steps.append(v2.RandomResizedCrop(size, scale=(self.config.random_resized_crop, 1.0), interpolation=mode))
        else:
            steps.append(self.transform)
        if self.config.flip:
            steps.append(v2.RandomHorizontalFlip(self.config.flip))
        return v2.Compose(steps)


def evaluation_transform(size: tuple[int, int], config: ImageFolderConfig) -> Callable[[Image.Image], Image.Image]:
    """Resize and centre crop. Sides are rounded as timm does, so that published numbers can be compared."""
    height, width = size
    mode = MODES[config.interpolation]
    if height == width:
        resize: Any = v2.Resize(int(height / config.crop_pct), interpolation=mode)
    else:
        resize = _CoverResize((int(height / config.crop_pct), int(width / config.crop_pct)), mode)
    return v2.Compose([resize, v2.CenterCrop(size)])


class _CoverResize:
    """Resize so that the image just covers `size`, keeping its proportions."""

    def __init__(self, size: tuple[int, int], mode: v2.InterpolationMode) -> None:
        self.size, self.mode = size, mode

    def __call__(self, image: Image.Image) -> Image.Image:
        scale = max(self.size[0] / image.height, self.size[1] / image.width)
        sides = [
            max(want, round(have * scale)) for want, have in zip(self.size, (image.height, image.width), strict=True)
        ]
        resized: Image.Image = v2.functional.resize(image, sides, interpolation=self.mode)
        return resized


def index_file(root: Path, split: str) -> Path | None:
    """root/split.csv; for test, root/val.csv where nothing is called test; None where splits are folders."""
    path = root / f"{split}.csv"
    if split == "test" and not path.is_file() and not (root / "test").is_dir():
        path = root / "val.csv"
    return path if path.is_file() else None


def split_folder(root: Path, split: str) -> Path:
    """root/split; for test, root/val where there is no root/test (ImageNet publishes no test labels).

    Raises:
        ValueError: it does not exist; the message says what there is.
    """
    if not root.is_dir():
        raise SplitError(f"data.root: no folder {root}")
    folder = root / split
    if split == "test" and not folder.is_dir():
        folder = root / "val"
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in root.iterdir() if path.is_dir())[:8]) or "no folders"
        raise SplitError(f"data.root: {root} has no {folder.name}/ (it has: {there})")
    return folder


def check_classes(own: tuple[str, ...], train: tuple[str, ...], folder: Path) -> None:
    """Labels are positions in the sorted class folders: they mean the same only when the folders are the same.

    Raises:
        ValueError: they differ; the first few are named.
    """
    if own != train:
        different = sorted(set(own) ^ set(train))
        raise SplitError(f"data.root: the classes of {folder} are not those of train: {', '.join(different[:5])}")
