"""A library: cut-outs and photographs as two memory-mapped arrays and an index.

Mapped, not loaded: it opens in milliseconds, and worker processes share one copy of the pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from split_core.errors import SplitError
from split_core.pictures import read_picture, read_rgb
from split_tasks.data.cache import whole_folder
from split_tasks.data.composites.colour import main_colour

FORMAT = 1
CUTOUT_SIDE = 512
PHOTOGRAPH_SIDE = 1024
FRINGE_FROM = 128
"""Cut-outs of at least this side lose one pixel of rim: there the colour of their old background shows."""


@dataclass(frozen=True)
class Piece:
    """One picture of a library.

    Args:
        kind: "cutout" or "photograph".
        name: what it shows or is called.
        group: class of a cut-out, "" for a photograph.
        source: package or folder it came from.
        sha256: of the original file.
        offset, shape: where its pixels are in the kind's array; shape is (rows, columns, channels).
        colour: main colour of a cut-out, "" when it has none.
    """

    kind: str
    name: str
    group: str
    source: str
    sha256: str
    offset: int
    shape: tuple[int, int, int]
    colour: str = ""


@dataclass(frozen=True)
class Original:
    """A picture before it enters a library: the file, and what is known of it."""

    kind: str
    name: str
    group: str
    source: str
    path: Path


class Library:
    """Cut-outs from one built folder and photographs from the same or another.

    Args:
        cutouts, photographs: folders that `build_library` wrote.

    Raises:
        ValueError: one of them is not such a folder, or of another version of the format.
    """

    def __init__(self, cutouts: Path, photographs: Path) -> None:
        self.folders = {"cutout": cutouts, "photograph": photographs}
        self.cutouts = [piece for piece in read_index(cutouts) if piece.kind == "cutout"]
        self.photographs = [piece for piece in read_index(photographs) if piece.kind == "photograph"]
        self.classes = tuple(sorted({piece.group for piece in self.cutouts}))
        self._maps: dict[str, NDArray[np.uint8]] = {}

    def pixels(self, piece: Piece) -> NDArray[np.uint8]:
        """(rows, columns, channels); RGB of photographs, RGBA with premultiplied colour of cut-outs."""
        if piece.kind not in self._maps:
            mapped = np.load(self.folders[piece.kind] / f"{piece.kind}s.npy", mmap_mode="r")
            self._maps[piece.kind] = mapped.view(np.ndarray)  # slicing the subclass costs ten times as much
        size = int(np.prod(piece.shape))
        return self._maps[piece.kind][piece.offset : piece.offset + size].reshape(piece.shape)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens the files anew; pickling a memory map would send its pixels.
        return {**self.__dict__, "_maps": {}}


def read_index(folder: Path) -> list[Piece]:
    """The pieces of a built folder.

    Raises:
        ValueError: it is not one, or of another version of the format.
    """
    try:
        index = json.loads((folder / "index.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SplitError(f"{folder} is no library of composites: {error}") from None
    if index.get("format") != FORMAT:
        raise SplitError(f"{folder} was built by another version: delete it and build it again")
    return [Piece(**{**piece, "shape": tuple(piece["shape"])}) for piece in index["pieces"]]


def build_library(folder: Path, originals: Iterable[Original]) -> None:
    """Write the library of `originals` to `folder`, whole or not at all. A cut-out without a visible pixel is left out.

    Raises:
        ValueError: a file is not a picture, or there are none at all.
    """
    arrays: dict[str, list[NDArray[np.uint8]]] = {"cutout": [], "photograph": []}
    ends = dict.fromkeys(arrays, 0)
    pieces = []
    for original in originals:
        colour = ""
        if original.kind == "cutout":
            image = cut(original.path)
            if image is None:
                continue
            colour = main_colour(image)
            array = np.asarray(image.convert("RGBa"))
        else:
            array = np.asarray(reduce_photograph(original.path))
        digest = hashlib.sha256(original.path.read_bytes()).hexdigest()
        kind, offset = original.kind, ends[original.kind]
        pieces.append(Piece(kind, original.name, original.group, original.source, digest, offset, array.shape, colour))
        arrays[kind].append(array.ravel())
        ends[kind] += array.size
    if not pieces:
        raise SplitError(f"composites: no picture to build {folder.name} from")
    with whole_folder(folder) as work:
        for kind, parts in ((kind, parts) for kind, parts in arrays.items() if parts):
            np.save(work / f"{kind}s.npy", np.concatenate(parts))
        index = {"format": FORMAT, "pieces": [asdict(piece) for piece in pieces]}
        (work / "index.json").write_text(json.dumps(index, indent=1))


def cut(path: Path) -> Image.Image | None:
    """RGBA of a cut-out, cropped to what is visible, its rim taken off, at most CUTOUT_SIDE px.

    Raises:
        ValueError: not a picture, or one without transparency.
    """
    image = read_picture(path, alpha=True).image
    if min(image.size) >= FRINGE_FROM:
        rim = Image.new("L", (image.width + 2, image.height + 2))
        rim.paste(image.getchannel("A"), (1, 1))
        image.putalpha(rim.filter(ImageFilter.MinFilter(3)).crop((1, 1, image.width + 1, image.height + 1)))
    box = image.getchannel("A").point(lambda a: 255 if a >= 16 else 0).getbbox()
    if box is None:
        return None
    image = image.crop(box)
    scale = CUTOUT_SIDE / max(image.size)
    if scale < 1:
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.convert("RGBa").resize(size, Image.Resampling.LANCZOS).convert("RGBA")
    return image


def reduce_photograph(path: Path) -> Image.Image:
    """RGB of a photograph whose short side is at most PHOTOGRAPH_SIDE px."""
    image = read_rgb(path)
    scale = PHOTOGRAPH_SIDE / min(image.size)
    if scale < 1:
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.resize(size, Image.Resampling.LANCZOS)
    return image
