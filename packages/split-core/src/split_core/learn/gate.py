"""The differentiable rivals of App. B: straight-through Gumbel-sigmoid gates on a relaxed forward.

    g = hard + soft - stop(soft),   soft = sigmoid((logit + logistic noise) / temperature),   hard = [soft > 1/2]
    L = mean E(g) + lambda E[P]

`relax` chooses what a gate between 0 and 1 means. union: every cell of every scale in one sequence, weighted
(`learn.union`), exact at binary gates. blend: an all-fine sequence whose tokens mix the embeddings of the scales over
them; cheaper to write and the rival that appendix B argues against, because what it trains is never what is deployed.
The token fraction enters in closed form, so its gradient is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.decision import Decision
from split_core.draws import uniform
from split_core.features import Features
from split_core.learn.config import GateConfig
from split_core.learn.dual import Dual
from split_core.learn.estimator import Estimator, EstimatorContext, Lesson
from split_core.learn.union import Gates, encode_union
from split_core.model import SplitViT
from split_core.quadtree import build_layout, expected_fraction, leaf_weights, uniform_splits
from split_core.types import Pyramid, upsample


class Gate(Estimator):
    """Pathwise gradient through relaxed splits.

    Args:
        config: relaxation, temperature, dual.
        context: budget and run length.
    """

    def __init__(self, config: GateConfig, context: EstimatorContext) -> None:
        self.config, self.context = config, context
        self.dual = Dual(config.dual, context.budget)
        self._metrics: dict[str, float] = {}

    def losses(self, model: SplitViT, lesson: Lesson) -> Iterator[Tensor]:
        with torch.no_grad():
            pyramid = model.pyramid(lesson.images, lesson.valid)
        logits = model.logits(pyramid, lesson.images)
        gates = tuple(straight_through(logit.float(), self.config.temperature, lesson.generator) for logit in logits)
        encode = encode_union if self.config.relax == "union" else encode_blend
        error = lesson.error_of(encode(model, pyramid, gates)).float().mean()
        expected = expected_fraction([logit.float().sigmoid() for logit in logits], pyramid.grid, pyramid.valid).mean()
        with torch.no_grad():
            layout = build_layout(Decision("threshold")(logits, pyramid.grid, pyramid.valid), pyramid.valid)
        deployed = float(layout.token_fraction.mean())
        weight = self.dual.value
        if self.dual.measuring:
            # Where E + lambda P is stationary along a common shift of the logits, lambda is the ratio of the slopes.
            slopes = [torch.autograd.grad(x, logits, retain_graph=True) for x in (error, expected)]
            up, down = (float(sum(part.sum() for part in slope)) for slope in slopes)
            self.dual.measure(self.context.mean(-up / max(down, 1e-8)))
        else:
            yield (error + weight * expected) / (1 + weight)
            measured = deployed if self.config.dual.measure == "deployed" else float(expected.detach())
            self.dual.update(self.context.mean(measured))
        self._metrics = {
            "lambda": weight, "error": float(error.detach()), "token_fraction": float(expected.detach()),
            "deployed_fraction": deployed,
        }  # fmt: skip

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        return {"dual": self.dual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dual.load_state_dict(state["dual"])


def straight_through(
    logit: Float[Tensor, "b n"], temperature: float, generator: torch.Generator | None = None
) -> Float[Tensor, "b n"]:
    """Binary gates, P(gate = 1) = sigmoid(logit), with the gradient of their relaxation."""
    chance = uniform(logit.shape, generator, logit.device).clamp(1e-6, 1 - 1e-6)
    soft = ((logit + chance.logit()) / temperature).sigmoid()
    return (soft > 0.5).float() + (soft - soft.detach())  # the bracket is exactly zero


def encode_blend(model: SplitViT, pyramid: Pyramid, gates: Gates) -> Features:
    """The all-fine sequence whose tokens mix the scales over each cell by their weights."""
    grid, valid = pyramid.grid, pyramid.valid
    weights = leaf_weights(gates, grid, valid)
    mixed = torch.stack(
        [
            upsample((level * weight.unsqueeze(-1)).transpose(1, 2).unflatten(2, grid.shape(s)), 1 << s).flatten(2)
            for s, (level, weight) in enumerate(zip(pyramid.levels, weights, strict=True))
        ]
    ).sum(0)
    layout = build_layout(uniform_splits(grid, pyramid.batch, split=True, device=mixed.device), valid)
    return model.encode(replace(pyramid, levels=(mixed.transpose(1, 2), *pyramid.levels[1:])), layout)
