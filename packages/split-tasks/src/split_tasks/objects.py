"""Masks and label maps in pixels to objects and boundaries in cells and tokens. Shared by every task with such data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Integer
from torch import Tensor

from split_core.errors import SplitError
from split_core.types import Cover, Grid

IGNORE = 255
"""Label of pixels that do not count."""


def object_cells(
    mask: Bool[Tensor, "b H W"], grid: Grid, patch_size: tuple[int, int], share: float
) -> Bool[Tensor, "b r c"]:
    """Fine cells of the padded grid of which at least `share` of the pixels are on an object.

    Pixels that padding adds (bottom, right) are on nothing.

    Raises:
        ValueError: the mask is larger than the grid.
    """
    rows, cols = grid.shape(0)
    height, width = rows * patch_size[0], cols * patch_size[1]
    h, w = mask.shape[-2:]
    if h > height or w > width:
        raise SplitError(f"a mask of {h}x{w} px does not fit into a grid of {height}x{width} px")
    padded = F.pad(mask.float(), (0, width - w, 0, height - h))
    count = F.avg_pool2d(padded[:, None], patch_size)[:, 0] * (patch_size[0] * patch_size[1])
    # Whole pixels: rounding keeps "at least 10%" exact where the mean is not.
    return count.round() >= share * patch_size[0] * patch_size[1] - 1e-6


def majority_labels(
    labels: Integer[Tensor, "b H W"], grid: Grid, patch_size: tuple[int, int], classes: int
) -> Integer[Tensor, "b r c"]:
    """The commonest label of each fine cell of the padded grid (App. F); IGNORE where no pixel has one.

    Ties go to the lower label. Pixels that are ignored or added by padding do not vote.

    Raises:
        SplitError: the label map is larger than the grid.
    """
    rows, cols = grid.shape(0)
    height, width = rows * patch_size[0], cols * patch_size[1]
    h, w = labels.shape[-2:]
    if h > height or w > width:
        raise SplitError(f"labels of {h}x{w} px do not fit into a grid of {height}x{width} px")
    padded = F.pad(labels.long(), (0, width - w, 0, height - h), value=IGNORE)
    voters = padded.view(-1, rows, patch_size[0], cols, patch_size[1]).transpose(2, 3).flatten(3)
    votes = torch.zeros(*voters.shape[:3], classes + 1, dtype=torch.long, device=labels.device)
    votes.scatter_add_(3, voters.clamp_max(classes), torch.ones_like(voters))
    most, label = votes[..., :classes].max(3)
    return label.masked_fill(most == 0, IGNORE)


def boundary_cells(label: Integer[Tensor, "b r c"]) -> Bool[Tensor, "b r c"]:
    """Cells whose majority label differs from that of one of their four neighbours; IGNORE differs from nothing."""
    result = torch.zeros_like(label, dtype=torch.bool)
    for axis in (1, 2):
        before, after = label.narrow(axis, 0, label.shape[axis] - 1), label.narrow(axis, 1, label.shape[axis] - 1)
        differ = (before != after) & (before != IGNORE) & (after != IGNORE)
        result.narrow(axis, 0, label.shape[axis] - 1).logical_or_(differ)
        result.narrow(axis, 1, label.shape[axis] - 1).logical_or_(differ)
    return result


def object_tokens(cells: Bool[Tensor, "b r c"], layout: Cover) -> Bool[Tensor, " t"]:
    """Tokens of which at least half of the fine cells are on an object."""
    owner = layout.owner.flatten()
    on = torch.zeros(layout.total + 1, dtype=torch.long, device=owner.device)
    on.scatter_add_(0, owner + 1, cells.flatten().long())
    return 2 * on[1:] >= layout.area
