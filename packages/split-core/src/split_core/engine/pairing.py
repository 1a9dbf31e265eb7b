"""Differences image by image: between methods of one run, and of several that were evaluated on the same images."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from split_core import resolve

Array = NDArray[Any]
PER_IMAGE = "per_image.npz"


def paired(ours: Array, theirs: Array) -> dict[str, float]:
    """Mean difference over the same images and its standard error."""
    difference = ours - theirs
    return {"mean": float(difference.mean()), "se": standard_error(difference)}


def standard_error(values: Array) -> float:
    """Of the mean over images; not a number for a single image."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


@dataclass(frozen=True)
class Images:
    """What a run was evaluated on, and each method's score of every image.

    Args:
        settings: those that say which images they are.
        cells: (n,) labelled fine cells of each, which tells them apart where settings were changed later.
        scores: (n,) by method.
    """

    settings: Mapping[str, Any]
    cells: Array
    scores: Mapping[str, Array]

    def same(self, other: Images) -> bool:
        """Whether image i of one is image i of the other."""
        return self.settings == other.settings and np.array_equal(self.cells, other.cells)


def images_of(run: Path) -> Images | None:
    """None for a run that kept nothing image by image."""
    config, arrays = run / resolve.CONFIG_FILE, run / PER_IMAGE
    if not config.is_file() or not arrays.is_file():
        return None
    tree = resolve.read_recipe(config)
    with np.load(arrays) as found:
        scores = {key.removesuffix("/score"): found[key] for key in found.files if key.endswith("/score")}
        cells = found[f"{next(iter(scores))}/object_cells"]
    return Images({"data": tree["data"], "seed": tree["seed"], "split": tree["eval"]["split"]}, cells, scores)


def pair_across(runs: Sequence[str], contents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all runs, each also paired with the methods of runs at its budget on the same images."""
    images = [images_of(Path(run)) for run in runs]
    added: list[dict[str, dict[str, float]]] = [{} for content in contents for _ in content["rows"]]
    starts = [0, *itertools.accumulate(len(content["rows"]) for content in contents)]
    for a, b in itertools.permutations(range(len(runs)), 2):
        ours, theirs = images[a], images[b]
        if ours is None or theirs is None or not ours.same(theirs):
            continue
        for (i, row), other in itertools.product(enumerate(contents[a]["rows"]), contents[b]["rows"]):
            if row["rho"] == other["rho"]:
                pair = paired(ours.scores[row["method"]], theirs.scores[other["method"]])
                added[starts[a] + i][other["method"]] = pair
    rows = [row for content in contents for row in content["rows"]]
    return [{**row, "minus": {**row.get("minus", {}), **more}} for row, more in zip(rows, added, strict=True)]
