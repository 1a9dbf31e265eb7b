"""What one decision answers for, where the error has a place: the picture around it (not in the paper).

The error of a dense task is a map. Far from a parent it says nothing about the parent's split, and in a whole-image
cost it is noise that the advantage of every decision carries. Here a decision pays for its own tokens and for the
error of the parents of its scale within `reach` of it:

    E_i = sum of the error map over the surroundings of i / N,    P_i = tokens that stand under i / N
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_core.types import Layout


@dataclass(frozen=True)
class Surroundings:
    """What the decisions of a batch of partitions answer for, parents of all scales from 1 on.

    Args:
        error: (b, n) share of E(x, M) around each parent.
        fraction: (b, n) share of P(x, M) under each parent.
    """

    error: Float[Tensor, "b n"]
    fraction: Float[Tensor, "b n"]


def surroundings(error_map: Float[Tensor, "b r c"], layout: Layout, reach: int) -> Surroundings:
    """Sum an error map and the tokens around every parent.

    Args:
        error_map: as from `Task.error_map`: its mean over an image's valid cells is the error.
        reach: parents to each side whose error counts too; 0 is the parent's own cells.
    """
    cells = layout.valid_cells[:, None, None]
    error = (error_map.float() / cells)[:, None]
    inside = layout.owner >= 0
    # A token spreads evenly over its cells.
    tokens = (inside / layout.area[layout.owner.clamp_min(0)] / cells)[:, None]
    errors, fractions = [], []
    for s in range(1, layout.grid.stages + 1):
        errors.append(_box(F.avg_pool2d(error, 1 << s) * 4**s, reach).flatten(1))
        fractions.append((F.avg_pool2d(tokens, 1 << s) * 4**s).flatten(1))
    return Surroundings(torch.cat(errors, 1), torch.cat(fractions, 1))


def _box(x: Float[Tensor, "b 1 r c"], reach: int) -> Float[Tensor, "b 1 r c"]:
    """Sums over squares of side 2 * reach + 1, nothing beyond the edge."""
    side = 2 * reach + 1
    return F.avg_pool2d(x, side, stride=1, padding=reach) * side**2
