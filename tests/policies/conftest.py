"""A stage as a policy sees it, on random embeddings and pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from split_core.policy import BackboneInfo, StageView
from split_core.types import Grid, Look, Pyramid

MakeView = Callable[..., StageView]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: a second thread only waits for the first, and long where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_view() -> MakeView:
    def make(size=(64, 64), *, patch=8, stages=1, scale=1, dim=64, batch=3, channels=3, seed=0, **fields) -> StageView:
        generator = torch.Generator().manual_seed(seed)
        grid = Grid((-(-size[0] // patch), -(-size[1] // patch)), stages)
        levels = tuple(torch.randn(batch, grid.size(s), dim, generator=generator) for s in range(stages + 1))
        images = torch.randint(0, 256, (batch, channels, *size), generator=generator) / 255
        coarse, prefix = torch.randn(2, batch, grid.size(stages), dim, generator=generator), torch.zeros(batch, 1, dim)
        pyramid = Pyramid(levels, grid, fields.pop("valid", None), Look(*coarse, prefix))
        return StageView(scale=scale, pyramid=pyramid, images=fields.pop("images", (images - 0.5) / 0.5), **fields)

    return make


@pytest.fixture
def make_info() -> Callable[..., BackboneInfo]:
    def make(dim=64, *, patch=8, stages=1, budget=None, channels=3) -> BackboneInfo:
        unit = (0.5,) * channels
        return BackboneInfo(dim=dim, patch_size=(patch, patch), stages=stages, budget=budget, mean=unit, std=unit)

    return make
