"""Random numbers that do not depend on how many processes share a batch.

Every process of a run seeds its generator alike, draws for all images of the global batch and keeps the rows of
its own. A few floats per image are drawn in vain; in return two processes sample the partitions that one would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SharedGenerator(torch.Generator):
    """A generator whose draws are for `total` images, of which this process holds `start` .. `start + count` - 1."""

    start: int
    count: int
    total: int


def shared_generator(seed: int, *, start: int, count: int, total: int) -> SharedGenerator:
    """A seeded generator for rows `start` .. `start + count` - 1 of a batch of `total` images, on the CPU."""
    generator = SharedGenerator()
    generator.manual_seed(seed)
    generator.start, generator.count, generator.total = start, count, total
    return generator


def uniform(shape: Sequence[int], generator: torch.Generator | None, device: torch.device | str) -> Tensor:
    """Uniform numbers in [0, 1) of `shape` (images or rollouts first), on `device`.

    They are drawn where the generator lives, so that a seed means the same on every device. For a shared generator
    shape[0] is a multiple of the process's rows (row k * b + i is rollout k of image i).
    """
    source = device if generator is None else generator.device
    if not isinstance(generator, SharedGenerator) or generator.count == generator.total:
        return torch.rand(tuple(shape), generator=generator, device=source).to(device)
    times, left = divmod(shape[0], generator.count)
    assert not left, f"{shape[0]} rows are no multiple of the {generator.count} that this process holds"
    drawn = torch.rand((times, generator.total, *shape[1:]), generator=generator, device=source)
    mine = drawn[:, generator.start : generator.start + generator.count]
    return mine.reshape(tuple(shape)).to(device)
