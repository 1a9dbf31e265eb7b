"""Pictures with boxes and masks on a canvas, as tv_tensors: large-scale jitter in training, a filled canvas otherwise.

Every draw comes from torch's global generator, as those of torchvision do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

from split_tasks.detection.geometry import has_area


def marked(boxes: Float[Tensor, "n 4"], size: tuple[int, int]) -> BoundingBoxes:
    """Left, top, right, bottom in a picture of (H, W) px, for torchvision's transforms."""
    return BoundingBoxes(boxes.reshape(-1, 4), format="XYXY", canvas_size=size)


@dataclass(frozen=True)
class Objects:
    """What is in a picture.

    Args:
        boxes: (n, 4).
        labels: (n,).
        masks: (n, H, W) bool pixels of each, where they are known.
    """

    boxes: BoundingBoxes
    labels: Int[Tensor, " n"]
    masks: Mask | None = None

    def moved(self, change: Callable[[Any], Any]) -> Objects:
        """The same after a transformation of the picture."""
        return replace(self, boxes=change(self.boxes), masks=None if self.masks is None else change(self.masks))

    def visible(self) -> Objects:
        """Boxes cut at the picture's border; those of which nothing is left are dropped."""
        boxes = functional.clamp_bounding_boxes(self.boxes)
        there = has_area(boxes.as_subclass(Tensor))
        return Objects(
            marked(boxes[there], boxes.canvas_size), self.labels[there],
            None if self.masks is None else Mask(self.masks[there]),
        )  # fmt: skip


def fill(image: Image, objects: Objects, size: tuple[int, int], scale: float = 1.0) -> tuple[Image, Objects]:
    """A picture of the same proportions, `scale` times as large as the largest one within `size`."""
    have = image.shape[-2:]
    factor = scale * min(want / side for want, side in zip(size, have, strict=True))
    sides = [max(1, round(side * factor)) for side in have]
    moved = objects.moved(lambda part: functional.resize(part, sides))
    return functional.resize(image, sides, antialias=True), moved


class ScaleJitter:
    """Random scale, crop and flip.

    Args:
        size: (H, W) of the canvas.
        scale: smallest and largest scale, in units of that at which a picture fills the canvas.
        flip: probability of a mirror image.
    """

    def __init__(self, size: tuple[int, int], *, scale: tuple[float, float], flip: float) -> None:
        self.size, self.scale, self.flip = size, scale, flip

    def __call__(self, image: Image, objects: Objects) -> tuple[Image, Objects]:
        """A picture of at most `size`: padding follows normalisation. Boxes of which nothing is left are dropped."""
        low, high = self.scale
        image, objects = fill(image, objects, self.size, low + (high - low) * float(torch.rand(())))
        have = image.shape[-2:]
        top, left = (int(torch.randint(max(0, n - m) + 1, ())) for n, m in zip(have, self.size, strict=True))
        height, width = (min(n, m) for n, m in zip(have, self.size, strict=True))
        mirrored = float(torch.rand(())) < self.flip

        def change(part: Any) -> Any:
            part = functional.crop(part, top, left, height, width)
            return functional.horizontal_flip(part) if mirrored else part

        return change(image), objects.moved(change).visible()


def pad(image: Float[Tensor, "c h w"], size: tuple[int, int]) -> Float[Tensor, "c H W"]:
    """Below and right up to `size`, with zeros: the mean, once normalised."""
    return F.pad(image, (0, size[1] - image.shape[-1], 0, size[0] - image.shape[-2]))
