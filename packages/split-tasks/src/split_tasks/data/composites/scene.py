"""One composite: a crop of a photograph with cut-outs pasted on it, and where they went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from split_tasks.configs import CompositesConfig
from split_tasks.data.composites.library import Library, Piece

Array = NDArray[Any]

VISIBLE = 128
"""A pixel is an object's from this opacity (of 255) on."""
CROP_DRAWS, OBJECT_DRAWS, PLACES = 3, 6, 6
OVERLAP = 0.25
"""A further object is left out when every place tried covers or is covered by more than this share of its box."""
SMALLER = 0.6
"""Size of further objects relative to the range of the main one."""


@dataclass(frozen=True)
class Placed:
    """An object in a scene: its class index, the piece, and its box (left, top, right, bottom) in pixels."""

    label: int
    piece: Piece
    box: tuple[int, int, int, int]


@dataclass(frozen=True)
class Scene:
    """A composite.

    Args:
        pixels: (H, W, 3) uint8.
        segments: (H, W) uint8, 0 for background and 1 + class on objects.
        owner: (H, W) uint8, 0 for background and 1 + the object's place in `objects`.
        objects: the main one first; boxes are tight around the visible pixels, right and bottom excluded.
    """

    pixels: Array
    segments: Array
    owner: Array
    objects: tuple[Placed, ...]


def draws(config: CompositesConfig) -> int:
    """Random numbers that `compose` uses for one scene."""
    return CROP_DRAWS * config.crops + config.objects * (OBJECT_DRAWS + 2 * PLACES)


