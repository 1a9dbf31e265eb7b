"""The index laws of Layout, against a quadtree that recurses cell by cell."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from split_core.decision import Decision
from split_core.quadtree import (
    build_layout,
    canvas_cells,
    coarse_layout,
    expected_fraction,
    leaf_scale,
    leaf_weights,
    split_cost,
    uniform_probability,
    uniform_splits,
    valid_at,
)  # fmt: skip
from split_core.types import Grid, Layout, Splits, upsample
from strategies import Case, cases, random_logits

Leaf = tuple[int, int, int]
"""Scale, row and column (in fine cells) of one token."""


def leaves(masks: list[list[list[bool]]], valid: list[list[bool]], scale: int, row: int, col: int) -> list[Leaf]:
    """Tokens of one image below the node at `scale` whose top-left fine cell is (row, col)."""
    side = 2**scale
    if not any(valid[row + i][col + j] for i in range(side) for j in range(side)):
        return []
    if scale == 0 or not masks[scale - 1][row // side][col // side]:
        return [(scale, row, col)]
    half = side // 2
    corners = [(row + i, col + j) for i in (0, half) for j in (0, half)]
    return [leaf for corner in corners for leaf in leaves(masks, valid, scale - 1, *corner)]


def naive(case: Case) -> list[list[Leaf]]:
    """The tokens of each image in raster order."""
    rows, cols = case.grid.shape(0)
    side = 2**case.grid.stages
    tokens = []
    for image in range(case.batch):
        masks = [mask[image].tolist() for mask in case.masks]
        valid = case.holds_picture[image].tolist()
        roots = [(i, j) for i in range(0, rows, side) for j in range(0, cols, side)]
        found = [leaf for root in roots for leaf in leaves(masks, valid, case.grid.stages, *root)]
        tokens.append(sorted(found, key=lambda leaf: (leaf[1], leaf[2])))
    return tokens


def tokens_of(layout: Layout) -> list[list[Leaf]]:
    triples = list(zip(layout.scale.tolist(), layout.row.tolist(), layout.col.tolist(), strict=True))
    ends = layout.cu_seqlens.tolist()
    return [triples[a:b] for a, b in itertools.pairwise(ends)]


@given(cases())
def test_layout_is_the_recursive_quadtree(case: Case) -> None:
    expected = naive(case)
    layout = build_layout(case.splits, case.valid)
    assert tokens_of(layout) == expected
    assert layout.lengths == tuple(len(tokens) for tokens in expected)
    assert layout.counts.tolist() == list(layout.lengths)
    assert layout.total == sum(layout.lengths)
    assert layout.image.tolist() == [i for i, n in enumerate(layout.lengths) for _ in range(n)]
    assert layout.cu_seqlens.dtype == torch.int32


@given(cases())
def test_every_valid_cell_has_exactly_one_owner_and_padding_has_none(case: Case) -> None:
    layout = build_layout(case.splits, case.valid)
    owner = torch.full((case.batch, *case.grid.shape(0)), -1)
    times = torch.zeros_like(owner)
    flat = [(i, *leaf) for i, tokens in enumerate(naive(case)) for leaf in tokens]
    for token, (image, scale, row, col) in enumerate(flat):
        window = (image, slice(row, row + 2**scale), slice(col, col + 2**scale))
        owner[window] = token
        times[window] += 1
    holds = case.holds_picture
    assert (times[holds] == 1).all()
    assert torch.equal(layout.owner, owner.masked_fill(~holds, -1))
    assert layout.full == (case.valid is None and not case.grid.padded)
    assert not layout.full or (layout.owner >= 0).all()


@given(cases())
def test_areas_and_fractions_count_valid_cells_only(case: Case) -> None:
    layout = build_layout(case.splits, case.valid)
    holds = case.holds_picture
    cells = holds.flatten(1).sum(1)
    assert torch.equal(layout.valid_cells, cells)
    assert torch.equal(layout.area, torch.tensor([int((layout.owner == t).sum()) for t in range(layout.total)]))
    assert (layout.area >= 1).all()
    assert torch.equal(torch.zeros_like(cells).index_add(0, layout.image, layout.area), cells)
    torch.testing.assert_close(layout.token_fraction, layout.counts / cells)
    assert (layout.token_fraction > 0).all()
    assert (layout.token_fraction <= 1).all()
    scales = layout.scale.tolist()
    fine = [token >= 0 and scales[token] == 0 for token in layout.owner.flatten().tolist()]
    assert layout.fine().flatten().tolist() == fine


@given(cases())
def test_cell_is_the_row_in_the_concatenated_pyramid(case: Case) -> None:
    layout = build_layout(case.splits, case.valid)
    order = [
        (s, i << s, j << s)
        for s in range(case.grid.stages + 1)
        for i, j in itertools.product(*(range(n) for n in case.grid.shape(s)))
    ]
    assert case.grid.total == len(order)
    leaves_ = [leaf for tokens in naive(case) for leaf in tokens]
    assert [order[c] for c in layout.cell.tolist()] == leaves_


@given(cases())
def test_count_is_the_coarse_count_plus_the_costs_of_the_splits(case: Case) -> None:
    device = torch.device("cpu")
    coarse = valid_at(case.grid, case.valid, device)[-1].flatten(1).sum(1)
    costs = split_cost(case.grid, case.valid, device)
    spent = sum(
        ((mask.flatten(1) * cost).sum(1) for mask, cost in zip(case.splits.nested().masks, costs, strict=True)),
        start=coarse,
    )
    layout = build_layout(case.splits, case.valid)
    assert torch.equal(layout.counts, spent)
    if layout.full:  # the paper's G_S^2 + 3 * splits
        splits = sum(mask.flatten(1).sum(1) for mask in case.splits.nested().masks)
        assert torch.equal(layout.counts, case.grid.size(case.grid.stages) + 3 * splits)


@given(cases())
def test_nested_clears_what_lies_below_an_unsplit_parent_and_changes_no_token(case: Case) -> None:
    nested = case.splits.nested()
    for s in range(1, case.grid.stages):
        above = nested.masks[s].tolist()
        below = nested.masks[s - 1].tolist()
        given_ = case.masks[s - 1].tolist()
        for image, row, col in itertools.product(*(range(n) for n in nested.masks[s - 1].shape)):
            parent = above[image][row // 2][col // 2]
            assert below[image][row][col] == (given_[image][row][col] and parent)
    assert torch.equal(nested.masks[-1], case.masks[-1])
    assert tokens_of(build_layout(nested, case.valid)) == tokens_of(build_layout(case.splits, case.valid))


@given(cases(), st.randoms(use_true_random=False))
def test_permuting_the_images_permutes_the_layout(case: Case, random) -> None:
    order = list(range(case.batch))
    random.shuffle(order)
    splits = Splits(tuple(mask[order] for mask in case.masks), case.grid)
    permuted = build_layout(splits, None if case.valid is None else case.valid[order])
    plain = build_layout(case.splits, case.valid)
    assert tokens_of(permuted) == [tokens_of(plain)[i] for i in order]
    starts, own = plain.cu_seqlens[order], permuted.cu_seqlens[:-1]
    shift = (own - starts)[:, None, None]
    assert torch.equal(permuted.owner, torch.where(plain.owner[order] >= 0, plain.owner[order] + shift, -1))


@given(cases(), st.data())
def test_one_more_split_never_loses_a_token_or_a_fine_cell(case: Case, data: st.DataObject) -> None:
    masks = [mask.clone() for mask in case.masks]
    chosen = masks[data.draw(st.integers(0, case.grid.stages - 1))].view(-1)
    chosen[data.draw(st.integers(0, chosen.numel() - 1))] = True
    before = build_layout(case.splits, case.valid)
    after = build_layout(Splits(tuple(masks), case.grid), case.valid)
    assert (after.counts >= before.counts).all()
    assert (after.fine() | ~before.fine()).all()
    assert (leaf_scale(Splits(tuple(masks), case.grid)) <= leaf_scale(case.splits)).all()


@given(cases())
def test_the_ends_of_the_range(case: Case) -> None:
    fine = build_layout(uniform_splits(case.grid, case.batch, split=True), case.valid)
    assert (fine.scale == 0).all()
    assert (fine.token_fraction == 1).all()
    coarse = build_layout(uniform_splits(case.grid, case.batch, split=False), case.valid)
    assert (coarse.scale == case.grid.stages).all()
    between = build_layout(case.splits, case.valid).counts
    assert ((coarse.counts <= between) & (between <= fine.counts)).all()


def test_bottom_and_right_padding_makes_no_token() -> None:
    """230 x 210 px on 16 px patches: 15 x 14 cells on a padded grid of 16 x 16."""
    grid = Grid((15, 14), 2)
    assert (grid.shape(0), grid.shape(2), grid.padded) == ((16, 16), (4, 4), True)
    fine = build_layout(uniform_splits(grid, 2, split=True))
    assert fine.lengths == (15 * 14, 15 * 14)
    assert (fine.owner[:, 15:] == -1).all()
    assert (fine.owner[:, :, 14:] == -1).all()
    coarse = build_layout(uniform_splits(grid, 2, split=False))
    assert coarse.lengths == (16, 16)
    assert coarse.area.view(2, 4, 4)[0].tolist() == [[16, 16, 16, 8]] * 3 + [[12, 12, 12, 6]]


def test_an_image_without_a_valid_cell_is_refused_by_number() -> None:
    grid = Grid((4, 4), 1)
    valid = torch.ones(3, 4, 4, dtype=torch.bool)
    valid[1] = False
    with pytest.raises(ValueError, match="image 1 of the batch has no valid cell"):
        build_layout(uniform_splits(grid, 3, split=True), valid)


@pytest.mark.parametrize("cells", [(4, 4), (3, 5)])
def test_a_batch_of_none(cells: tuple[int, int]) -> None:
    layout = build_layout(uniform_splits(Grid(cells, 2), 0, split=True))
    assert (layout.batch, layout.total, layout.lengths) == (0, 0, ())
    assert layout.cu_seqlens.tolist() == [0]
    for empty in (layout.cell, layout.area, layout.counts, layout.token_fraction, layout.fine()):
        assert empty.numel() == 0


@pytest.mark.parametrize(("factor", "shape"), [(1, (2, 3)), (2, (4, 6)), (4, (8, 12))])
def test_upsample_repeats_each_cell(factor: int, shape: tuple[int, int]) -> None:
    mask = torch.arange(6).view(1, 2, 3)
    expected = torch.tensor([[[i // factor * 3 + j // factor for j in range(shape[1])] for i in range(shape[0])]])
    assert torch.equal(upsample(mask, factor), expected)


def enumerate_splits(grid: Grid) -> Splits:
    """Every assignment of booleans to parents, one per row of the batch."""
    sizes = [grid.size(s) for s in range(1, grid.stages + 1)]
    rows = torch.tensor(list(itertools.product([False, True], repeat=sum(sizes))))
    return Splits(tuple(p.unflatten(1, grid.shape(s)) for s, p in enumerate(rows.split(sizes, 1), start=1)), grid)


def chances(logits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Split probabilities."""
    return tuple(logit.sigmoid() for logit in logits)


