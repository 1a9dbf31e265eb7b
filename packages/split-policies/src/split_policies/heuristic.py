"""What the heuristics share: a score per parent, compared with a threshold per scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.policy import SplitPolicy, StageView


class Heuristic(SplitPolicy):
    """logit = score(view) - tau of the parents' scale.

    tau is a setting, not state: a checkpoint never overrides it. `split_core.calibrate` moves the decision instead.

    Args:
        tau: thresholds, scale 1 first; scales past the end take the last.
        stages: S.
    """

    def __init__(self, tau: Sequence[float], *, stages: int) -> None:
        super().__init__()
        self.tau = tuple(tau[min(s, len(tau) - 1)] for s in range(stages))

    def score(self, view: StageView) -> Float[Tensor, "b n"]:
        """The more, the more a split is worth; (b, n) in raster order."""
        raise NotImplementedError(f"{type(self).__name__} does not define score(view)")

    @torch.no_grad()
    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        return self.score(view) - self.tau[view.scale - 1]
