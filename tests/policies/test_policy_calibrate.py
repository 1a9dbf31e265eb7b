"""Calibration: the offset that meets a token fraction, for any policy with a threshold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from split_core.calibrate import offset_for, scores
from split_core.decision import Decision
from split_core.errors import SplitError
from split_core.policy import StageView
from split_core.quadtree import build_layout
from split_core.types import Grid
from split_policies.configs import CosineConfig, CrossAttentionConfig, EntropyConfig
from split_policies.cosine import Cosine
from split_policies.entropy import Entropy
from split_policies.xattn import CrossAttention


def entropy(info):
    return Entropy(EntropyConfig(), info)


def cosine(info):
    return Cosine(CosineConfig(), info)


def xattn(info):
    return CrossAttention(CrossAttentionConfig(), info)


def spent(logits, grid, valid=None, *, offset=0.0) -> float:
    decision = Decision("threshold", offset=offset)
    return float(build_layout(decision(logits, grid, valid), valid).token_fraction.mean())


@given(
    cells=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    stages=st.integers(1, 3),
    batch=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    fraction=st.floats(0.05, 1),
)
def test_no_other_threshold_comes_nearer(cells, stages, batch, seed, fraction):
    generator = torch.Generator().manual_seed(seed)
    grid = Grid(cells, stages)
    logits = [torch.randn(batch, grid.size(s), generator=generator) for s in range(1, stages + 1)]
    offset = offset_for([scores(logits, grid)], fraction)
    found = spent(logits, grid, offset=offset)
    tried = torch.cat([level.flatten() for level in logits])[:12]
    for threshold in (-9.0, 9.0, *tried.tolist()):
        assert abs(found - fraction) <= abs(spent(logits, grid, offset=-threshold) - fraction) + 1e-6


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.35, 0.5, 0.7, 0.9])
def test_meets_the_fraction_within_one_parent(stages, fraction):
    """Within half of what one coarse parent can add: below it, children that score higher wait for it."""
    generator = torch.Generator().manual_seed(stages)
    grid = Grid((24, 24), stages)
    logits = [torch.randn(5, grid.size(s), generator=generator) + s for s in range(1, stages + 1)]
    offset = offset_for([scores(logits, grid)], fraction)
    assert abs(spent(logits, grid, offset=offset) - fraction) <= 0.5 * (4**stages - 1) / (5 * grid.size(0)) + 1e-6


def test_canvases_count_valid_cells_only():
    grid, valid = Grid((16, 16), 2), torch.ones(6, 16, 16, dtype=torch.bool)
    valid[3:, 7:] = False
    logits = [torch.randn(6, grid.size(s), generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    offset = offset_for([scores(logits, grid, valid)], 0.6)
    assert spent(logits, grid, valid, offset=offset) == pytest.approx(0.6, abs=0.01)


def test_equal_scores_split_together():
    grid = Grid((8, 8), 1)
    part = scores([torch.zeros(2, 16)], grid)
    assert spent([torch.zeros(2, 16)], grid, offset=offset_for([part], 0.9)) == 1
    assert spent([torch.zeros(2, 16)], grid, offset=offset_for([part], 0.3)) == 0.25


@pytest.mark.parametrize("make", [entropy, cosine, xattn])
@pytest.mark.parametrize("stages", [1, 2])
def test_every_kind_of_policy_can_be_calibrated(make, stages, make_view, make_info):
    torch.manual_seed(0)
    policy = make(make_info(stages=stages, dim=16))
    batches = []
    for seed in range(3):
        view = make_view((90, 60), stages=stages, dim=16, batch=4, seed=seed)
        logits = [policy(StageView(s, view.pyramid, view.images)).detach() for s in range(1, stages + 1)]
        batches.append((logits, view.grid))
    offset = offset_for([scores(*batch) for batch in batches], 0.6)
    assert sum(spent(*batch, offset=offset) for batch in batches) / 3 == pytest.approx(0.6, abs=0.01)


def test_what_cannot_be_calibrated_says_so():
    part = scores([torch.zeros(1, 16)], Grid((8, 8), 1))
    with pytest.raises(SplitError, match="at least one image"):
        offset_for([], 0.5)
    with pytest.raises(SplitError, match="must lie in"):
        offset_for([part], 1.5)