TINY = [Grid((2, 4), 1), Grid((3, 5), 1), Grid((4, 4), 2), Grid((3, 2), 2), Grid((4, 6), 2)]


@pytest.mark.parametrize("grid", TINY, ids=str)
def test_expected_fraction_is_the_mean_over_all_masks(grid: Grid) -> None:
    logits = tuple(x.double() for x in random_logits(grid, 1, seed=3))
    every = enumerate_splits(grid)
    chance = torch.ones(every.batch, dtype=torch.float64)
    for logit, mask in zip(logits, every.masks, strict=True):
        p = logit.sigmoid()
        chance = chance * torch.where(mask.flatten(1), p, 1 - p).prod(1)
    torch.testing.assert_close(chance.sum(), torch.ones((), dtype=torch.float64))
    expected = (chance * build_layout(every).token_fraction.double()).sum()
    torch.testing.assert_close(expected_fraction(chances(logits), grid)[0], expected, atol=1e-7, rtol=0)


def test_expected_fraction_counts_valid_cells_of_each_image() -> None:
    grid = Grid((4, 4), 2)
    valid = canvas_cells(grid).repeat(2, 1, 1)
    valid[1, :, 3] = False
    valid[1, 3] = False
    logits = random_logits(grid, 2, seed=5)
    every = enumerate_splits(grid)
    for image in range(2):
        chance = torch.ones(every.batch)
        for logit, mask in zip(logits, every.masks, strict=True):
            p = logit[image].sigmoid()
            chance = chance * torch.where(mask.flatten(1), p, 1 - p).prod(1)
        fractions = build_layout(every, valid[image].expand(every.batch, -1, -1)).token_fraction
        torch.testing.assert_close(expected_fraction(chances(logits), grid, valid)[image], (chance * fractions).sum())


