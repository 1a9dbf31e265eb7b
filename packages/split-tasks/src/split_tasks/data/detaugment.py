"""Pictures with boxes on a canvas, as tv_tensors: large-scale jitter for training, a filled canvas for evaluation.

Every draw comes from torch's global generator, as those of torchvision do.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes, Image

from split_tasks.detection.geometry import has_area


def marked(boxes: Float[Tensor, "n 4"], size: tuple[int, int]) -> BoundingBoxes:
    """Left, top, right, bottom in a picture of (H, W) px, for torchvision's transforms."""
    return BoundingBoxes(boxes.reshape(-1, 4), format="XYXY", canvas_size=size)


def fill(image: Image, boxes: BoundingBoxes, size: tuple[int, int], scale: float = 1.0) -> tuple[Image, BoundingBoxes]:
    """A picture of the same proportions, `scale` times as large as the largest one within `size`."""
    have = image.shape[-2:]
    factor = scale * min(want / side for want, side in zip(size, have, strict=True))
    sides = [max(1, round(side * factor)) for side in have]
    return functional.resize(image, sides, antialias=True), functional.resize(boxes, sides)


class ScaleJitter:
    """Random scale, crop and flip.

    Args:
        size: (H, W) of the canvas.
        scale: smallest and largest scale, in units of that at which a picture fills the canvas.
        flip: probability of a mirror image.
    """

    def __init__(self, size: tuple[int, int], *, scale: tuple[float, float], flip: float) -> None:
        self.size, self.scale, self.flip = size, scale, flip

    def __call__(
        self, image: Image, boxes: BoundingBoxes, labels: Int[Tensor, " n"]
    ) -> tuple[Image, BoundingBoxes, Int[Tensor, " _"]]:
        """A picture of at most `size`: padding follows normalisation. Boxes of which nothing is left are dropped."""
        low, high = self.scale
        image, boxes = fill(image, boxes, self.size, low + (high - low) * float(torch.rand(())))
        have = image.shape[-2:]
        top, left = (int(torch.randint(max(0, n - m) + 1, ())) for n, m in zip(have, self.size, strict=True))
        height, width = (min(n, m) for n, m in zip(have, self.size, strict=True))
        parts = [functional.crop(part, top, left, height, width) for part in (image, boxes)]
        if float(torch.rand(())) < self.flip:
            parts = [functional.horizontal_flip(part) for part in parts]
        image, boxes = parts[0], functional.clamp_bounding_boxes(parts[1])
        there = has_area(boxes.as_subclass(Tensor))
        return image, marked(boxes[there], (height, width)), labels[there]


def pad(image: Float[Tensor, "c h w"], size: tuple[int, int]) -> Float[Tensor, "c H W"]:
    """Below and right up to `size`, with zeros: the mean, once normalised."""
    return F.pad(image, (0, size[1] - image.shape[-1], 0, size[0] - image.shape[-2]))
