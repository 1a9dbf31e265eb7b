"""Data set `coco`: pictures with boxes and masks, annotated in COCO's json."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import Image, Mask

from split_core.errors import SplitError
from split_core.pictures import PictureError, read_rgb
from split_core.task import DataContext, Problem
from split_tasks.data import common
from split_tasks.data.cocojson import read_index
from split_tasks.data.detaugment import Objects, ScaleJitter, fill, marked, pad
from split_tasks.detection import rle
from split_tasks.detection.average_precision import Annotations
from split_tasks.detection.configs import CocoConfig

logger = logging.getLogger(__name__)
SIZE = (1024, 1024)
ORDER = 0
"""Seed of the one order that images are numbered in, whatever the seed of the run."""


class Coco:
    """Pictures and their boxes (`split_core.task.Dataset`).

    Args:
        config: where they are, augmentation.
        context: split, image size (None is 1024), channels and normalisation.

    Items: {"image": (c, h, w) of at most the image size, "target": {"boxes": (n, 4) left, top, right, bottom in its px,
    "labels": (n,), with config.masks "masks": (n, h, w) bool, and in evaluation "annotations": `Annotations`}}.
    `collate` pads the pictures to one canvas and says how far each reaches. Crowds and boxes without area are not to be
    found; in evaluation the annotations still hold them.

    Attributes:
        classes, box_classes: names in the order of their identities.
        category_ids: those identities.
        has_masks: objects come with their own pixels.
        dropped: boxes without area.

    Raises:
        SplitError: a folder or file is missing or wrong, or the classes are not those of the training split.
    """

    shared_canvas: ClassVar[bool] = True

    def __init__(self, config: CocoConfig, context: DataContext) -> None:
        self.split = common.check_split(context.split)
        self.config, self.context = config, context
        self.size = context.image_size or SIZE
        self.folder = config.place("images", self.split)
        if not self.folder.is_dir():
            raise SplitError(f"data.images: no folder {self.folder}")
        path = config.place("annotations", self.split)
        self.has_masks = config.masks
        self.index = read_index(path, masks=config.masks)
        self.classes = self.box_classes = self.index.names
        self.category_ids = self.index.category_ids
        train = config.place("annotations", "train")
        if self.split != "train" and read_index(train).category_ids != self.category_ids:
            raise SplitError(f"data.annotations: the categories of {path} are not those of {train}")
        owner = np.repeat(np.arange(len(self.index.files)), np.diff(self.index.starts))
        corners = _corners(self.index.boxes).astype(np.float32)  # as they will be used
        area = np.minimum(corners[:, 2:], self.index.sizes[owner, ::-1]) > np.maximum(corners[:, :2], 0)
        self._flat = ~area.all(1)
        self._found = ~self._flat & ~self.index.crowd
        self.dropped = int(self._flat.sum())
        if self.dropped:
            logger.warning("%s: %d boxes have no area inside their image and are left out", path, self.dropped)
        # Neighbours in a file are often of one scene; the first hundred images must not be.
        self.order = torch.randperm(len(self.index.files), generator=torch.Generator().manual_seed(ORDER)).tolist()
        self.jitter = ScaleJitter(self.size, scale=config.scale, flip=config.flip)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.order[common.check_index(index, len(self))]
        image = self.picture(number)
        own = self.index.of(number)
        there = self._found[own]
        height, width = image.shape[-2:]
        boxes = marked(torch.from_numpy(_corners(self.index.boxes[own][there])).float(), (height, width))
        labels = torch.from_numpy(np.searchsorted(self.category_ids, self.index.categories[own][there]))
        masks = None
        if self.index.masks is not None:
            codes = [code for code, here in zip(self.index.masks[own], there, strict=True) if here]
            masks = Mask(rle.decode(codes, (height, width)))
        objects = Objects(functional.clamp_bounding_boxes(boxes), labels, masks)
        target: dict[str, Any] = {}
        if self.split == "train" and self.config.augment:
            image, objects = self.jitter(image, objects)
        else:
            image, objects = fill(image, objects, self.size)
            objects = objects.visible()  # at this size, in float32
            if self.split != "train":
                scale = (image.shape[1] / height, image.shape[2] / width)
                target["annotations"] = self._annotations(number, scale)
        pixels = common.normalise(image.as_subclass(Tensor)[None].float() / 255, self.context)[0]
        target |= {"boxes": objects.boxes.as_subclass(Tensor), "labels": objects.labels}
        if objects.masks is not None:
            target["masks"] = objects.masks.as_subclass(Tensor)
        return {"image": pixels, "target": target}

    def picture(self, number: int) -> Image:
        """(3, H, W) uint8 of an image, the right way up.

        Raises:
            PictureError: the file cannot be read, or has another size than its annotations are for.
        """
        path = self.folder / self.index.files[number]
        picture = read_rgb(path, max_pixels=self.config.max_pixels)
        height, width = self.index.sizes[number].tolist()
        if picture.size != (width, height):
            raise PictureError(
                f"{path} is {picture.width}x{picture.height} px, the right way up, and its annotations are for "
                f"{width}x{height}"
            )
        return Image(functional.pil_to_tensor(picture))

    def problems(self) -> Iterator[Problem]:
        """Boxes that are left out, and pictures that cannot be read or are of another size; reads all pictures."""
        for row in np.flatnonzero(self._flat):
            name = self.index.files[int(np.searchsorted(self.index.starts, row, side="right")) - 1]
            box = self.index.boxes[row].tolist()
            yield Problem("boxes without area in their image", f"{name}: {box}", fault=False)
        for number in range(len(self)):
            try:
                self.picture(number)
            except PictureError as error:
                yield Problem("unreadable", str(error))

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Pad the pictures of a batch to the canvas."""
        sizes = torch.tensor([sample["image"].shape[-2:] for sample in samples])
        batch = {
            "image": torch.stack([pad(sample["image"], self.size) for sample in samples]),
            "target": {key: [sample["target"][key] for sample in samples] for key in samples[0]["target"]},
        }
        filled = bool((sizes == sizes.new_tensor(self.size)).all())
        return batch if filled else {**batch, "size": sizes}

    def _annotations(self, number: int, scale: tuple[float, float]) -> Annotations:
        index, own = self.index, self.index.of(number)
        return Annotations(
            int(index.image_ids[number]), (int(index.sizes[number, 0]), int(index.sizes[number, 1])), index.boxes[own],
            index.categories[own], index.areas[own], index.crowd[own], scale,
            None if index.masks is None else index.masks[own],
        )  # fmt: skip


def _corners(boxes: Any) -> Any:
    """Left, top, width, height to left, top, right, bottom."""
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
