"""Logits -> Splits: the rules by which scores become a partition.

    threshold   split where sigmoid(logit) > 0.5 (Sec. 3.2; what a learned policy deploys)
    sample      split with probability sigmoid(logit) (Sec. 3.3; what it trains with)
    image       each image spends its budget, best first, and never more; one too small for it stays coarse
    batch       the batch spends its budget, best first: images compete for tokens (opt-in: it couples them)

A score that is not a number is the lowest there is.

Best first respects the quadtree: a parent cannot split before its own parent, so it competes with the lowest
score on its path, coarse before fine on ties (Quadformer's greedy order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from split_core.draws import uniform
from split_core.errors import SplitError, unknown
from split_core.quadtree import split_cost, valid_at
from split_core.types import Grid, Splits, upsample

Rule = Literal["threshold", "sample", "image", "batch"]
Logits = Sequence[Float[Tensor, "b _"]]


@dataclass(frozen=True)
class Decision:
    """How logits become splits.

    Args:
        rule: one of the four rules above.
        budget: token fraction rho in (0, 1]; the two budget rules need it.
        offset: added to every logit under `threshold` and `sample`; a calibration to a token fraction sets it
            (`split_core.calibrate`).

    Raises:
        SplitError: unknown rule, or a budget outside (0, 1] or missing.
    """

    rule: Rule = "threshold"
    budget: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise SplitError(unknown("decision rule", str(self.rule), get_args(Rule)))
        if self.budget is not None and not 0 < self.budget <= 1:
            raise SplitError(f"budget {self.budget} is not a token fraction; it must lie in (0, 1]")
        if self.rule in ("image", "batch") and self.budget is None:
            raise SplitError(f"decision rule {self.rule!r} needs a budget, e.g. budget=0.7")

    def __call__(
        self,
        logits: Logits,
        grid: Grid,
        valid: Bool[Tensor, "b r c"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Splits:
        """Splits for logits[s - 1] = (b, n_s), s = 1 .. S."""
        if self.rule == "threshold":
            masks = [logit > -self.offset for logit in logits]
        elif self.rule == "sample":
            masks = [_uniform(logit, generator) < (logit.float() + self.offset).sigmoid() for logit in logits]
        else:
            return best_first(logits, grid, self.budget, valid, whole_batch=self.rule == "batch")  # type: ignore[arg-type]
        shaped = (m.unflatten(1, grid.shape(s)) for s, m in enumerate(masks, start=1))
        return Splits(tuple(shaped), grid).nested()


def best_first(
    logits: Logits, grid: Grid, budget: float, valid: Bool[Tensor, "b r c"] | None, *, whole_batch: bool = False
) -> Splits:
    """Split the best-scored parents until the next split would exceed floor(budget * N) tokens.

    Where the coarsest partition alone exceeds them (an image of one patch at a budget of 0.7) nothing splits.
    """
    device = logits[0].device
    b = logits[0].shape[0]
    capped = reachable(logits, grid)
    order_key = torch.cat(capped[::-1], 1)  # coarse first: a stable sort then keeps parents before children
    costs = torch.cat([c.expand(b, -1) for c in split_cost(grid, valid, device)[::-1]], 1)
    levels = valid_at(grid, valid, device)
    coarse = levels[-1].flatten(1).sum(1).expand(b)
    cells = levels[0].flatten(1).sum(1).expand(b)
    if whole_batch:
        # Position-major, so that ties between images stay parent-first inside each image.
        n = order_key.shape[1]
        chosen = _spend(
            order_key.T.reshape(1, -1),
            costs.T.reshape(1, -1),
            _allowance(cells.sum()[None], coarse.sum()[None], budget),
        )
        chosen = chosen.view(n, b).T
    else:
        chosen = _spend(order_key, costs, _allowance(cells, coarse, budget))
    masks, start = [], 0
    for s in range(grid.stages, 0, -1):
        masks.append(chosen[:, start : start + grid.size(s)].unflatten(1, grid.shape(s)))
        start += grid.size(s)
    return Splits(tuple(masks[::-1]), grid)


def check_reachable(budget: float, grid: Grid) -> None:
    """Refuse a budget below the coarsest partition of the canvas (a rule that may never exceed it cannot meet it)."""
    unit = 1 << grid.stages
    coarse = -(-grid.cells[0] // unit) * -(-grid.cells[1] // unit)
    floor = coarse / (grid.cells[0] * grid.cells[1])
    if budget < floor - 1e-9:
        raise SplitError(
            f"budget {budget} cannot be met: with stages={grid.stages} a grid of {grid.cells[0]}x{grid.cells[1]} "
            f"patches has at least {coarse} tokens, a fraction of {floor:.4g}. Raise the budget to that or use more "
            f"stages."
        )


def reachable(logits: Logits, grid: Grid) -> list[Tensor]:
    """Each parent's score, capped by the lowest score on its path to the root; index s - 1."""
    capped = [logit.float().nan_to_num(float("-inf"), float("inf"), float("-inf")) for logit in logits]
    for s in range(grid.stages - 1, 0, -1):
        above = upsample(capped[s].unflatten(1, grid.shape(s + 1))).flatten(1)
        capped[s - 1] = torch.minimum(capped[s - 1], above)
    return capped


