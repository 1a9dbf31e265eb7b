"""Images read in overlapping windows (slide evaluation): where the windows lie, and their outputs as one.

A batch of b images then has n >= b rows, image after image; the target says which row shows what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Windows:
    """Where each row of a batch lies.

    Args:
        image: image of each row.
        corner: its top and left pixel in that image.
        size: height and width of each image that the windows were cut from.
    """

    image: tuple[int, ...]
    corner: tuple[tuple[int, int], ...]
    size: tuple[tuple[int, int], ...]


def corners(size: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> list[tuple[int, int]]:
    """Top-left corners of the windows over an image: a stride apart, the last ones shifted inward to end at the border.

    An image smaller than the window has one window there, which hangs over (the data pads it).
    """
    starts = []
    for full, side, step in zip(size, window, stride, strict=True):
        count = -(-max(full - side, 0) // step) + 1
        starts.append([min(k * step, max(full - side, 0)) for k in range(count)])
    return [(top, left) for top in starts[0] for left in starts[1]]


def merged(logits: Float[Tensor, "n k H W"], windows: Windows) -> Iterator[Float[Tensor, "1 k _ _"]]:
    """Logits of each image at the size that it was cut at, averaged where windows overlap; image after image."""
    high, wide = logits.shape[-2:]
    for index, (height, width) in enumerate(windows.size):
        canvas = logits.new_zeros(logits.shape[1], max(height, high), max(width, wide))
        times = logits.new_zeros(canvas.shape[1:])
        for row, (top, left) in enumerate(windows.corner):
            if windows.image[row] == index:
                canvas[:, top : top + high, left : left + wide] += logits[row]
                times[top : top + high, left : left + wide] += 1
        yield (canvas / times)[None, :, :height, :width]


def resized(logits: Float[Tensor, "n k h w"], size: tuple[int, int]) -> Float[Tensor, "n k H W"]:
    """Bilinear, by corners' pixels being areas; in float32, which CPU half precision and the loss need."""
    if tuple(logits.shape[-2:]) == size:
        return logits.float()
    return F.interpolate(logits.float(), size=size, mode="bilinear", align_corners=False)


def sums(values: Float[Tensor, " n"], windows: Windows) -> Float[Tensor, " b"]:
    """Sums of per-row numbers over the rows of each image."""
    image = torch.tensor(windows.image, device=values.device)
    return values.new_zeros(len(windows.size)).index_add(0, image, values)
