"""Random meets the token fraction on average; the oracle spends on objects first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from split_core.decision import Decision
from split_core.errors import SplitError
from split_core.plugins import PluginConfig
from split_core.quadtree import build_layout
from split_core.types import Grid, Pyramid
from split_policies.configs import RandomConfig
from split_policies.oracle import Oracle
from split_policies.random import Random, chance


def layout_of(policy, view, decision):
    logits = [policy(replace(view, scale=s)) for s in range(1, view.grid.stages + 1)]
    return build_layout(decision(logits, view.grid, view.pyramid.valid), view.pyramid.valid)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("size", [(128, 128), (230, 210)])
@pytest.mark.parametrize("budget", [0.4, 0.7])
def test_random_meets_the_budget_on_average(stages, size, budget, make_view, make_info):
    view = make_view(size, patch=8, stages=stages, dim=1, batch=128, channels=1)
    view = replace(view, generator=torch.Generator().manual_seed(7))
    fractions = layout_of(Random(RandomConfig(), make_info(stages=stages, budget=budget)), view, Decision("threshold"))
    fractions = fractions.token_fraction
    noise = float(fractions.std()) / len(fractions) ** 0.5
    assert abs(float(fractions.mean()) - budget) < 4 * noise


def test_random_follows_the_picture_on_a_canvas(make_view, make_info):
    """Images of different sizes on one canvas each meet the budget."""
    view = make_view((128, 128), stages=2, dim=1, batch=400, channels=1)
    valid = torch.ones(400, 16, 16, dtype=torch.bool)
    valid[200:, 9:] = False
    valid[200:, :, 7:] = False
    view = replace(view, pyramid=Pyramid(view.pyramid.levels, view.grid, valid))
    view = replace(view, generator=torch.Generator().manual_seed(3))
    fraction = layout_of(Random(RandomConfig(), make_info(stages=2, budget=0.5)), view, Decision("threshold"))
    for half in fraction.token_fraction.split(200):
        assert abs(float(half.mean()) - 0.5) < 4 * float(half.std()) / 200**0.5


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_chance_solves_the_polynomial(stages):
    for budget in (0.3, 0.55, 0.9, 1.0):
        q = float(chance(budget, Grid((16, 16), stages)))
        tokens = 1 + sum(3 * 4 ** (k - 1) * q**k for k in range(1, stages + 1))
        assert tokens / 4**stages == pytest.approx(budget, abs=1e-5)


def test_chance_out_of_reach_is_certain():
    assert float(chance(0.1, Grid((16, 16), 1))) == 0
    assert float(chance(1.0, Grid((7, 9), 2))) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0])
def test_without_a_budget_q_is_the_chance_of_a_split(q, make_view, make_info):
    view = make_view((256, 256), batch=20, dim=1, generator=torch.Generator().manual_seed(0))
    logits = Random(RandomConfig(q=q), make_info())(view)
    assert float((logits > 0).float().mean()) == pytest.approx(q, abs=4 * (q * (1 - q) / logits.numel()) ** 0.5)


def test_oracle_splits_what_touches_an_object_and_ranks_by_share(make_view, make_info):
    objects = torch.zeros(3, 8, 8, dtype=torch.bool)
    objects[:, 0, 0] = True  # parent 0: one cell of four
    objects[:, 2:4, 2:4] = True  # parent 5: all four
    policy, view = Oracle(PluginConfig(), make_info()), make_view(objects=objects)
    logits = policy(view)
    assert ((logits > 0).nonzero()[:, 1].view(3, 2) == torch.tensor([0, 5])).all()
    assert (logits.argmax(1) == 5).all()


def test_oracle_spends_the_rest_at_random(make_view, make_info):
    objects = torch.zeros(200, 8, 8, dtype=torch.bool)
    objects[:, 2:4, 2:4] = True
    view = make_view(batch=200, dim=1, objects=objects, generator=torch.Generator().manual_seed(0))
    fine = layout_of(Oracle(PluginConfig(), make_info()), view, Decision("image", 0.5)).fine()
    assert fine[:, 2:4, 2:4].all()
    share = fine.float().mean(0)[::2, ::2].flatten()
    others = share[torch.arange(16) != 5]
    # floor(32 tokens) allow five splits of sixteen: the object, and four of the fifteen others.
    assert (others - 4 / 15).abs().max() < 4 * (4 / 15 * 11 / 15 / 200) ** 0.5


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_oracle_noise_never_outweighs_a_cell(scale, make_view, make_info):
    objects = torch.zeros(50, 16, 16, dtype=torch.bool)
    objects[:, 0, 0] = True
    view = make_view((128, 128), stages=3, scale=scale, batch=50, dim=1, objects=objects)
    logits = Oracle(PluginConfig(), make_info(stages=3))(view)
    assert (logits[:, 0] > 0).all()
    assert (logits[:, 1:] < 0).all()


def test_oracle_without_labels_says_so(make_view, make_info):
    with pytest.raises(SplitError, match="oracle needs labelled objects"):
        Oracle(PluginConfig(), make_info())(make_view())
