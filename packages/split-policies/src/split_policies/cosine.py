"""The warm-start rule as a policy (Sec. 3.4): split where a child differs from its parent in direction."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from split_core.learn.warmstart import cosine_dissimilarity
from split_core.policy import BackboneInfo, StageView
from split_policies.configs import CosineConfig
from split_policies.heuristic import Heuristic


class Cosine(Heuristic):
    """score = max over the children of (1 - cos(parent, child)) / 2."""

    def __init__(self, config: CosineConfig, info: BackboneInfo) -> None:
        super().__init__(config.tau, stages=info.stages)

    def score(self, view: StageView) -> Float[Tensor, "b n"]:
        return cosine_dissimilarity(view)
