"""Training augmentation of ADE20K's protocol on tv_tensors: scale, crop, flip, colours; and the evaluation resize.

Every draw comes from torch's global generator, as those of torchvision do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.transforms import v2

from split_tasks.objects import IGNORE

TRIES = 10
"""Crops drawn while one class covers too much of them."""


def keep_ratio(size: tuple[int, int], *, short: float, longest: float) -> tuple[int, int]:
    """The largest size of the same proportions with shorter side <= short and longer side <= longest."""
    factor = min(longest / max(size), short / min(size))
    height, width = (max(1, int(side * factor + 0.5)) for side in size)
    return height, width


def resize(image: Tensor, labels: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Image bilinear and antialiased, label map by nearest pixel (tv_tensors know which is which)."""
    image, labels = v2.Resize(list(size), antialias=True)(tv_tensors.Image(image), tv_tensors.Mask(labels))
    return image.as_subclass(Tensor), labels.as_subclass(Tensor)


class TrainAugmentation:
    """Random scale, crop, flip and colours.

    Args:
        size: (H, W) of the result.
        short: shorter side at scale 1.
        longest: longer side at scale 1.
        scale: smallest and largest scale.
        category_share: see `data.category_share`.
    """

    def __init__(
        self, size: tuple[int, int], *, short: float, longest: float, scale: tuple[float, float], category_share: float
    ) -> None:  # fmt: skip
        self.size, self.short, self.longest, self.scale = size, short, longest, scale
        self.category_share = category_share
        self.after = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomPhotometricDistort()])

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(c, H, W) uint8 and (H, W) uint8 to the same of at most `size`: a small image is not padded here, because
        padding follows normalisation."""
        low, high = self.scale
        scale = low + (high - low) * float(torch.rand(()))
        size = (int(image.shape[1]), int(image.shape[2]))
        image, labels = resize(image, labels, keep_ratio(size, short=self.short * scale, longest=self.longest * scale))
        image, labels = self._crop(image, labels)
        image, labels = self.after(tv_tensors.Image(image), tv_tensors.Mask(labels))
        return image.as_subclass(Tensor), labels.as_subclass(Tensor)

    def _crop(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        rows, cols = (max(0, have - want) for have, want in zip(labels.shape, self.size, strict=True))
        for _ in range(TRIES):
            top, left = (int(torch.randint(spare + 1, ())) for spare in (rows, cols))
            window = labels[top : top + self.size[0], left : left + self.size[1]]
            counts = window[window != IGNORE].long().bincount()
            # as the protocol has it: a crop of a single class, or of none, is drawn again too
            if len(counts.nonzero()) > 1 and counts.max() / counts.sum() < self.category_share:
                break
        return image[:, top : top + self.size[0], left : left + self.size[1]], window


def pad(image: Tensor, labels: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Below and right up to `size`: zeros (the mean, once normalised) and IGNORE."""
    padding = (0, max(0, size[1] - labels.shape[-1]), 0, max(0, size[0] - labels.shape[-2]))
    return F.pad(image, padding), F.pad(labels, padding, value=IGNORE)
