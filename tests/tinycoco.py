"""A folder in COCO's layout: black pictures with one white box."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BOX = (20, 10, 30, 40)


def write(root: Path, *, images: list[dict[str, Any]], annotations: list[dict[str, Any]], **more: Any) -> Path:
    """The same images and annotations as train and val."""
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}]
    content = {"images": images, "annotations": annotations, "categories": categories, **more}
    for split in ("train", "val"):
        folder = root / f"{split}2017"
        folder.mkdir(parents=True, exist_ok=True)
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
        for image in images:
            picture(image["width"], image["height"]).save(folder / image["file_name"])
    return root


def picture(width: int, height: int) -> Image.Image:
    """Black, white in BOX."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[BOX[1] : BOX[1] + BOX[3], BOX[0] : BOX[0] + BOX[2]] = 255
    return Image.fromarray(pixels)


def entry(identity: int, width: int = 100, height: int = 60) -> dict[str, Any]:
    return {"id": identity, "file_name": f"{identity}.png", "width": width, "height": height}


def annotation(identity: int, image: int, box: Any, category: int = 90, **more: Any) -> dict[str, Any]:
    return {"id": identity, "image_id": image, "bbox": list(box), "category_id": category, "area": 7.0, **more}
