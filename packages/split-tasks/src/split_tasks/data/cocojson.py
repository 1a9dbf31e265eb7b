"""Annotations in COCO's json: checked, and kept as arrays; masks as run lengths, for polygons would fill gigabytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from split_core.errors import SplitError
from split_tasks.detection import rle

Array = NDArray[Any]
SHOWN = 5
"""Annotations of each fault that a message names."""


@dataclass(frozen=True)
class Index:
    """A file of annotations.

    Args:
        files: name of each image below the folder of pictures.
        image_ids: (n,) identities.
        sizes: (n, 2) height and width.
        starts: (n + 1,) where each image's annotations start.
        boxes: (m, 4) left, top, width, height; not-a-number free, but perhaps without area.
        categories: (m,) identities of the classes.
        areas: (m,) of the objects.
        crowd: (m,) boxes around many objects.
        names: of the classes, in the order of their identities.
        category_ids: those identities, rising.
        masks: of each annotation, as run lengths; None where they are not asked for.
    """

    files: tuple[str, ...]
    image_ids: Array
    sizes: Array
    starts: Array
    boxes: Array
    categories: Array
    areas: Array
    crowd: Array
    names: tuple[str, ...]
    category_ids: tuple[int, ...]
    masks: tuple[rle.Code, ...] | None = None

    def of(self, image: int) -> slice:
        """Where an image's annotations are."""
        return slice(int(self.starts[image]), int(self.starts[image + 1]))


def read_index(path: Path, *, masks: bool = False) -> Index:
    """The annotations in a file; read once as long as it does not change.

    Args:
        masks: with every object's mask.

    Raises:
        SplitError: no such file, no json, or what is in it is no table of annotations; what is wrong is named.
    """
    try:
        state = path.stat()
    except OSError:
        raise SplitError(f"data.annotations: no file {path}") from None
    return _read(path, state.st_mtime_ns, state.st_size, masks)


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, size: int, masks: bool) -> Index:
    try:
        content = json.loads(path.read_bytes())
        images, annotations, categories = (list(content[key]) for key in ("images", "annotations", "categories"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SplitError(
            f"data.annotations: {path} is no json with images, annotations and categories: {error!r}"
        ) from None
    try:
        return _index(images, annotations, categories, masks)
    except SplitError as error:
        raise SplitError(f"data.annotations: {path}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SplitError(f"data.annotations: {path}: an entry lacks or mistypes a field: {error!r}") from None


def _index(
    images: Sequence[dict[str, Any]], annotations: Sequence[dict[str, Any]], categories: Sequence[dict[str, Any]],
    masks: bool,
) -> Index:  # fmt: skip
    names = {int(category["id"]): str(category["name"]) for category in categories}
    if not images or not names:
        raise SplitError("it has no images or no categories")
    image_ids = np.array([int(image["id"]) for image in images])
    place = {identity: index for index, identity in enumerate(image_ids.tolist())}
    if len(place) < len(image_ids):
        raise SplitError("two images have the same id")
    owner = np.array([place.get(int(a["image_id"]), -1) for a in annotations], dtype=np.int64)
    kinds = np.array([int(a["category_id"]) for a in annotations], dtype=np.int64)
    boxes = np.array([a["bbox"] for a in annotations], dtype=np.float64).reshape(len(annotations), 4)
    faults = [
        f"{wrong.sum()} {what} (ids {_named(annotations, wrong)})"
        for wrong, what in (
            (owner < 0, "belong to no image"),
            (~np.isin(kinds, list(names)), "are of no category"),
            (~np.isfinite(boxes).all(1), "have a box that is no numbers"),
            (np.array([masks and not a.get("segmentation") for a in annotations], dtype=bool), "have no mask"),
        )
        if wrong.any()
    ]
    if faults:
        raise SplitError(f"of the annotations {'; '.join(faults)}")
    order = owner.argsort(kind="stable")
    areas = np.array([float(a.get("area", a["bbox"][2] * a["bbox"][3])) for a in annotations], dtype=np.float64)
    crowd = np.array([bool(a.get("iscrowd", 0)) for a in annotations], dtype=bool)
    ids = tuple(sorted(names))
    sizes = np.array([[int(image["height"]), int(image["width"])] for image in images])
    codes = (
        tuple(rle.from_annotation(annotations[i]["segmentation"], tuple(sizes[owner[i]].tolist())) for i in order)
        if masks else None
    )  # fmt: skip
    return Index(
        tuple(str(image["file_name"]) for image in images), image_ids,
        sizes,
        np.searchsorted(owner[order], np.arange(len(images) + 1)), boxes[order], kinds[order], areas[order],
        crowd[order], tuple(names[i] for i in ids), ids, codes,
    )  # fmt: skip


def _named(annotations: Sequence[dict[str, Any]], wrong: Any) -> str:
    shown = [str(annotations[i].get("id", "?")) for i in np.flatnonzero(wrong)[:SHOWN]]
    return ", ".join(shown) + (" ..." if wrong.sum() > SHOWN else "")
