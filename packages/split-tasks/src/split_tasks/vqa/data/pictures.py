"""A picture as LLaVA sees it: padded to a square with the mean colour, then resized."""

from __future__ import annotations

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from split_core.task import DataContext
from split_tasks.data import common


def padded_square(picture: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    """The picture in the middle of a square."""
    side = max(picture.size)
    if picture.size == (side, side):
        return picture
    square = Image.new("RGB", (side, side), colour)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def as_input(picture: Image.Image, context: DataContext, size: tuple[int, int]) -> Float[Tensor, "c H W"]:
    """Square, `size`, normalised. The padding is the model's mean colour, so that it becomes zero."""
    mean = context.mean if len(context.mean) == 3 else context.mean[:1] * 3
    square = padded_square(picture, tuple(int(value * 255) for value in mean))
    resized = square.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    pixels: Tensor = functional.pil_to_tensor(resized).float() / 255
    return common.normalise(pixels[None], context)[0].to(torch.float32)
