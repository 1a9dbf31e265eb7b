"""Data set `photographs`: crops of scikit-image's colour photographs, for timing and pictures without a download.

Nothing can be learned from it: there is one class and every split sees the same photographs. What it has is the
content of real pictures, which decides where content-adaptive policies split and how much sequence lengths differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from PIL import Image
from torchvision.transforms.v2 import functional

from split_core.pictures import read_rgb
from split_core.task import DataContext
from split_tasks.configs import PhotographsConfig
from split_tasks.data import common
from split_tasks.data.digits_source import package_file
from split_tasks.data.seeded import uniforms

FILES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "motorcycle_right.png", "rocket.jpg")
SIZE = (224, 224)
LEAST = 0.6
"""Smallest crop, as a share of the largest that fits."""


class Photographs:
    """Square-cornered random crops (`split_core.task.Dataset`); item i is a pure function of (seed, split, i).

    Args:
        config: how many images a split nominally has.
        context: split, seed, image size (None is 224), channels and normalisation.

    Items: {"image": (c, H, W), "target": {"label": 0}}.

    Raises:
        ValueError: scikit-image is not installed.
    """

    classes = ("photograph",)

    def __init__(self, config: PhotographsConfig, context: DataContext) -> None:
        self.split = common.check_split(context.split)
        self.config, self.context = config, context
        self.size = context.image_size or SIZE
        self.pictures = [_picture(name) for name in FILES]

    def __len__(self) -> int:
        return self.config.images

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = common.check_index(index, len(self))
        stream = f"photographs/{self.split}"
        u = uniforms(seed=self.context.seed, stream=stream, items=[item], draws=3)[0].tolist()
        picture = self.pictures[item % len(self.pictures)]
        height, width = self.size
        largest = min(picture.width / width, picture.height / height)
        side = largest * (LEAST + (1 - LEAST) * u[0])
        box = (u[1] * (picture.width - side * width), u[2] * (picture.height - side * height))
        crop = picture.resize(
            (width, height), Image.Resampling.BICUBIC, box=(*box, box[0] + side * width, box[1] + side * height)
        )
        pixels: torch.Tensor = functional.pil_to_tensor(crop).float() / 255
        return {"image": common.normalise(pixels[None], self.context)[0], "target": {"label": 0}}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Stack samples into a batch."""
        return common.collate(samples)


@cache
def _picture(name: str) -> Image.Image:
    return read_rgb(package_file("skimage", "scikit-image", "data", name))
