"""Batch-shaping against a loop, and Quadformer's exact counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from split_baselines.shaping import GeneralisedBatchShaping, batch_shaping, concrete_cdf
from split_core import wrap
from tiny import images, tiny_vit


def test_the_prior_s_distribution_is_that_of_its_samples() -> None:
    torch.manual_seed(0)
    uniform = torch.rand(20_000)
    location, temperature = 0.7, 0.5
    samples = ((location + uniform.logit()) / temperature).sigmoid()
    for x in (0.02, 0.3, 0.5, 0.8, 0.99):
        found = concrete_cdf(torch.tensor(x), torch.tensor(location), temperature)
        assert found.item() == pytest.approx((samples <= x).float().mean().item(), abs=0.02)


@given(batch=st.integers(1, 8), places=st.integers(1, 4), seed=st.integers(0, 1000))
def test_the_loss_is_the_one_written_out(batch: int, places: int, seed: int) -> None:
    gates = torch.rand(batch, places, generator=torch.Generator().manual_seed(seed))
    location = torch.linspace(-1, 1, places)
    expected = 0.0
    for place in range(places):
        for rank, value in enumerate(sorted(gates[:, place].tolist()), start=1):
            value = min(max(value, 1e-6), 1 - 1e-6)
            cdf = 1 / (1 + math.exp(-(0.5 * math.log(value / (1 - value)) - location[place].item())))
            expected += (cdf - rank / (batch + 1)) ** 2
    assert batch_shaping(gates, location).item() == pytest.approx(expected / (batch * places), rel=1e-3, abs=1e-6)


def test_it_spreads_gates_that_never_change_and_moves_places_to_the_share() -> None:
    torch.manual_seed(0)
    loss = GeneralisedBatchShaping(6, 0.25)
    logits = torch.nn.Parameter(0.01 * torch.randn(64, 6))
    optimizer = torch.optim.Adam([logits, *loss.parameters()], lr=0.05)
    first = loss(logits.sigmoid()).item()
    for _ in range(300):
        optimizer.zero_grad()
        value = loss(logits.sigmoid())
        value.backward()
        optimizer.step()
    gates = logits.detach().sigmoid()
    assert value.item() < first / 5
    assert gates.std(0).mean() > 0.2, "a gate depends on the image"
    assert gates.mean().item() == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize(("stages", "budget", "tokens"), [(1, 0.5, 31), (1, 0.7, 43), (2, 0.4, 25)])
def test_quadformer_gives_every_image_the_same_number(stages: int, budget: float, tokens: int) -> None:
    model = wrap(tiny_vit(img_size=64), "quadformer", stages=stages, budget=budget).eval()
    picture = images(4, 64)
    picture[1] *= 0.01  # a flat image gets no fewer
    with torch.no_grad():
        model(picture)
    assert model.layout is not None
    assert model.layout.lengths == (tokens,) * 4


def test_quadformer_scores_what_shrinking_loses() -> None:
    model = wrap(tiny_vit(), "quadformer", budget=0.5).eval()
    picture = images(2)
    with torch.no_grad():
        (logits,) = model.logits(model.pyramid(picture), picture)
    small = F.avg_pool2d(picture, 2)
    error = (picture - F.interpolate(small, size=(32, 32), mode="bilinear", align_corners=False)) ** 2
    for parent in range(4):
        top, left = 16 * (parent // 2), 16 * (parent % 2)
        block = error[:, :, top : top + 16, left : left + 16].sum((1, 2, 3))
        torch.testing.assert_close(logits[:, parent], block)
