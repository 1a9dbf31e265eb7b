"""Label maps from picture files: indices as they are stored, mapped to classes, every wrong one named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from split_core.errors import SplitError
from split_core.pictures import upright
from split_tasks.objects import IGNORE

Array = NDArray[Any]


def read_indices(path: Path) -> Array:
    """(H, W) integers of a label map: a palette's indices, grey levels of any depth, or bits.

    Colours are no indices, but a map that was saved as grey RGB is one.

    Raises:
        SplitError: the file cannot be read, or holds colours; it is named.
    """
    with upright(path) as (image, _):
        values, mode = np.asarray(image), image.mode
    if mode in {"RGB", "RGBA", "LA", "PA"}:
        channels = values[..., : 1 if mode in {"LA", "PA"} else 3]
        if (channels != channels[..., :1]).any():
            raise SplitError(f"label map {path} holds colours ({mode}); one index for each pixel is needed")
        values = channels[..., 0]
    elif values.ndim != 2 or mode == "F":
        raise SplitError(f"label map {path} is of mode {mode}; one whole number for each pixel is needed")
    return values.astype(np.int64)


def to_classes(values: Array, path: Path, *, classes: int, zero_is_ignored: bool, ignore: int | None) -> Array:
    """(H, W) uint8 class indices, IGNORE where a pixel does not count.

    Args:
        values: as stored.
        path: named in messages.
        classes: how many there are.
        zero_is_ignored: 0 does not count, and k is class k - 1.
        ignore: a stored value that does not count.

    Raises:
        SplitError: a value that is neither a class nor ignored.
    """
    skip = np.zeros(values.shape, dtype=bool) if ignore is None else values == ignore
    if zero_is_ignored:
        skip |= values == 0
    index = values - int(zero_is_ignored)
    wrong = values[~skip & ((index < 0) | (index >= classes))]
    if wrong.size:
        first = int(zero_is_ignored)
        raise SplitError(
            f"label map {path} holds the label {wrong.flat[0]}, which is no class: {classes} classes have the labels "
            f"{first} to {classes - 1 + first}"
        )
    return np.where(skip, IGNORE, index).astype(np.uint8)
