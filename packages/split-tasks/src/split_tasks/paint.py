"""Label maps as colours over pictures."""

from __future__ import annotations

import colorsys
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

OPACITY = 0.6
GOLDEN = 0.61803398875
"""Turns of the colour circle between neighbouring classes: no two of the first hundreds come close."""


def colours(count: int) -> NDArray[np.uint8]:
    """(count, 3) distinct colours; class i has the same one whatever the number of classes."""
    rows = [colorsys.hsv_to_rgb(i * GOLDEN % 1, 0.55 + 0.45 * (i // 3 % 2), 1 - i % 3 * 0.17) for i in range(count)]
    return np.round(np.array(rows).reshape(-1, 3) * 255).astype(np.uint8)


def overlay(picture: Image.Image, labels: NDArray[Any], *, clear: Collection[int]) -> Image.Image:
    """The picture under the colours of its classes.

    Args:
        picture: RGB, the labelled image enlarged by a whole number.
        labels: (H, W) class indices.
        clear: labels that are not painted.
    """
    pixels = np.asarray(picture, dtype=np.float32)
    times = pixels.shape[0] // labels.shape[0]
    large = labels.repeat(times, 0).repeat(times, 1)
    painted = colours(256)[large]
    weight = np.where(np.isin(large, list(clear)), 0.0, OPACITY)[..., None]
    return Image.fromarray(np.round(pixels * (1 - weight) + painted * weight).astype(np.uint8))
