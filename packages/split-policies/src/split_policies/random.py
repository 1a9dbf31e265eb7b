"""Random splits that meet a token fraction on average (baseline of Sec. 4 and Table 14)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from split_core.draws import uniform
from split_core.policy import BackboneInfo, SplitPolicy, StageView
from split_core.quadtree import split_cost, valid_at
from split_core.types import Grid
from split_policies.configs import RandomConfig

CERTAIN = 17.0
"""|logit| of a sure choice: above any noise drawn, which the clamp of the uniform holds within 16.2."""


class Random(SplitPolicy):
    """Every parent splits with the same probability q, at every stage.

    The logit is logit(q) minus logistic noise, so the threshold rule is exactly a Bernoulli(q) draw and any rule that
    ranks parents ranks them uniformly at random. With a budget, q solves E[token fraction] = budget.
    """

    default_rule: ClassVar[str] = "threshold"
    stochastic: ClassVar[bool] = True

    def __init__(self, config: RandomConfig, info: BackboneInfo) -> None:
        super().__init__()
        self.q = config.q
        self.budget = info.budget

    @torch.no_grad()
    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        device = view.parents.device
        drawn = uniform(view.parents.shape[:2], view.generator, device)
        if self.budget is None:
            q = torch.full((1,), self.q, device=device)
        else:
            q = chance(self.budget, view.grid, view.pyramid.valid, device=device)
        return q[:, None].logit().clamp(-CERTAIN, CERTAIN) - drawn.clamp(1e-7, 1 - 1e-7).logit()


def chance(
    budget: float, grid: Grid, valid: Bool[Tensor, "b r c"] | None = None, *, device: torch.device | str = "cpu"
) -> Float[Tensor, " b"]:
    """The q at which E[tokens] / N = budget when every parent splits with probability q.

    E[tokens] = coarse + sum_s q^(S - s + 1) * (tokens that the splits at scale s add); on a canvas of whole coarse
    patches that is N (1 + 3 q + 12 q^2 + ...) / 4^S. Out of reach, q is the nearest of 0 and 1.

    Returns: one value, or one per image of `valid`.
    """
    device = torch.device(device)
    levels = valid_at(grid, valid, device)
    wanted = budget * levels[0].flatten(1).sum(1) - levels[-1].flatten(1).sum(1)
    added = [cost.sum(1).float() for cost in split_cost(grid, valid, device)[::-1]]
    power = torch.arange(1, grid.stages + 1, device=device)
    gain = torch.stack(added, dim=1)
    q = torch.ones_like(wanted)[:, None]
    # Increasing and convex on [0, 1]: Newton from above converges without overshoot, for S = 1 in one step.
    for _ in range(1 if grid.stages == 1 else 24):
        value = (gain * q**power).sum(1, keepdim=True)
        slope = (gain * power * q ** (power - 1)).sum(1, keepdim=True)
        q = (q - (value - wanted[:, None]) / slope.clamp_min(1e-6)).clamp(0, 1)
    return q.squeeze(1)
