"""One reader for every picture file: RGB, the right way up, or an error that names the file."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from split_core.errors import SplitError, first_line

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".jp2"})
"""What counts as a picture in a folder, in any case."""

MAX_PIXELS = 200_000_000
"""Pixels of the largest picture that is read unless a setting says otherwise: 600 MB as RGB."""


def is_picture(path: Path) -> bool:
    """Whether the name says picture; hidden files (among them the ._* of archives made on a Mac) do not count."""
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")


class PictureError(SplitError):
    """A picture file that cannot be read; the message names it."""


@dataclass(frozen=True)
class Picture:
    """A picture as read.

    Args:
        image: RGB or RGBA with 8 bits, the right way up.
        frames: how many the file holds; the first was taken.
    """

    image: Image.Image
    frames: int


def read_rgb(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image of `read_picture`."""
    return read_picture(path, max_pixels=max_pixels).image


def read_picture(path: str | Path, *, max_pixels: int = MAX_PIXELS, alpha: bool = False) -> Picture:
    """A picture file as RGB with 8 bits.

    - Grey is repeated; 16-bit grey is scaled by 257, other integers and floats by their own range.
    - Transparency (alpha, or a palette's transparent colour) is laid over white, as paper would show it.
    - CMYK goes through its embedded profile where it has one, and otherwise through Pillow's plain conversion,
      which knows that Adobe writes JPEGs inverted.
    - The EXIF orientation is applied; an animation gives its first frame.

    Args:
        path: the file.
        max_pixels: a picture that claims more is refused before its pixels are unpacked.
        alpha: give RGBA with the transparency kept; an opaque picture is refused.

    Raises:
        PictureError: no such file, not a picture, cut short, too large or opaque; the file is named.
    """
    with upright(path, max_pixels=max_pixels) as (image, frames):
        if alpha and not _transparent(image):
            raise PictureError(f"{path} has no transparency")
        return Picture(image.convert("RGBA") if alpha else _to_rgb(image), frames)


@contextmanager
def upright(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[Image.Image, int]]:
    """The first frame of a file as it is stored but the right way up, and how many frames there are.

    Whatever goes wrong before the block ends, in the decoder or in a conversion, is a line that names the file.

    Raises:
        PictureError: as `read_picture`.
    """
    try:
        with _limit(max_pixels), Image.open(path) as file:
            frames = int(getattr(file, "n_frames", 1))
            file.load()
            yield ImageOps.exif_transpose(file), frames
    except SplitError:
        raise
    except UnidentifiedImageError:
        raise PictureError(f"{path} is not a picture that can be read") from None
    except FileNotFoundError:
        raise PictureError(f"no picture {path}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise PictureError(f"{path} has more than the {max_pixels} pixels that max_pixels allows") from None
    # Pillow's decoders raise what comes, by format: SyntaxError, struct.error, zlib.error, KeyError, OverflowError ...
    except (Exception, MemoryError) as error:
        raise PictureError(f"{path} cannot be read: {first_line(error)}") from None


@contextmanager
def _limit(max_pixels: int) -> Iterator[None]:
    """Pillow's own limit, which it checks before it unpacks, set for one read; between the limit and twice it Pillow
    only warns, which counts as an error here. What else it warns of (odd metadata) says nothing about the pixels."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _transparent(image: Image.Image) -> bool:
    return image.mode in {"RGBA", "LA", "PA", "La", "RGBa"} or "transparency" in image.info


def _to_rgb(image: Image.Image) -> Image.Image:
    if _transparent(image):
        over = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(over, image.convert("RGBA")).convert("RGB")
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_8_bits(np.asarray(image))).convert("RGB")
    if image.mode == "CMYK" and image.info.get("icc_profile"):
        converted = _through_profile(image)
        if converted is not None:
            return converted
    return image.convert("RGB")


def _to_8_bits(values: np.ndarray) -> np.ndarray:
    """Grey of more than 8 bits: 16-bit files by their full range, others by the range that occurs."""
    if values.dtype == np.uint16 or (values.dtype.kind == "i" and values.min() >= 0 and 255 < values.max() < 65536):
        return np.round(values / 257.0).astype(np.uint8)
    if values.dtype.kind == "i" and values.min() >= 0 and values.max() <= 255:
        return values.astype(np.uint8)
    values = np.nan_to_num(values.astype(np.float64))
    low, high = (0.0, 1.0) if values.min() >= 0 and values.max() <= 1 else (values.min(), values.max())
    return np.round((values - low) / (high - low) * 255).astype(np.uint8)


def _through_profile(image: Image.Image) -> Image.Image | None:
    """CMYK to sRGB by the file's own profile; None when the profile is damaged."""
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        return ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return None
