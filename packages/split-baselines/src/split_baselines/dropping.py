"""What methods that drop tokens at a few blocks share: where those are, how many stay, and gathering them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from split_baselines.configs import StagedConfig
from split_baselines.merging import follow
from split_core.errors import SplitError
from split_core.reduced import Tokens

Staged = TypeVar("Staged", bound=StagedConfig)


def stages(config: StagedConfig, depth: int) -> tuple[int, ...]:
    """Blocks at which tokens are dropped, rising: of 12 by default 3, 6 and 9.

    Raises:
        SplitError: a block that the model does not have, or one twice.
    """
    if config.at is None:
        return tuple(sorted({depth * k // 4 for k in (1, 2, 3)}))
    if len(set(config.at)) != len(config.at) or not all(block < depth for block in config.at):
        raise SplitError(f"at={list(config.at)}: each of the model's blocks 0 to {depth - 1} may be named once")
    return tuple(sorted(config.at))


def keeps(config: Staged, cells: int) -> Iterator[Staged]:
    """The same settings with fewer and fewer tokens kept: every share that makes a difference at the first stage."""
    for kept in range(cells, 0, -1):
        yield config.model_copy(update={"keep": kept / cells})


def share_of(keep: float, count: int) -> int:
    """ceil(keep * count), at least one; a share that is a whole number of tokens but for rounding is that number."""
    return max(1, math.ceil(keep * count - 1e-9))


def take(tokens: Tokens, index: Int[Tensor, "b m"]) -> Tokens:
    """The patch tokens at `index`; what the others stood for has no token any more."""
    patches, n = tokens.patches, tokens.count
    taken = patches.gather(1, index[..., None].expand(-1, -1, patches.shape[2]))
    target = torch.full((len(patches), n), -1, dtype=torch.long, device=patches.device)
    target.scatter_(1, index, torch.arange(index.shape[1], device=patches.device).expand_as(index))
    owner = follow(tokens.owner, target)
    cell = None if tokens.cell is None else tokens.cell.gather(1, index)
    return tokens.with_patches(taken, owner, None, cell)
