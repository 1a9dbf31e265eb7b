"""Offsets that spend a wanted token fraction, against trying every threshold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from split_core.calibrate import Scores, calibrate, offset_for, scores
from split_core.decision import Decision
from split_core.errors import SplitError
from split_core.quadtree import build_layout
from split_core.types import Grid
from split_core.wrapping import wrap
from strategies import grids, random_logits, seeds, validity_of
from tiny import Bright, images, tiny_vit

Batch = tuple[tuple[Tensor, ...], Grid, Tensor | None]


def realised(batches: list[Batch], offset: float) -> float:
    """Mean token fraction over all images of the threshold rule with this offset."""
    decision = Decision("threshold", offset=offset)
    parts = [build_layout(decision(logits, grid, valid), valid).token_fraction for logits, grid, valid in batches]
    return float(torch.cat(parts).double().mean())


def every_offset(batches: list[Batch]) -> list[float]:
    """One offset between any two neighbouring logits, and one beyond each end."""
    values = torch.cat([x.flatten() for logits, _, _ in batches for x in logits]).unique().double()
    middles = ((values[1:] + values[:-1]) / 2).tolist()
    return [-m for m in (float(values[0]) - 1, *middles, float(values[-1]) + 1)]


@st.composite
def samples(draw: st.DrawFn) -> list[Batch]:
    batches = []
    for _ in range(draw(st.integers(1, 2))):
        grid, batch = draw(grids(largest=7)), draw(st.integers(1, 3))
        logits = random_logits(grid, batch, draw(seeds))
        if draw(st.booleans()):
            logits = tuple(x.round() for x in logits)  # ties
        batches.append((logits, grid, draw(validity_of(grid, batch))))
    return batches


@given(samples(), st.floats(0.01, 1))
def test_no_offset_comes_nearer(batches: list[Batch], fraction: float) -> None:
    offset = offset_for([scores(*batch) for batch in batches], fraction)
    best = min(abs(realised(batches, o) - fraction) for o in every_offset(batches))
    assert abs(realised(batches, offset) - fraction) <= best + 1e-6


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.7, 0.95])
def test_without_ties_it_is_within_half_a_split(fraction: float) -> None:
    grid, images_ = Grid((16, 16), 1), 6
    batches = [(random_logits(grid, images_ // 2, seed), grid, None) for seed in (0, 1)]
    own = realised(batches, offset_for([scores(*batch) for batch in batches], fraction))
    assert abs(own - fraction) <= 1.5 / (256 * images_) + 1e-6


def test_the_ends() -> None:
    grid = Grid((8, 8), 2)
    batches = [(random_logits(grid, 2, 0), grid, None)]
    sample = [scores(*batch) for batch in batches]
    assert realised(batches, offset_for(sample, 1.0)) == 1.0
    assert realised(batches, offset_for(sample, 1e-3)) == 4 / 64


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.01])
def test_fractions_out_of_range_are_refused(fraction: float) -> None:
    grid = Grid((4, 4), 1)
    with pytest.raises(SplitError, match=rf"token fraction {fraction} must lie in \(0, 1\]"):
        offset_for([scores(random_logits(grid, 1, 0), grid)], fraction)


def test_an_empty_sample_is_refused() -> None:
    empty: list[Scores] = []
    with pytest.raises(SplitError, match="calibration needs at least one image"):
        offset_for(empty, 0.5)


@pytest.mark.parametrize("size", [(64, 64), (52, 70)], ids=str)
@pytest.mark.parametrize("fraction", [0.4, 0.7])
def test_a_calibrated_model_spends_the_fraction_on_its_sample(size: tuple[int, int], fraction: float) -> None:
    model = wrap(tiny_vit(), Bright(), stages=2).eval()
    batches = [images(4, *size, seed=seed) for seed in (0, 1)]
    before = model.decision
    decision = calibrate(model, batches, fraction)
    assert model.decision is before
    assert (decision.rule, decision.budget) == ("threshold", fraction)
    model.decision = decision
    fractions = torch.cat([model.tokenize(batch).token_fraction for batch in batches])
    cells = -(-size[0] // 8) * -(-size[1] // 8)
    assert abs(float(fractions.mean()) - fraction) <= 3 / (cells * 8) + 1e-6
