"""What an estimator is: from a frozen backbone and per-image errors to losses for the policy.

It sees no task (errors come through a function) and no policy internals (logits come from the model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from split_core.features import Features
from split_core.model import SplitViT

ErrorOf = Callable[[Features], Float[Tensor, " b"]]
"""E(x, M) per image, or per rollout when the features hold K * b of them (row k * b + i is image i)."""

ErrorMapOf = Callable[[Features], Float[Tensor, "b r c"] | None]
"""Where that error lies (`Task.error_map`), or None when it has no place."""


@dataclass(frozen=True)
class Lesson:
    """One batch to learn from.

    Args:
        images: (b, ch, H, W) normalised.
        error_of: error of each image, or of each rollout, from what the backbone made of it.
        generator: source of everything random.
        objects: (b, r, c) fine cells on labelled objects, for estimators that are bounds to compare with; None
            where nothing is labelled.
        map_of: where the error of each image lies, for estimators that ask.
        valid: (b, r, c) fine cells that hold picture, when pictures of different sizes share a canvas.
    """

    images: Float[Tensor, "b ch H W"]
    error_of: ErrorOf
    generator: torch.Generator | None = None
    objects: Bool[Tensor, "b r c"] | None = None
    map_of: ErrorMapOf | None = None
    valid: Bool[Tensor, "b r c"] | None = None


@dataclass(frozen=True)
class EstimatorContext:
    """What an estimator is built with.

    Args:
        budget: rho.
        steps: batches that it will see in all, for what anneals.
        mean: averages a number over the processes of a run, so that all keep the same multiplier.
    """

    budget: float
    steps: int
    mean: Callable[[float], float] = lambda value: value


class Estimator:
    """Base of all estimators: yields losses, keeps its own state, reports numbers.

    Class attributes:
        holds_budget: its policy spends the budget at the 0.5 threshold. Otherwise logits only order the parents, and
            after learning the threshold is set on training images (labels unused).
    """

    holds_budget: ClassVar[bool] = True

    def losses(self, model: SplitViT, lesson: Lesson) -> Iterator[Tensor]:
        """One loss for each optimizer step on this batch; the caller steps between two of them."""
        raise NotImplementedError(f"{type(self).__name__} does not define losses")

    def metrics(self) -> dict[str, float]:
        """Numbers of the last batch, for the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