def compose(
    library: Library,
    groups: Sequence[Sequence[Piece]],
    photographs: Sequence[Piece],
    *,
    size: tuple[int, int],
    config: CompositesConfig,
    u: Array,
) -> Scene:
    """Make a scene.

    Args:
        library: owner of the pixels.
        groups: cut-outs to choose from, by class index.
        photographs: backgrounds to choose from.
        size: (H, W).
        config: sizes, counts and jitter.
        u: (draws(config),) uniforms in [0, 1); nothing else is random.
    """
    crop, rest = np.split(u, [CROP_DRAWS * config.crops])
    canvas = background(library, photographs, size=size, u=crop.reshape(config.crops, CROP_DRAWS))
    chosen: list[tuple[Placed, Array]] = []
    for k, row in enumerate(rest.reshape(config.objects, -1)):
        label = int(row[0] * len(groups))
        piece = groups[label][int(row[1] * len(groups[label]))]
        low, high = config.side
        side = (low + (high - low) * row[2]) * (1.0 if k == 0 else SMALLER)
        sprite = render(library.pixels(piece), side=max(4, round(side * min(size))), config=config, u=row[3:6])
        boxes = [placed.box for placed, _ in chosen]
        box = place(sprite.shape[:2], size, boxes, row[6:].reshape(PLACES, 2))
        if box is not None:
            chosen.append((Placed(label, piece, box), sprite))
    segments = np.zeros(size, dtype=np.uint8)
    owner = np.zeros(size, dtype=np.uint8)
    for k in reversed(range(len(chosen))):  # the main object last: nothing covers it
        placed, sprite = chosen[k]
        left, top, right, bottom = placed.box
        window = np.s_[top:bottom, left:right]
        alpha = sprite[:, :, 3:].astype(np.uint16)
        under = canvas[window].astype(np.uint16) * (255 - alpha)
        canvas[window] = np.minimum(sprite[:, :, :3] + (under + 127) // 255, 255).astype(np.uint8)
        visible = alpha[:, :, 0] >= VISIBLE
        segments[window][visible] = placed.label + 1
        owner[window][visible] = k + 1
    tight = [tight_box(owner == k + 1) for k in range(len(chosen))]
    objects = [
        Placed(placed.label, placed.piece, box)
        for (placed, _), box in zip(chosen, tight, strict=True)
        if box is not None
    ]
    place_of = np.cumsum([0, *(box is not None for box in tight)], dtype=np.uint8)  # hidden ones own no pixel
    return Scene(canvas, segments, place_of[owner], tuple(objects))


def background(library: Library, photographs: Sequence[Piece], *, size: tuple[int, int], u: Array) -> Array:
    """(H, W, 3) uint8: of several crops, each of a random photograph, the one with most detail."""
    best, most = None, -1.0
    for row in u:
        pixels = library.pixels(photographs[int(row[0] * len(photographs))])
        high, wide = pixels.shape[:2]
        # A crop has the image's shape, is at most the photograph and, where that allows, not enlarged.
        largest = min(high / size[0], wide / size[1])
        smallest = min(largest, max(1.0, largest / 4))
        # The three numbers also place the crop: the fraction left over by one choice is the next one's.
        scale = smallest + (largest - smallest) * 0.75 * row[1]
        h, w = (max(1, min(full, int(side * scale))) for full, side in zip((high, wide), size, strict=True))
        rows, cols = high - h, wide - w
        at = int(row[2] * (rows + 1) * (cols + 1))
        top, left = at // (cols + 1), at % (cols + 1)
        crop = pixels[top : top + h, left : left + w]
        detail = patch_entropy(crop) if len(u) > 1 else 0.0
        if detail > most:
            best, most = crop, detail
    assert best is not None
    image = Image.fromarray(np.ascontiguousarray(best))
    return np.array(image.resize((size[1], size[0]), Image.Resampling.BILINEAR, reducing_gap=1.0))


def patch_entropy(crop: Array, *, patches: int = 8, side: int = 12, levels: int = 16) -> float:
    """Mean entropy in bits of the grey levels in patches x patches parts of a crop, each sampled side x side."""
    n = patches * side
    rows, cols = (np.arange(n) * full // n for full in crop.shape[:2])
    sample = crop[rows[:, None], cols].astype(np.uint16)
    grey = (sample[:, :, 0] * 77 + sample[:, :, 1] * 150 + sample[:, :, 2] * 29) >> 8
    level = (grey.astype(np.int64) * levels) >> 8
    patch = (np.arange(n) // side)[:, None] * patches + np.arange(n) // side
    counts = np.bincount((patch * levels + level).ravel(), minlength=patches**2 * levels)
    share = counts.reshape(-1, levels) / side**2
    return float(-(share * np.log2(np.maximum(share, 1e-12))).sum(axis=1).mean())


def render(pixels: Array, *, side: int, config: CompositesConfig, u: Array) -> Array:
    """(h, w, 4) uint8, premultiplied: a cut-out mirrored or not, rotated, shaded, its visible part `side` px long.

    Args:
        pixels: (rows, columns, 4), premultiplied (so that no hidden colour bleeds into the rim).
        side: longer side in px.
        config: rotate and shade.
        u: (3,) uniforms for mirror, rotation and shade.
    """
    # Told that these four bands are CMYK, Pillow resamples each as it is; RGBA it would premultiply again.
    image = Image.frombuffer("CMYK", pixels.shape[1::-1], np.ascontiguousarray(pixels), "raw", "CMYK", 0, 1)
    if u[0] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    angle = (2 * u[1] - 1) * config.rotate
    # Half again the final size is enough for the rotation, and much less than the original to turn.
    image = _scale(image, min(1.0, 1.5 * side / max(image.size)))
    if angle:
        image = image.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    image = image.crop(_visible_box(image))
    image = _scale(image, side / max(image.size))
    array = np.array(image.crop(_visible_box(image)))
    shade = 1 + (2 * u[2] - 1) * config.shade
    array[:, :, :3] = np.minimum(array[:, :, :3] * shade, array[:, :, 3:]).astype(np.uint8)
    return array


def _scale(image: Image.Image, factor: float) -> Image.Image:
    if factor == 1.0:
        return image
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return image.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)


def _visible_box(image: Image.Image) -> tuple[int, int, int, int]:
    alpha = np.asarray(image)[:, :, 3] >= VISIBLE
    return tight_box(alpha) or (0, 0, *image.size)


def place(
    shape: tuple[int, int], size: tuple[int, int], taken: Sequence[tuple[int, int, int, int]], u: Array
) -> tuple[int, int, int, int] | None:
    """Box for a sprite of `shape` wholly inside `size`: the one of the places in `u` (k, 2) that overlaps least.

    Returns: None when even that one overlaps too much. The first object gets its first place.
    """
    h, w = min(shape[0], size[0]), min(shape[1], size[1])
    best, least = None, OVERLAP
    for row in u:
        top, left = int(row[0] * (size[0] - h + 1)), int(row[1] * (size[1] - w + 1))
        box = (left, top, left + w, top + h)
        worst = max((_overlap(box, other) for other in taken), default=0.0)
        if worst < least or (best is None and worst == 0):
            best, least = box, worst
        if worst == 0:
            break
    return best


def _overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    """Intersection of two boxes over the area of the smaller one."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / min((x[2] - x[0]) * (x[3] - x[1]) for x in (a, b))


def tight_box(mask: Array) -> tuple[int, int, int, int] | None:
    """(left, top, right, bottom) around True, right and bottom excluded; None when there is none."""
    rows, cols = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return None
    return int(cols[0]), int(rows[0]), int(cols[-1]) + 1, int(rows[-1]) + 1