@pytest.mark.parametrize("grid", TINY, ids=str)
def test_expected_fraction_has_the_right_gradient(grid: Grid) -> None:
    def value(*logits: Tensor) -> Tensor:
        return expected_fraction(chances(logits), grid)

    inputs = tuple(x.double().requires_grad_() for x in random_logits(grid, 2, seed=1))
    assert torch.autograd.gradcheck(value, inputs)


@given(cases(most_stages=3))
def test_leaf_weights_of_binary_gates_are_the_leaves(case: Case) -> None:
    gates = tuple(mask.flatten(1).double() for mask in case.masks)
    weights = torch.cat(leaf_weights(gates, case.grid, case.valid), 1)
    layout = build_layout(case.splits, case.valid)
    expected = torch.zeros_like(weights)
    expected[layout.image, layout.cell] = 1
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("grid", "fraction"), [(Grid((8, 8), 1), 0.5), (Grid((8, 8), 2), 0.4), (Grid((5, 7), 3), 0.8)])
def test_the_uniform_probability_spends_the_fraction(grid: Grid, fraction: float) -> None:
    chance = uniform_probability(grid, fraction)
    gates = [torch.full((1, grid.size(s)), chance, dtype=torch.float64) for s in range(1, grid.stages + 1)]
    assert expected_fraction(gates, grid).item() == pytest.approx(fraction, abs=1e-6)


def test_the_coarse_layout_is_that_of_no_split_and_kept() -> None:
    grid, cpu = Grid((5, 6), 2), torch.device("cpu")
    kept = coarse_layout(grid, 3, None, cpu)
    assert coarse_layout(grid, 3, None, cpu) is kept
    for field in ("image", "scale", "row", "col", "cu_seqlens", "owner"):
        assert torch.equal(getattr(kept, field), getattr(build_layout(uniform_splits(grid, 3, split=False)), field))


def test_saturated_logits_expect_what_the_threshold_rule_spends() -> None:
    grid = Grid((7, 9), 3)
    logits = tuple(90 * x.sign() for x in random_logits(grid, 3, seed=8))
    spent = build_layout(Decision("threshold")(logits, grid)).token_fraction
    torch.testing.assert_close(expected_fraction(chances(logits), grid), spent)
