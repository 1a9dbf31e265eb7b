"""Per-parent credit: what one more split would save, learned by regression (an extension of ours, not the paper's).

Whole-mask PPO learns from one number per rollout which of its many decisions were good. The union sequence
(`learn.union`) answers for every parent at once:

    v_i = -dE/dg_i      error saved by splitting parent i, at masks drawn at random

One backward yields a target per parent where PPO needs many rollouts, so that fewer images teach as much. The
network regresses v; its logit orders parents for any budget, and the threshold is set afterwards (`holds_budget` is
False). Masks are drawn at random with the split probability that spends the budget, not from the policy, whose own
masks would hide what its rejected parents were worth. Gates stand a little inside (`softness`): at exactly 0 the
slope in a key's weight says what the first trace of it would do, which may be anything, not what all of it would.
(DINOv2 ViT-S/14 on composites, 128 images: correlation with the true difference of splitting one parent .31 at
softness 0, .61 at .1, .54 at .25, .46 at .5.) Targets are divided by their running spread and clipped, since
a few images on which the error explodes would decide the fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from split_core.decision import existing
from split_core.draws import uniform
from split_core.learn.config import CreditConfig
from split_core.learn.estimator import ErrorOf, Estimator, EstimatorContext, Lesson
from split_core.learn.replay import Example, Replay
from split_core.learn.union import Gates, encode_union
from split_core.model import SplitViT
from split_core.quadtree import uniform_probability
from split_core.types import Pyramid, Splits

SPREAD_RATE = 0.05
"""Share of a batch in the running spread of the targets."""


class Credit(Estimator):
    """Regression of each parent's saved error.

    Args:
        config: masks per image, softness, clipping, replay.
        context: budget.
    """

    holds_budget: ClassVar[bool] = False

    def __init__(self, config: CreditConfig, context: EstimatorContext) -> None:
        self.config, self.context = config, context
        self.spread: float | None = None
        self.memory = Replay(config.replay)
        self._metrics: dict[str, float] = {}

    def losses(self, model: SplitViT, lesson: Lesson) -> Iterator[Tensor]:
        with torch.no_grad():
            pyramid = model.pyramid(lesson.images, lesson.valid)
        error, saved, asked = credit(
            model, pyramid, lesson.error_of, self._gates(pyramid, lesson.generator), self.config.masks,
            inside=self.config.softness > 0,
        )  # fmt: skip
        live = torch.cat([part.flatten() for part in asked])
        raw = torch.cat([part.flatten() for part in saved])[live]
        if not bool(live.any()):
            return
        spread = self.context.mean(float(raw.std()) if raw.numel() > 1 else 0.0)
        self.spread = spread if self.spread is None else self.spread + SPREAD_RATE * (spread - self.spread)
        target = tuple((part / max(self.spread, 1e-12)).clamp(-self.config.clip, self.config.clip) for part in saved)
        fresh = Example(pyramid, lesson.images, target, asked)
        fit = self._fit(model, fresh)
        yield fit
        for _ in range(self.config.repeats - 1 if self.memory else 0):
            yield self._fit(model, self.memory.draw(lesson.generator))
        self.memory.add(fresh)
        self._metrics = {
            "error": float(error.mean()),
            "saved_mean": float(raw.mean()),
            "saved_spread": self.spread,
            "fit": float(fit.detach()),
            "clipped": float((raw.abs() > self.config.clip * self.spread).float().mean()),
        }

    def _gates(self, pyramid: Pyramid, generator: torch.Generator | None) -> Gates:
        """Random masks, softened so that the derivative looks a little way to both sides."""
        grid, device = pyramid.grid, pyramid.levels[0].device
        chance = uniform_probability(grid, self.context.budget)
        soft, batch = self.config.softness, self.config.masks * pyramid.batch
        drawn = (uniform((batch, grid.size(s)), generator, device) < chance for s in range(1, grid.stages + 1))
        return tuple(soft + (1 - 2 * soft) * mask.float() for mask in drawn)

    def _fit(self, model: SplitViT, example: Example) -> Float[Tensor, ""]:
        model.policy.train()  # its dropout, if it has any, acts while it fits and never while it decides
        logits = model.logits(example.pyramid, example.images)
        model.policy.eval()
        losses, live = [], []
        for logit, value, asked in zip(logits, example.target, example.asked, strict=True):
            losses.append(F.huber_loss(logit.float(), value, reduction="none", delta=self.config.huber).flatten())
            live.append(asked.flatten())
        return torch.cat(losses)[torch.cat(live)].mean()

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        return {"spread": self.spread, "memory": self.memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.spread = state["spread"]
        self.memory.load_state_dict(state["memory"])


def credit(
    model: SplitViT, pyramid: Pyramid, error_of: ErrorOf, gates: Gates, times: int = 1, *, inside: bool = False
) -> tuple[Float[Tensor, " kb"], tuple[Float[Tensor, "image _"], ...], tuple[Bool[Tensor, "image _"], ...]]:
    """Error under the gates, -dE/dg of every parent (mean over an image's `times` masks), and who was asked.

    A parent below an unsplit one gets no derivative there; it counts where some mask asked it. Derivatives that are
    not finite are left out. `inside`: as for `encode_union`.
    """
    gates = tuple(gate.detach().requires_grad_() for gate in gates)
    with torch.enable_grad():
        error = error_of(encode_union(model, pyramid, gates, inside=inside)).float()
        slopes = torch.autograd.grad(error.sum(), gates)
    grid = pyramid.grid
    hard = Splits(tuple((g.detach() > 0.5).unflatten(1, grid.shape(s)) for s, g in enumerate(gates, start=1)), grid)
    saved, asked = [], []
    for slope, live in zip(slopes, existing(hard, pyramid.valid), strict=True):
        live = live & slope.isfinite()
        each = torch.where(live, -slope, 0).unflatten(0, (times, -1))
        count = live.unflatten(0, (times, -1)).sum(0)
        saved.append(each.sum(0) / count.clamp_min(1))
        asked.append(count > 0)
    return error.detach(), tuple(saved), tuple(asked)
