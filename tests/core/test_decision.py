"""The decision rules against greedy loops, and the probabilities of partitions against torch.distributions."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Bernoulli

from split_core.decision import Decision, Rule, check_reachable, decision_entropy, existing, log_prob
from split_core.errors import SplitError
from split_core.quadtree import build_layout, split_cost, uniform_splits, valid_at
from split_core.types import Grid, Splits
from strategies import cases, grids, masks_of, random_logits, seeds, validity_of

CPU = torch.device("cpu")
Parent = tuple[int, int, int, int]
"""Image, scale, row and column."""


def cost_table(grid: Grid, valid: Tensor | None, batch: int) -> tuple[dict[Parent, int], list[int], list[int]]:
    """Tokens that each parent's split adds, and for each image its coarse tokens and its valid cells."""
    costs = [c.expand(batch, -1).unflatten(1, grid.shape(s)) for s, c in enumerate(split_cost(grid, valid, CPU), 1)]
    table = {
        (image, s, row, col): int(costs[s - 1][image, row, col])
        for s in range(1, grid.stages + 1)
        for image, row, col in itertools.product(*(range(n) for n in costs[s - 1].shape))
    }
    levels = [level.expand(batch, -1, -1).flatten(1).sum(1).tolist() for level in valid_at(grid, valid, CPU)]
    return table, levels[-1], levels[0]


def greedy(
    logits: tuple[Tensor, ...], grid: Grid, valid: Tensor | None, images: list[int], budget: float
) -> set[Parent]:
    """Best first: of all parents that may split now, split the best; stop when it would exceed the budget.

    A parent competes with the lowest logit on its path. Ties go to the coarser, then to the earlier in raster
    order, then to the earlier image.
    """
    table, coarse, cells = cost_table(grid, valid, logits[0].shape[0])
    shaped = [x.unflatten(1, grid.shape(s)) for s, x in enumerate(logits, start=1)]
    spent = sum(coarse[i] for i in images)
    allowed = math.floor(budget * sum(cells[i] for i in images) + 1e-6)
    rows, cols = grid.shape(grid.stages)
    top = grid.stages
    frontier = {
        (i, top, r, c): float(shaped[-1][i, r, c]) for i, r, c in itertools.product(images, range(rows), range(cols))
    }
    chosen: set[Parent] = set()
    while frontier:
        parent = min(frontier, key=lambda p: (-frontier[p], -p[1], p[2], p[3], p[0]))
        capped = frontier.pop(parent)
        if spent + table[parent] > allowed:
            break
        spent += table[parent]
        chosen.add(parent)
        image, scale, row, col = parent
        if scale > 1:
            for r, c in itertools.product((2 * row, 2 * row + 1), (2 * col, 2 * col + 1)):
                frontier[image, scale - 1, r, c] = min(capped, float(shaped[scale - 2][image, r, c]))
    return chosen


def parents(splits: Splits) -> set[Parent]:
    return {
        (image, s, row, col)
        for s, mask in enumerate(splits.masks, start=1)
        for image, row, col in mask.nonzero().tolist()
    }


@st.composite
def scored(draw: st.DrawFn) -> tuple[Grid, tuple[Tensor, ...], Tensor | None, float]:
    """A canvas, logits with many ties, validity, and where the budget lies between the coarsest and the finest."""
    grid = draw(grids(largest=9))
    batch = draw(st.integers(1, 3))
    logits = random_logits(grid, batch, draw(seeds))
    if draw(st.booleans()):
        logits = tuple(x.round() for x in logits)
    return grid, logits, draw(validity_of(grid, batch)), draw(st.floats(0, 1))


