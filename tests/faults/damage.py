"""Picture files of every kind, and damage to them."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image

FORMATS = {
    ".png": "PNG", ".jpg": "JPEG", ".gif": "GIF", ".tif": "TIFF", ".bmp": "BMP", ".webp": "WEBP", ".ppm": "PPM",
    ".jp2": "JPEG2000",
}  # fmt: skip


def picture_bytes(suffix: str, side: int = 24) -> bytes:
    """A whole file of noise."""
    pixels = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, FORMATS[suffix])
    return buffer.getvalue()


def damaged(content: bytes, seed: int) -> bytes:
    """The file cut, overwritten, lengthened or shortened at random places."""
    chance = random.Random(seed)
    data = bytearray(content)
    for _ in range(chance.randint(1, 6)):
        place = chance.randrange(max(1, len(data)))
        kind = chance.choice(("bit", "bytes", "cut", "insert", "remove", "header"))
        if kind == "bit" and data:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == "bytes":
            data[place : place + 8] = chance.randbytes(8)
        elif kind == "header" and data:
            data[chance.randrange(min(64, len(data)))] = chance.randrange(256)
        elif kind == "cut":
            del data[place:]
        elif kind == "insert":
            data[place:place] = chance.randbytes(chance.randint(1, 40))
        else:
            del data[place : place + chance.randint(1, 40)]
    return bytes(data)
