"""Label maps as colours over pictures, and boxes on them."""

from __future__ import annotations

import colorsys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

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


def shaded(picture: Image.Image, masks: NDArray[Any], labels: Sequence[int], *, size: tuple[int, int]) -> Image.Image:
    """The picture with objects in the colours of their classes, worst first so that the best lie on top.

    Args:
        picture: RGB, enlarged by a whole number.
        masks: (n, h, w) pixels of each object before that, best first, from the top left of the picture.
        labels: of each, and perhaps of more.
        size: (H, W) of the picture before that; masks may end earlier, where it is padded.
    """
    pixels = np.array(picture, dtype=np.float32)
    ink, times = colours(max(labels, default=0) + 1), picture.height // size[0]
    for index in reversed(range(len(masks))):
        large = masks[index].repeat(times, 0).repeat(times, 1)
        part = pixels[: large.shape[0], : large.shape[1]]
        part[large] = part[large] * (1 - OPACITY) + ink[labels[index]] * OPACITY
    return Image.fromarray(np.round(pixels).astype(np.uint8))


def boxed(
    picture: Image.Image, boxes: Sequence[Sequence[float]], labels: Sequence[int], names: Sequence[str], *,
    scores: Sequence[float] | None, size: tuple[int, int],
) -> Image.Image:  # fmt: skip
    """The picture with boxes in the colours of their classes, named, worst first so that the best lie on top.

    Args:
        picture: RGB, enlarged by a whole number.
        boxes: left, top, right, bottom in px before that, best first.
        labels, names, scores: of each.
        size: (H, W) of the picture before that.
    """
    result = picture.copy()
    pen = ImageDraw.Draw(result)
    times = picture.height / size[0]
    ink = colours(max(labels, default=0) + 1)
    for index in reversed(range(len(boxes))):
        left, top, right, bottom = (v * times for v in boxes[index])
        colour = tuple(int(v) for v in ink[labels[index]])
        edge = (left, top, max(left, right - 1), max(top, bottom - 1))
        pen.rectangle(edge, outline=colour, width=2)
        text = names[index] if scores is None else f"{names[index]} {scores[index]:.2f}"
        # a name that would stand above the picture stands inside the box
        at = (edge[0] + 2, edge[1] - 12 if edge[1] >= 12 else edge[1] + 2)
        pen.rectangle(pen.textbbox(at, text), fill=colour)
        pen.text(at, text, fill="black")
    return result
