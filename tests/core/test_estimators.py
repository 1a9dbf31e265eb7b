"""Estimators beside PPO: what they learn on a task whose answer is known, and what they keep between runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from split_core import registry
from split_core.errors import SplitError
from split_core.features import Features
from split_core.learn.estimator import Estimator, EstimatorContext, Lesson
from split_core.learn.gate import straight_through
from split_core.learn.replay import Example, Replay
from split_core.model import SplitViT
from split_core.quadtree import build_layout, uniform_splits
from split_core.types import Pyramid
from split_core.wrapping import wrap
from tiny import Linear, images, jitter, tiny_vit


def student(stages: int = 1, seed: int = 1) -> SplitViT:
    torch.manual_seed(seed)
    model = wrap(tiny_vit(), Linear(), stages=stages)
    jitter(model.embed, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.policy.requires_grad_(True)
    return model.eval()


def build(name: str, budget: float = 0.6, **settings: Any) -> Estimator:
    return registry.build("estimator", {"name": name, **settings}, EstimatorContext(budget, steps=40))


def wanted(model: SplitViT, picture: Tensor) -> Tensor:
    """(b, n) parents that should be fine: a linear property of their embedding, which a linear policy can find."""
    direction = torch.randn(32, generator=torch.Generator().manual_seed(42))
    with torch.no_grad():
        return model.pyramid(picture).levels[1] @ direction > 0


def missing_detail(model: SplitViT, picture: Tensor):
    """Distance to the all-fine map over wanted parents only, so that splitting these is what saves error."""
    want = wanted(model, picture)
    with torch.no_grad():
        pyramid = model.pyramid(picture)
        fine = model.encode(pyramid, layout_of(pyramid)).dense()
    weight = want.view(-1, 1, *pyramid.grid.shape(1)).float()
    weight = weight.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def error_of(features: Features) -> Tensor:
        times = features.batch // picture.shape[0]
        gap = (features.dense() - fine.repeat(times, 1, 1, 1)).square()
        return (gap * weight.repeat(times, 1, 1, 1)).mean((1, 2, 3))

    return error_of


def layout_of(pyramid: Pyramid):
    return build_layout(uniform_splits(pyramid.grid, pyramid.batch, split=True))


def agreement(model: SplitViT, picture: Tensor) -> float:
    """Chance that a wanted parent outranks an unwanted one."""
    want = wanted(model, picture).flatten()
    with torch.no_grad():
        score = model.logits(model.pyramid(picture), picture)[0].flatten()
    return float((score[want][:, None] > score[~want][None]).float().mean())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("credit", {}),
        ("credit", {"masks": 2, "softness": 0.2, "repeats": 1}),
        ("gate", {"relax": "union", "dual": {"lr": 0.02}}),
        ("supervised", {}),
    ],
)
def test_an_estimator_finds_the_parents_whose_detail_matters(name: str, settings: dict[str, Any]) -> None:
    model, estimator = student(), build(name, **settings)
    optimizer = torch.optim.Adam(model.policy.parameters(), lr=0.02)
    test = images(32, seed=999)
    before = agreement(model, test)
    for step in range(30):
        picture = images(16, seed=step)
        objects = wanted(model, picture).view(16, 2, 2).repeat_interleave(2, 1).repeat_interleave(2, 2)
        lesson = Lesson(picture, missing_detail(model, picture), torch.Generator().manual_seed(step), objects)
        for loss in estimator.losses(model, lesson):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert before < 0.7
    assert agreement(model, test) > 0.9
    assert all(value == value for value in estimator.metrics().values())


@pytest.mark.parametrize("name", ["credit", "gate", "supervised"])
def test_every_estimator_runs_at_two_stages_on_an_odd_canvas(name: str) -> None:
    model, estimator = student(2), build(name)
    picture = images(3, 40, 24)
    objects = torch.ones(3, *model.embed.grid(picture.shape[-2:]).shape(0), dtype=torch.bool)

    def error_of(features: Features) -> Tensor:
        return model.forward_head(features).square().sum(1)

    losses = list(estimator.losses(model, Lesson(picture, error_of, torch.Generator().manual_seed(0), objects)))
    assert losses
    assert all(loss.isfinite() for loss in losses)


def test_supervision_without_objects_is_refused() -> None:
    with pytest.raises(SplitError, match="needs labelled objects"):
        list(build("supervised").losses(student(), Lesson(images(1), lambda features: features.tokens.sum())))


def test_the_gate_starts_at_the_price_of_a_token_and_does_not_move_meanwhile() -> None:
    model, estimator = student(), build("gate", dual={"init": None, "price_batches": 2})
    lesson = Lesson(images(4), missing_detail(model, images(4)), torch.Generator().manual_seed(0))
    assert list(estimator.losses(model, lesson)) == []
    assert list(estimator.losses(model, lesson)) == []
    assert len(list(estimator.losses(model, lesson))) == 1


def test_straight_through_gates_are_binary_with_the_relaxations_gradient() -> None:
    logit = torch.full((4000, 1), 0.7, requires_grad=True)
    gates = straight_through(logit, 1.0, torch.Generator().manual_seed(0))
    assert set(gates.detach().unique().tolist()) == {0.0, 1.0}
    assert float(gates.detach().mean()) == pytest.approx(float(torch.tensor(0.7).sigmoid()), abs=0.03)
    (slope,) = torch.autograd.grad(gates.sum(), logit)
    assert (slope > 0).all()


@pytest.mark.parametrize("value", [90.0, -90.0])
def test_saturated_gates_stay_finite(value: float) -> None:
    logit = torch.full((1, 3024), value, requires_grad=True)
    gates = straight_through(logit, 1.0, torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(gates.sum(), logit)
    assert gates.isfinite().all()
    assert slope.isfinite().all()


def test_a_resumed_credit_repeats_the_same_examples() -> None:
    def run(estimator: Estimator, model: SplitViT, steps: range) -> list[float]:
        values = []
        for step in steps:
            lesson = Lesson(images(4, seed=step), missing_detail(model, images(4, seed=step)))
            lesson = Lesson(lesson.images, lesson.error_of, torch.Generator().manual_seed(step))
            values += [float(loss.detach()) for loss in estimator.losses(model, lesson)]
        return values

    model = student()
    straight = build("credit")
    expected = run(straight, model, range(4))
    first, second = build("credit"), build("credit")
    begun = run(first, model, range(2))
    second.load_state_dict(first.state_dict())
    assert begun + run(second, model, range(2, 4)) == expected


def test_replay_keeps_the_last_and_forgets_the_rest() -> None:
    replay = Replay(2)
    model = student(2)
    for seed in range(3):
        picture = images(1, seed=seed)
        pyramid = model.pyramid(picture)
        target = tuple(torch.full((1, pyramid.grid.size(s)), float(seed)) for s in (1, 2))
        replay.add(Example(pyramid, picture, target, tuple(t > -1 for t in target)))
    seen = {float(replay.draw(torch.Generator().manual_seed(i)).target[0][0, 0]) for i in range(20)}
    assert seen == {1.0, 2.0}
    example = replay.draw()
    assert example.pyramid.grid == pyramid.grid
