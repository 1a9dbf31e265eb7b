"""Errors that have a place: sums around every parent against loops, and PPO that hands them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from split_core.errors import SplitError
from split_core.features import Features
from split_core.learn.config import PPOConfig
from split_core.learn.estimator import EstimatorContext, Lesson
from split_core.learn.ppo import PPO
from split_core.learn.surroundings import surroundings
from split_core.model import SplitViT
from split_core.quadtree import build_layout
from split_core.wrapping import wrap
from strategies import Case, cases
from tiny import Linear, images, jitter, tiny_vit


@given(cases(most_images=2), st.integers(0, 2), st.integers(0, 99))
def test_sums_around_parents_equal_the_loop(case: Case, reach: int, seed: int) -> None:
    layout = build_layout(case.splits, case.valid)
    grid = layout.grid
    rows, cols = grid.shape(0)
    held = layout.owner >= 0
    error_map = torch.rand(layout.owner.shape, generator=torch.Generator().manual_seed(seed)) * held
    got = surroundings(error_map, layout, reach)
    start = 0
    for s in range(1, grid.stages + 1):
        side = 1 << s
        for i in range(grid.size(s)):
            y, x = divmod(i, grid.shape(s)[1])
            near_y = range(max(0, (y - reach) * side), min(rows, (y + reach + 1) * side))
            near_x = range(max(0, (x - reach) * side), min(cols, (x + reach + 1) * side))
            for b in range(layout.batch):
                cells = float(layout.valid_cells[b])
                error = sum(float(error_map[b, r, c]) for r in near_y for c in near_x) / cells
                under = [layout.owner[b, y * side + r, x * side + c] for r in range(side) for c in range(side)]
                tokens = sum(1 / float(layout.area[t]) for t in under if t >= 0) / cells
                assert float(got.error[b, start + i]) == pytest.approx(error, abs=1e-5)
                assert float(got.fraction[b, start + i]) == pytest.approx(tokens, abs=1e-5)
        torch.testing.assert_close(got.fraction[:, start : start + grid.size(s)].sum(1), layout.token_fraction)
        start += grid.size(s)


def student(stages: int) -> SplitViT:
    torch.manual_seed(0)
    model = wrap(tiny_vit(depth=1), Linear(), stages=stages).eval()
    jitter(model.embed, 0)
    return model


def slopes(model: SplitViT, size: tuple[int, int], **settings: Any) -> list[Tensor]:
    """The policy's gradient at the first loss of a batch."""

    def where(features: Features) -> Tensor:
        return features.dense().square().mean(1) * 3

    def error(features: Features) -> Tensor:
        return where(features).flatten(1).mean(1)

    def map_of(features: Features) -> Tensor:
        shape = features.layout.owner.shape
        padded = torch.zeros(shape)
        found = where(features)
        padded[:, : found.shape[1], : found.shape[2]] = found
        return padded

    ppo = PPO(PPOConfig(**settings), EstimatorContext(0.5, steps=10))
    generator = torch.Generator().manual_seed(0)
    loss = next(ppo.losses(model, Lesson(images(3, *size), error, generator, map_of=map_of)))
    return list(torch.autograd.grad(loss, list(model.policy.parameters())))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("size", [(32, 32), (40, 20)], ids=str)
def test_surroundings_that_hold_the_image_give_the_papers_gradient(stages: int, size: tuple[int, int]) -> None:
    """At lambda 0 and before any update; tokens are the one thing each decision always pays for by itself."""
    model = student(stages)
    for whole, near in zip(slopes(model, size), slopes(model, size, reach=99), strict=True):
        torch.testing.assert_close(near, whole, atol=1e-6, rtol=1e-3)
    own, whole = slopes(model, size, reach=0), slopes(model, size)
    assert any((a - b).abs().max() > 1e-5 for a, b in zip(own, whole, strict=True))


def test_an_error_without_a_place_is_refused() -> None:
    model = student(1)
    ppo = PPO(PPOConfig(reach=1), EstimatorContext(0.5, steps=10))
    lesson = Lesson(images(2), lambda features: features.prefix.sum((1, 2)))
    for map_of in (None, lambda _: None):
        with pytest.raises(SplitError, match=r"reach: the error of this run has no place"):
            next(ppo.losses(model, Lesson(lesson.images, lesson.error_of, map_of=map_of)))
