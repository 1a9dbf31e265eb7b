"""Pictures of a partition: every token outlined, coarse ones veiled.  Needs nothing beyond the library itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from split_core.errors import SplitError
from split_core.types import Layout

Array = NDArray[Any]

VEIL = (28.0, 60.0, 110.0)
"""Coarse tokens lose their colours to this dark blue, which shows on grey pictures too and to colour-blind eyes."""
OPACITY = 0.5
LINE = (255.0, 255.0, 255.0)
LINE_OPACITY = 0.5
LONGEST = 4096
"""Pixels of a picture's longer side past which it is not enlarged."""


def draw(
    images: Float[Tensor, "b ch H W"],
    layout: Layout,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    short_side: int = 320,
    path: str | Path | None = None,
) -> list[Image.Image]:
    """Each image with the tokens that it was read as: fine ones clear, coarse ones veiled, the more the coarser.

    Args:
        images: as the model saw them, one or three channels.
        layout: their partition, e.g. ``model.layout`` after a forward.
        mean, std: undo the normalisation. Without them, images within 0 .. 1 stay as they are and any others are
            stretched from their lowest to their highest value.
        patch_size: of fine patches, in pixels; needed only where the image is no whole number of patches.
        short_side: pictures with fewer pixels there are enlarged by a whole number until they have as many.
        path: also save the pictures, side by side in one file.

    Returns:
        One RGB picture per image, enlarged by a whole number where it is small.

    Raises:
        SplitError: images and layout do not belong together, or patch_size is needed.
    """
    pixels = to_rgb(images, mean, std)
    if len(pixels) != layout.batch:
        raise SplitError(f"{len(pixels)} images cannot be drawn with a layout of {layout.batch}")
    patch = _patch_size(pixels.shape[1:3], layout.grid.cells, patch_size)
    owner = layout.owner.cpu().numpy()
    scale = np.append(layout.scale.cpu().numpy(), layout.grid.stages)  # the last entry serves cells without a token
    veil = scale / layout.grid.stages
    pictures = [_picture(p, o, veil, patch, short_side) for p, o in zip(pixels, owner, strict=True)]
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        side_by_side(pictures).save(path)
    return pictures


def to_rgb(
    images: Float[Tensor, "b ch H W"], mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Array:
    """(b, H, W, 3) float64 in 0 .. 255 from normalised images (see `draw`)."""
    values = images.detach().double().cpu().numpy()
    if values.ndim != 4 or values.shape[1] not in (1, 3):
        raise SplitError(f"images must be (batch, 1 or 3 channels, height, width); got shape {values.shape}")
    if mean is not None and std is not None:
        values = values * np.reshape(std, (1, -1, 1, 1)) + np.reshape(mean, (1, -1, 1, 1))
    elif values.size and (values.min() < 0 or values.max() > 1):
        low, high = values.min((1, 2, 3), keepdims=True), values.max((1, 2, 3), keepdims=True)
        values = (values - low) / np.maximum(high - low, 1e-12)
    return np.broadcast_to(values.clip(0, 1), (len(values), 3, *values.shape[2:])).transpose(0, 2, 3, 1) * 255


def side_by_side(pictures: Sequence[Image.Image], gap: int = 8) -> Image.Image:
    """Pictures of one size on a white sheet, in a near-square arrangement."""
    columns = max(1, round(len(pictures) ** 0.5 + 0.49))
    rows = -(-len(pictures) // columns)
    width, height = (pictures[0].width + gap, pictures[0].height + gap) if pictures else (1, 1)
    sheet = Image.new("RGB", (columns * width - gap, max(1, rows) * height - gap), "white")
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (index % columns * width, index // columns * height))
    return sheet


def _picture(pixels: Array, owner: Array, veil: Array, patch: tuple[int, int], short_side: int) -> Image.Image:
    """One image: veil, enlargement, outlines. `owner` holds a token per fine cell, -1 where there is none."""
    height, width = pixels.shape[:2]
    token = owner.repeat(patch[0], 0).repeat(patch[1], 1)[:height, :width]
    weight = veil[token][..., None]  # -1 reads the last entry
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    toned = pixels * (1 - weight) + ((1 - OPACITY) * grey[..., None] + OPACITY * np.array(VEIL)) * weight
    toned[token < 0] = 255
    times = enlargement(height, width, short_side)
    toned, token = (array.repeat(times, 0).repeat(times, 1) for array in (toned, token))
    edge = np.zeros(token.shape, dtype=bool)
    edge[1:] |= token[1:] != token[:-1]
    edge[:, 1:] |= token[:, 1:] != token[:, :-1]
    edge[[0, -1]] = edge[:, [0, -1]] = True
    toned[edge] = toned[edge] * (1 - LINE_OPACITY) + np.array(LINE) * LINE_OPACITY
    return Image.fromarray(toned.round().astype(np.uint8))


def _patch_size(size: Sequence[int], cells: tuple[int, int], given: int | tuple[int, int] | None) -> tuple[int, int]:
    """Height and width of fine patches, checked against the grid or found from it."""
    if given is not None:
        patch = (given, given) if isinstance(given, int) else given
    elif all(side % count == 0 for side, count in zip(size, cells, strict=True)):
        patch = (size[0] // cells[0], size[1] // cells[1])
    else:
        fitting = [p for p in range(1, min(size) + 1) if tuple(-(-side // p) for side in size) == cells]
        if len(fitting) != 1:
            raise SplitError(
                f"images of {size[0]}x{size[1]} px are no whole number of patches in a grid of {cells[0]}x{cells[1]};"
                " say how large they are with patch_size="
            )
        patch = (fitting[0], fitting[0])
    if tuple(-(-side // p) for side, p in zip(size, patch, strict=True)) != cells:
        raise SplitError(
            f"images of {size[0]}x{size[1]} px in patches of {patch[0]}x{patch[1]} are not the layout's"
            f" {cells[0]}x{cells[1]} cells"
        )
    return patch


def enlargement(height: int, width: int, short_side: int) -> int:
    """Whole number by which a small picture is enlarged: its shorter side reaches `short_side`, unless the longer one
    would pass LONGEST (a strip of two pixels' height must not become a wall)."""
    return max(1, min(-(-short_side // min(height, width)), LONGEST // max(height, width)))
