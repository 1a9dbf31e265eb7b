"""What an estimator is: from a frozen backbone and per-image errors to losses for the policy.

It sees no task (errors come through a function) and no policy internals (logits come from the model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.features import Features
from split_core.model import SplitViT

ErrorOf = Callable[[Features], Float[Tensor, " b"]]
"""E(x, M) per image, or per rollout when the features hold K * b of them (row k * b + i is image i)."""


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
    """Base of all estimators: yields losses, keeps its own state, reports numbers."""

    def losses(
        self,
        model: SplitViT,
        images: Float[Tensor, "b ch H W"],
        error_of: ErrorOf,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
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
