"""Boxes: clipping, areas, overlaps, and the codes by which heads move them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder

from split_core.types import Cover

RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
CASCADE_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Of the first stage; the k-th stage's are k times as large."""


def encode(
    wanted: Float[Tensor, "*n 4"], boxes: Float[Tensor, "*n 4"], weights: tuple[float, ...]
) -> Float[Tensor, "*n 4"]:
    """Codes that move `boxes` onto `wanted`; both must have an area."""
    codes: Tensor = _coder(weights).encode_single(wanted.reshape(-1, 4), boxes.reshape(-1, 4))
    return codes.view_as(boxes)


def decode(
    codes: Float[Tensor, "*n 4"], boxes: Float[Tensor, "*n 4"], weights: tuple[float, ...]
) -> Float[Tensor, "*n 4"]:
    """Where codes move `boxes`; a side grows 62.5-fold at most."""
    moved: Tensor = _coder(weights).decode_single(codes.reshape(-1, 4).float(), boxes.reshape(-1, 4))
    return moved.view_as(boxes)


def _coder(weights: tuple[float, ...]) -> BoxCoder:
    return BoxCoder((weights[0], weights[1], weights[2], weights[3]), math.log(1000 / 16))


def clip(boxes: Float[Tensor, "b n 4"], sizes: Int[Tensor, "b 2"]) -> Float[Tensor, "b n 4"]:
    """The part of each box inside its picture."""
    limit = sizes.flip(1).repeat(1, 2)[:, None].to(boxes.dtype)
    return torch.minimum(boxes.clamp_min(0), limit)


def has_area(boxes: Float[Tensor, "*n 4"]) -> Bool[Tensor, "*n"]:
    """Whether both sides are longer than nothing."""
    return (boxes[..., 2:] > boxes[..., :2]).all(-1)


def centres(boxes: Float[Tensor, "*n 4"]) -> Float[Tensor, "*n 2"]:
    """Their middles, across and down."""
    return (boxes[..., :2] + boxes[..., 2:]) / 2


def overlaps(a: Float[Tensor, "b n 4"], b: Float[Tensor, "b m 4"]) -> Float[Tensor, "b n m"]:
    """Intersection over union of every pair within an image; 0 where there is no union."""
    low = torch.maximum(a[:, :, None, :2], b[:, None, :, :2])
    high = torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:])
    both = (high - low).clamp_min(0).prod(-1)
    area_a, area_b = ((boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (a, b))
    union = area_a[:, :, None] + area_b[:, None] - both
    return torch.where(union > 0, both / union.clamp_min(1e-9), 0)


def picture_sizes(layout: Cover, patch_size: tuple[int, int]) -> Int[Tensor, "b 2"]:
    """Height and width in pixels up to which each image's cells hold picture, from the top left; whole patches.

    Cells without a token are padding, unless a reducer dropped them: then all cells of the canvas are valid.
    """
    rows, cols = layout.grid.cells
    held = layout.owner[:, :rows, :cols] >= 0
    reach = torch.stack([held.any(2).sum(1), held.any(1).sum(1)], 1)
    whole = (layout.valid_cells == rows * cols)[:, None]
    return torch.where(whole, reach.new_tensor([rows, cols]), reach) * reach.new_tensor(patch_size)
