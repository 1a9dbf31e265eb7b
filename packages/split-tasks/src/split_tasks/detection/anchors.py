"""Anchors: boxes of three shapes at every cell of every level. Not rounded to pixels, unlike torchvision's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

SIZE = 8.0
"""Side of an anchor's square in cells of its level: 32 px at stride 4 ... 512 px at stride 64."""
RATIOS = (0.5, 1.0, 2.0)
"""Height over width."""


def anchors(
    shapes: Sequence[tuple[int, int]], strides: Sequence[float], device: torch.device
) -> tuple[Float[Tensor, "_ 4"], ...]:
    """Anchors of each level, cells in raster order, the three shapes of a cell side by side.

    Args:
        shapes: rows and columns of the levels.
        strides: pixels between two cells of each.

    An anchor is centred on the top left of its cell, as the published weights have it.
    """
    return _anchors(tuple(shapes), tuple(strides), device)


@lru_cache(maxsize=8)
def _anchors(
    shapes: tuple[tuple[int, int], ...], strides: tuple[float, ...], device: torch.device
) -> tuple[Tensor, ...]:
    with torch.inference_mode(False):  # they may serve training later
        return tuple(_level(shape, stride, device) for shape, stride in zip(shapes, strides, strict=True))


def _level(shape: tuple[int, int], stride: float, device: torch.device) -> Float[Tensor, "n 4"]:
    ratios = torch.tensor(RATIOS, device=device)
    height = SIZE * stride * ratios.sqrt()
    half = torch.stack([SIZE * stride / ratios.sqrt(), height], 1) / 2
    y, x = (torch.arange(n, device=device) * stride for n in shape)
    centre = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1).view(-1, 1, 2)
    return torch.cat([centre - half, centre + half], -1).view(-1, 4)