def _allowance(cells: Int[Tensor, " g"], coarse: Int[Tensor, " g"], budget: float) -> Int[Tensor, " g"]:
    """Tokens that may be added to the coarse partition.

    The 1e-6 keeps 0.7 * 10 from flooring to 6; float64, because in float32 a budget of 418 / 784 floors to 417.
    """
    return (cells.double() * budget + 1e-6).floor().long() - coarse


def _spend(key: Float[Tensor, "g n"], cost: Int[Tensor, "g n"], allowance: Int[Tensor, " g"]) -> Bool[Tensor, "g n"]:
    order = key.sort(dim=1, descending=True, stable=True).indices
    spent = cost.gather(1, order).cumsum(1)
    return torch.zeros_like(cost, dtype=torch.bool).scatter_(1, order, spent <= allowance[:, None])


def log_prob(logits: Logits, splits: Splits, valid: Bool[Tensor, "b r c"] | None = None) -> Float[Tensor, " kb"]:
    """log pi(M | x): the sum over the parents that exist of Bernoulli log-probabilities, in float32.

    Stable for any logit: log sigmoid(l) = -softplus(-l). Rollouts (splits.batch = K * b) reuse the b logits.
    """
    return log_probs(logits, splits, valid).sum(1)


def log_probs(logits: Logits, splits: Splits, valid: Bool[Tensor, "b r c"] | None = None) -> Float[Tensor, "kb n"]:
    """The same decision by decision, parents of all scales from 1 on; 0 for those that were not asked."""
    return _over_existing(logits, splits, valid, lambda logit, chosen: -F.softplus(torch.where(chosen, -logit, logit)))


def decision_entropy(
    logits: Logits, splits: Splits, valid: Bool[Tensor, "b r c"] | None = None
) -> Float[Tensor, " kb"]:
    """Entropy of the Bernoulli decisions, in nats, summed over the parents that exist in `splits`."""
    terms = _over_existing(logits, splits, valid, lambda logit, _: F.softplus(logit) - logit * logit.sigmoid())
    return terms.sum(1)


def existing(splits: Splits, valid: Bool[Tensor, "b r c"] | None = None) -> tuple[Bool[Tensor, "kb _"], ...]:
    """Which parents were asked: all at the coarsest stage, below it those whose own parent split.

    A parent wholly in padding has nothing to decide and is never asked.

    Args:
        valid: fine cells that hold picture, of each image (rollouts repeat it); None means the whole canvas.
    """
    masks = splits.nested().masks
    asked = [*(upsample(mask) for mask in masks[1:]), torch.ones_like(masks[-1])]
    if valid is not None or splits.grid.padded:
        levels = valid_at(splits.grid, valid, masks[0].device)[1:]
        asked = [a & v.repeat(a.shape[0] // v.shape[0], 1, 1) for a, v in zip(asked, levels, strict=True)]
    return tuple(a.flatten(1) for a in asked)


def _over_existing(logits: Logits, splits: Splits, valid: Tensor | None, term) -> Float[Tensor, "kb n"]:  # type: ignore[no-untyped-def]
    values = []
    for logit, mask, asked in zip(logits, splits.masks, existing(splits, valid), strict=True):
        times = mask.shape[0] // logit.shape[0]
        values.append(term(logit.float().repeat(times, 1), mask.flatten(1)) * asked)
    return torch.cat(values, 1)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return uniform(like.shape, generator, like.device)
