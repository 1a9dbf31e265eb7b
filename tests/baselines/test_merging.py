"""Matching and merging against looking at every pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from naive_baselines import pairs, soft_pairs
from split_baselines import dtem
from split_baselines.configs import MergeConfig
from split_baselines.merging import follow, match, match_scores, merge
from split_baselines.tome import rates
from split_core.errors import SplitError
from split_core.reduced import Tokens

SIZES = {"count": st.integers(2, 15), "prefix": st.integers(0, 5), "seed": st.integers(0, 2**16)}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(**SIZES, data=st.data())
def test_the_r_best_pairs_merge(count: int, prefix: int, seed: int, data: st.DataObject) -> None:
    r = data.draw(st.integers(0, count // 2))
    metric = draw(seed, 2, count, 4)
    matching = match(metric, r, prefix)
    assert matching.left == count - r
    for image in range(2):
        target = matching.target[image].tolist()
        groups = [[i for i in range(count) if target[i] == place] for place in range(count - r)]
        expected = {frozenset({i}) for i in range(count)}
        for a, b in pairs(metric[image], r, prefix):
            old = next(group for group in expected if b in group)
            expected = expected - {old, frozenset({a})} | {old | {a}}
        assert {frozenset(group) for group in groups} == expected
        if prefix:
            unmerged = [g[0] for g in groups if len(g) == 1 and (g[0] + prefix) % 2 == 0]
            assert unmerged == sorted(unmerged), "tokens that do not merge keep their order"


@given(**SIZES, data=st.data())
def test_merging_is_a_mean_by_size_and_loses_no_cell(count: int, prefix: int, seed: int, data: st.DataObject) -> None:
    r = data.draw(st.integers(1, count // 2))
    x = draw(seed, 2, prefix + count, 3)
    size = torch.randint(1, 5, (2, count), generator=torch.Generator().manual_seed(seed)).float()
    owner = torch.arange(count).repeat_interleave(2).expand(2, -1)
    tokens = Tokens(x, prefix, owner, size, cell=7 * torch.arange(count).expand(2, -1))
    matching = match(draw(seed + 1, 2, count, 4), r, prefix)
    merged = merge(tokens, matching)
    assert merged.weight is not None
    assert torch.equal(merged.x[:, :prefix], x[:, :prefix])
    assert torch.allclose(merged.weight.sum(1), size.sum(1))
    for image in range(2):
        for place in range(count - r):
            group = [i for i in range(count) if matching.target[image, i] == place]
            total = sum(size[image, i] for i in group)
            mean = sum(x[image, prefix + i] * size[image, i] for i in group) / total
            torch.testing.assert_close(merged.patches[image, place], mean)
            cells = [c for c in range(2 * count) if merged.owner[image, c] == place]
            assert cells == sorted(2 * i + j for i in group for j in (0, 1))
            stays = [i for i in group if len(group) == 1 or (i + prefix) % 2 == 1]
            assert merged.cell is not None
            assert [int(merged.cell[image, place])] == [7 * i for i in stays], "where others merged into, it stands"


def test_what_is_gone_stays_gone() -> None:
    owner = torch.tensor([[0, 1, -1, 2]])
    assert follow(owner, torch.tensor([[1, -1, 0]])).tolist() == [[1, -1, -1, 0]]


@given(st.floats(0, 20), st.floats(-1, 1), st.integers(1, 30))
def test_rates_are_whole_and_add_up(r: float, inflect: float, depth: int) -> None:
    found = rates(MergeConfig(r=r, inflect=inflect), depth)
    assert len(found) == depth
    assert all(rate >= 0 for rate in found)
    assert abs(sum(found) - r * (depth if depth > 1 else 1 + inflect)) <= 0.5 + 1e-6
    if inflect == 0:
        assert max(found) - min(found) <= 1


def test_schedules() -> None:
    assert rates(MergeConfig(r=8), 3) == [8, 8, 8]
    assert rates(MergeConfig(r=6.5), 4) == [6, 7, 7, 6] or sum(rates(MergeConfig(r=6.5), 4)) == 26
    assert rates(MergeConfig(r=8, inflect=1), 3) == [16, 8, 0]
    assert rates(MergeConfig(r=8, inflect=-1), 3) == [0, 8, 16]
    assert rates(MergeConfig(r=(4, 0, 2)), 3) == [4, 0, 2]
    with pytest.raises(SplitError, match=r"r=\[4, 0\] gives 2 numbers, and the model has 3 blocks"):
        rates(MergeConfig(r=(4, 0)), 3)


@given(a=st.integers(1, 5), c=st.integers(1, 5), seed=st.integers(0, 2**16), data=st.data())
def test_soft_pairs_are_those_written_out(a: int, c: int, seed: int, data: st.DataObject) -> None:
    r = data.draw(st.integers(1, a))
    scores = draw(seed, 2, a, c).tanh()
    found = dtem.soft_pairs(scores, r, 3, 0.1)
    for image in range(2):
        torch.testing.assert_close(found[image], soft_pairs(scores[image], r, 3, 0.1), rtol=1e-3, atol=1e-4)
    assert (found.sum(2) <= 1 + 1e-5).all()
    assert (found.sum((1, 2)) <= r + 1e-4).all()


def test_soft_merging_of_clear_pairs_is_hard_merging() -> None:
    x = draw(0, 1, 9, 4)
    own = torch.arange(8).expand(1, -1)
    tokens = Tokens(x, 1, own, cell=own)
    scores = torch.full((1, 4, 4), -1.0)
    scores[0, 1, 2] = scores[0, 3, 0] = 1.0
    shares = dtem.soft_pairs(scores, 2, 3, 0.02)
    soft = dtem.soft_merge(tokens, shares, scores, 2)
    hard = merge(tokens, match_scores(scores, 8, 2, 1))
    torch.testing.assert_close(soft.x, hard.x, rtol=1e-3, atol=1e-3)
    assert soft.weight is not None
    assert hard.weight is not None
    torch.testing.assert_close(soft.weight, hard.weight, rtol=1e-3, atol=1e-3)
    assert torch.equal(soft.owner, hard.owner)
    assert soft.cell is not None
    assert hard.cell is not None
    assert torch.equal(soft.cell, hard.cell)


def test_soft_merging_keeps_the_mass_of_those_that_stay() -> None:
    tokens = Tokens(draw(1, 2, 10, 4), 2, torch.arange(8).expand(2, -1))
    scores = draw(2, 2, 4, 4).tanh()
    shares = dtem.soft_pairs(scores, 2, 3, 0.1)
    moved = dtem.soft_merge(tokens, shares, scores, 2)
    assert moved.count == 6
    assert moved.weight is not None
    left = (1 - shares.sum(2)).sort(dim=1).values[:, :2].sum(1)
    torch.testing.assert_close(moved.weight.sum(1), 8 - left)
