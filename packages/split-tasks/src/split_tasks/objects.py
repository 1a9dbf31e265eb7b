"""Masks in pixels to objects in cells and tokens. Shared by every task whose data has masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from split_core.errors import SplitError
from split_core.types import Cover, Grid


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


def object_tokens(cells: Bool[Tensor, "b r c"], layout: Cover) -> Bool[Tensor, " t"]:
    """Tokens of which at least half of the fine cells are on an object."""
    owner = layout.owner.flatten()
    on = torch.zeros(layout.total + 1, dtype=torch.long, device=owner.device)
    on.scatter_add_(0, owner + 1, cells.flatten().long())
    return 2 * on[1:] >= layout.area
