"""Name of the colour that most of a cut-out has."""

from __future__ import annotations

import numpy as np
from PIL import Image

COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow")
CLEAR = 0.5
"""A colour counts when at least this share of the opaque pixels has it."""


def main_colour(image: Image.Image) -> str:
    """One of COLOURS, or "" for a picture of many colours.

    Hue decides where there is saturation, brightness where there is none; dark orange is called brown.
    """
    small = image.copy()
    small.thumbnail((96, 96))
    opaque = np.asarray(small.getchannel("A")).ravel() >= 200
    if not opaque.any():
        return ""
    hsv = np.asarray(small.convert("RGB").convert("HSV")).reshape(-1, 3)[opaque].astype(int)
    hue, saturation, value = hsv[:, 0] * 360 // 256, hsv[:, 1], hsv[:, 2]
    warm = (hue >= 12) & (hue < 45)
    rules = (
        ("black", value < 50),
        ("white", (saturation < 40) & (value >= 190)),
        ("grey", saturation < 55),
        ("brown", warm & (value < 190)),
        ("orange", warm),
        ("yellow", (hue >= 45) & (hue < 70)),
        ("green", (hue >= 70) & (hue < 170)),
        ("blue", (hue >= 170) & (hue < 260)),
        ("purple", (hue >= 260) & (hue < 300)),
        ("pink", (hue >= 300) & (hue < 345)),
        ("pink", ((hue < 12) | (hue >= 345)) & (saturation < 120) & (value >= 170)),
        ("red", (hue < 12) | (hue >= 345)),
    )
    named = np.select([test for _, test in rules], [COLOURS.index(name) for name, _ in rules], -1)
    counts = np.bincount(named, minlength=len(COLOURS))
    best = int(counts.argmax())
    return COLOURS[best] if counts[best] >= CLEAR * len(named) else ""
