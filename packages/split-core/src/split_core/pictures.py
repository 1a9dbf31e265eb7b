"""One reader for every picture file: RGB, the right way up, or an error that names the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from split_core.errors import SplitError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".jp2"})
"""What counts as a picture in a folder, in any case."""


def is_picture(path: Path) -> bool:
    """Whether the name says picture; hidden files (among them the ._* of archives made on a Mac) do not count."""
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")


def read_rgb(path: str | Path) -> Image.Image:
    """A picture file as RGB with 8 bits.

    - Grey is repeated; 16-bit grey is scaled by 257, other integers and floats by their own range.
    - Transparency (alpha, or a palette's transparent colour) is laid over white, as paper would show it.
    - CMYK goes through its embedded profile where it has one, and otherwise through Pillow's plain conversion,
      which knows that Adobe writes JPEGs inverted.
    - The EXIF orientation is applied; an animation gives its first frame.

    Raises:
        ValueError: no such file, not a picture, cut short or too large; the file is named.
    """
    try:
        with Image.open(path) as file:
            file.load()
            image = ImageOps.exif_transpose(file)
            return _to_rgb(image)
    except UnidentifiedImageError:
        raise SplitError(f"{path} is not a picture that can be read") from None
    except FileNotFoundError:
        raise SplitError(f"no picture {path}") from None
    # Pillow's decoders raise SyntaxError and struct- or zlib-flavoured ValueErrors for damage, by format.
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError) as error:
        raise SplitError(f"{path} cannot be read: {error}") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in {"RGBA", "LA", "PA", "La", "RGBa"} or "transparency" in image.info:
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
    import io

    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        return ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return None