def budget_at(share: float, grid: Grid, valid: Tensor | None, batch: int) -> float:
    """A budget that every image can meet."""
    _, coarse, cells = cost_table(grid, valid, batch)
    unit = 1 << grid.stages
    rows, cols = grid.cells
    canvas = -(-rows // unit) * -(-cols // unit) / (rows * cols)
    floor = max(canvas, *(a / n for a, n in zip(coarse, cells, strict=True)))
    return floor + (1 - floor) * share


@given(scored())
def test_image_rule_is_the_greedy_loop_and_no_image_exceeds_its_budget(drawn) -> None:
    grid, logits, valid, share = drawn
    budget = budget_at(share, grid, valid, len(logits[0]))
    splits = Decision("image", budget)(logits, grid, valid)
    expected = [greedy(logits, grid, valid, [i], budget) for i in range(splits.batch)]
    assert parents(splits) == set().union(*expected)
    assert (build_layout(splits, valid).token_fraction <= budget + 1e-6).all()


@given(scored())
def test_image_rule_spends_all_it_can(drawn) -> None:
    """With the same cost everywhere the budget is met to within one split."""
    grid, logits, _, share = drawn
    grid = Grid(grid.shape(0), grid.stages)
    budget = budget_at(share, grid, None, 1)
    layout = build_layout(Decision("image", budget)(logits, grid))
    left = math.floor(budget * grid.size(0) + 1e-6) - layout.counts
    assert ((left >= 0) & ((left < 3) | (layout.token_fraction == 1))).all()


@given(scored())
def test_batch_rule_is_the_greedy_loop_over_all_images(drawn) -> None:
    grid, logits, valid, share = drawn
    budget = budget_at(share, grid, valid, len(logits[0]))
    splits = Decision("batch", budget)(logits, grid, valid)
    assert parents(splits) == greedy(logits, grid, valid, list(range(splits.batch)), budget)
    layout = build_layout(splits, valid)
    assert layout.counts.sum() <= budget * layout.valid_cells.sum() + 1e-3


@given(scored())
def test_every_rule_returns_nested_splits(drawn) -> None:
    grid, logits, valid, share = drawn
    budget = budget_at(share, grid, valid, len(logits[0]))
    for rule in ("threshold", "sample", "image", "batch"):
        splits = Decision(rule, budget)(logits, grid, valid)
        assert all(torch.equal(a, b) for a, b in zip(splits.masks, splits.nested().masks, strict=True))


@pytest.mark.parametrize("side", [7, 10, 14])
def test_a_budget_that_is_an_exact_number_of_tokens_spends_exactly_that(side: int) -> None:
    grid = Grid((2 * side, 2 * side), 1)
    n, logits = grid.size(0), random_logits(grid, 1, seed=side)
    for tokens in range(grid.size(1), n + 1, 3):
        assert build_layout(Decision("image", tokens / n)(logits, grid)).lengths == (tokens,)


def test_images_of_a_batch_compete_under_the_batch_rule_only() -> None:
    grid = Grid((4, 4), 1)
    logits = (torch.tensor([[9.0, 8, 7, 6], [1.0, 2, 3, 4]]),)
    assert build_layout(Decision("image", 0.65)(logits, grid)).lengths == (10, 10)
    assert build_layout(Decision("batch", 0.65)(logits, grid)).lengths == (16, 4)


def test_coarse_goes_before_fine_on_ties() -> None:
    grid = Grid((8, 8), 2)
    logits = (torch.full((1, 16), 5.0), torch.tensor([[1.0, 1, 1, 1]]))
    splits = Decision("image", 16 / 64)(logits, grid)
    assert splits.masks[1].all()
    assert not splits.masks[0].any()


def test_a_budget_below_the_coarsest_partition_is_refused_with_the_numbers() -> None:
    with pytest.raises(SplitError) as caught:
        check_reachable(0.1, Grid((5, 6), 2))
    line = str(caught.value)
    for part in ("budget 0.1", "stages=2", "5x6", "at least 4 tokens", "0.1333"):
        assert part in line
    assert "\n" not in line
    check_reachable(4 / 30, Grid((5, 6), 2))


@pytest.mark.parametrize("rule", ["image", "batch"])
def test_where_even_coarse_patches_exceed_the_budget_nothing_splits(rule: str) -> None:
    grid = Grid((5, 6), 2)
    for budget in (0.1, 4 / 30):
        assert build_layout(Decision(rule, budget)(random_logits(grid, 2, seed=0), grid)).lengths == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("treshold",), "no decision rule is called 'treshold'. Did you mean threshold?"),
        (("image",), "decision rule 'image' needs a budget, e.g. budget=0.7"),
        (("batch",), "decision rule 'batch' needs a budget"),
        (("image", 0.0), r"budget 0.0 is not a token fraction; it must lie in \(0, 1\]"),
        (("image", 1.5), "budget 1.5 is not a token fraction"),
        (("threshold", float("nan")), "budget nan is not a token fraction"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(arguments: tuple, line: str) -> None:
    with pytest.raises(SplitError, match=line):
        _unchecked(*arguments)


def _unchecked(rule: str, budget: float | None = None) -> Decision:
    """Decision as a user gets it, without the shape checks that tests put on top."""
    decision = Decision("threshold")
    object.__setattr__(decision, "rule", rule)
    object.__setattr__(decision, "budget", budget)
    decision.__post_init__()
    return decision


@given(grids(), seeds, st.floats(-2, 2))
def test_threshold_splits_where_the_probability_exceeds_one_half(grid: Grid, seed: int, offset: float) -> None:
    logits = random_logits(grid, 2, seed)
    own = Splits(tuple((x + offset > 0).unflatten(1, grid.shape(s)) for s, x in enumerate(logits, 1)), grid).nested()
    splits = Decision("threshold", offset=offset)(logits, grid)
    same = torch.cat([(a == b).flatten() for a, b in zip(splits.masks, own.masks, strict=True)])
    near = min(float((x + offset).abs().min()) for x in logits) < 1e-6
    assert near or same.all()
    zero = tuple(torch.zeros_like(x) for x in logits)
    assert not any(mask.any() for mask in Decision("threshold")(zero, grid).masks)  # one half does not exceed one half


def test_sample_splits_as_often_as_the_probability_says() -> None:
    grid, draws = Grid((8, 8), 2), 4000
    logits = tuple(x.expand(draws, -1) for x in random_logits(grid, 1, seed=2, spread=1.5))
    splits = Decision("sample", offset=0.3)(logits, grid, generator=torch.Generator().manual_seed(0))
    p = [(x[0] + 0.3).sigmoid() for x in logits]
    expected = [p[0] * p[1].view(2, 2).repeat_interleave(2, 0).repeat_interleave(2, 1).flatten(), p[1]]
    for mask, chance in zip(splits.masks, expected, strict=True):
        spread = (chance * (1 - chance) / draws).sqrt()
        assert ((mask.flatten(1).float().mean(0) - chance).abs() < 4.5 * spread + 1e-4).all()


def test_sample_follows_its_generator() -> None:
    grid, logits = Grid((8, 8), 2), random_logits(Grid((8, 8), 2), 3, seed=2)
    first, again, other = (
        Decision("sample")(logits, grid, generator=torch.Generator().manual_seed(seed)).masks for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def holds_picture(case: Case, image: int, scale: int, row: int, col: int) -> bool:
    """Whether any fine cell under a parent does."""
    side = 1 << scale
    block = case.holds_picture[image, row * side : (row + 1) * side, col * side : (col + 1) * side]
    return bool(block.any())


@given(cases(most_images=2, largest=8, most_stages=2), seeds)
def test_log_prob_and_entropy_are_those_of_the_decisions_taken(case, seed: int) -> None:
    """One Bernoulli after the other, down the tree."""
    grid, splits = case.grid, case.splits
    logits = random_logits(grid, case.batch, seed)
    shaped = [x.unflatten(1, grid.shape(s)).tolist() for s, x in enumerate(logits, start=1)]
    masks = [mask.tolist() for mask in splits.masks]

    def walk(image: int, scale: int, row: int, col: int) -> tuple[float, float]:
        if not holds_picture(case, image, scale, row, col):
            return 0.0, 0.0  # nothing to decide
        split = masks[scale - 1][image][row][col]
        p = 1 / (1 + math.exp(-shaped[scale - 1][image][row][col]))
        totals = [(math.log(p if split else 1 - p), -p * math.log(p) - (1 - p) * math.log(1 - p))]
        if split and scale > 1:
            children = itertools.product((2 * row, 2 * row + 1), (2 * col, 2 * col + 1))
            totals += [walk(image, scale - 1, r, c) for r, c in children]
        return sum(t[0] for t in totals), sum(t[1] for t in totals)

    rows, cols = grid.shape(grid.stages)
    expected = [
        [walk(image, grid.stages, r, c) for r, c in itertools.product(range(rows), range(cols))]
        for image in range(case.batch)
    ]
    logs, entropies = (torch.tensor([sum(t[k] for t in image) for image in expected]) for k in (0, 1))
    torch.testing.assert_close(log_prob(logits, splits, case.valid), logs, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(decision_entropy(logits, splits, case.valid), entropies, atol=1e-4, rtol=1e-5)


@given(cases(most_stages=1), seeds)
def test_log_prob_and_entropy_agree_with_torch_distributions(case, seed: int) -> None:
    logits = random_logits(case.grid, case.batch, seed)
    coins = Bernoulli(logits=logits[0])
    mask = case.masks[0].flatten(1).float()
    asked = existing(case.splits, case.valid)[0]
    torch.testing.assert_close(log_prob(logits, case.splits, case.valid), (coins.log_prob(mask) * asked).sum(1))
    torch.testing.assert_close(decision_entropy(logits, case.splits, case.valid), (coins.entropy() * asked).sum(1))


@pytest.mark.parametrize("grid", [Grid((2, 4), 1), Grid((4, 4), 2), Grid((3, 6), 2)], ids=str)
def test_probabilities_of_all_partitions_sum_to_one(grid: Grid) -> None:
    logits = random_logits(grid, 1, seed=4)
    sizes = [grid.size(s) for s in range(1, grid.stages + 1)]
    rows = torch.tensor(list(itertools.product([False, True], repeat=sum(sizes))))
    every = Splits(tuple(p.unflatten(1, grid.shape(s)) for s, p in enumerate(rows.split(sizes, 1), start=1)), grid)
    asked = existing(every)  # the mask of a parent in padding makes no difference
    codes = torch.cat([mask.flatten(1) & a for mask, a in zip(every.nested().masks, asked, strict=True)], 1)
    distinct = codes.unique(dim=0)
    partitions = Splits(tuple(p.unflatten(1, grid.shape(s)) for s, p in enumerate(distinct.split(sizes, 1), 1)), grid)
    chance = log_prob(logits, partitions).exp()
    assert float(chance.sum()) == pytest.approx(1, abs=1e-5)
    entropy = (chance * decision_entropy(logits, partitions)).sum()  # chain rule: the entropy of the whole partition
    assert float(entropy) == pytest.approx(float(-(chance * chance.log()).sum()), abs=1e-4)


@given(cases())
def test_existing_are_the_parents_with_picture_whose_own_parent_split(case) -> None:
    asked = existing(case.splits, case.valid)
    nested = case.splits.nested().masks
    for s in range(1, case.grid.stages + 1):
        above = nested[s].tolist() if s < case.grid.stages else None
        expected = [
            holds_picture(case, image, s, row, col) and (above is None or above[image][row // 2][col // 2])
            for image, row, col in itertools.product(*map(range, nested[s - 1].shape))
        ]
        assert asked[s - 1].flatten().tolist() == expected


@pytest.mark.parametrize("rollouts", [1, 4])
def test_rollouts_reuse_the_logits_of_their_image(rollouts: int) -> None:
    grid = Grid((8, 8), 2)
    logits = random_logits(grid, 3, seed=0)
    repeated = tuple(x.repeat(rollouts, 1) for x in logits)
    splits = Decision("sample")(repeated, grid, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(log_prob(logits, splits), log_prob(repeated, splits), rtol=0, atol=0)
    torch.testing.assert_close(decision_entropy(logits, splits), decision_entropy(repeated, splits), rtol=0, atol=0)


@pytest.mark.parametrize("sign", [1, -1], ids=["sure_and_right", "sure_and_wrong"])
def test_saturated_logits_keep_values_and_gradients_finite(sign: int) -> None:
    """3,024 decisions: a picture of 1536 px in patches of 16 px, with three stages."""
    grid = Grid((96, 96), 3)
    assert sum(grid.size(s) for s in (1, 2, 3)) == 3024
    logits = tuple((90.0 * x.sign()).requires_grad_() for x in random_logits(grid, 1, seed=6))
    right = Decision("threshold")(logits, grid)
    splits = right if sign == 1 else Splits(tuple(~mask for mask in right.masks), grid).nested()
    total = log_prob(logits, splits)
    entropy = decision_entropy(logits, splits)
    asked = sum(int(e.sum()) for e in existing(splits))
    if sign == 1:
        assert abs(total.item()) < 1e-6
    else:
        assert -90.0 * asked <= total.item() <= -90.0 * grid.size(3)
    assert abs(entropy.item()) < 1e-6
    for value in (total, entropy):
        grads = torch.autograd.grad(value.sum(), logits, retain_graph=True, allow_unused=True)
        assert all(g is not None and g.isfinite().all() for g in grads)


def test_log_prob_is_float32_for_half_precision_logits() -> None:
    grid = Grid((32, 32), 1)
    logits = random_logits(grid, 2, seed=1)
    half = tuple(x.bfloat16() for x in logits)
    splits = uniform_splits(grid, 2, split=True)
    assert log_prob(half, splits).dtype == torch.float32
    torch.testing.assert_close(log_prob(half, splits), log_prob(tuple(x.float() for x in half), splits))


@given(st.data())
def test_log_prob_ignores_what_lies_below_an_unsplit_parent(data: st.DataObject) -> None:
    grid = data.draw(grids())
    masks = data.draw(masks_of(grid, 2))
    logits = random_logits(grid, 2, data.draw(seeds))
    splits = Splits(masks, grid)
    torch.testing.assert_close(log_prob(logits, splits), log_prob(logits, splits.nested()))


@pytest.mark.parametrize("rule", get_args(Rule))
def test_a_score_that_is_not_a_number_is_the_lowest(rule: Rule) -> None:
    grid = Grid((4, 4), 1)
    logits = [torch.tensor([[float("nan"), 1.0, 9.0, float("nan")], [2.0, 9.0, float("nan"), 9.0]])]
    splits = Decision(rule, 0.5)(logits, grid, None, torch.Generator().manual_seed(0))
    assert not splits.masks[0].flatten(1)[logits[0].isnan()].any()
    assert splits.masks[0].flatten(1)[0, 2]
