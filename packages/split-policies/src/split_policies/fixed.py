"""The two ends of the budget: every parent splits (the plain ViT), or none does."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from split_core.plugins import PluginConfig
from split_core.policy import BackboneInfo, SplitPolicy, StageView


class Fixed(SplitPolicy):
    """The same logit everywhere. It spends what it spends, so a budget does not change its rule."""

    default_rule: ClassVar[str] = "threshold"
    ranks: ClassVar[bool] = False
    logit: ClassVar[float]

    def __init__(self, config: PluginConfig, info: BackboneInfo) -> None:
        super().__init__()

    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        return view.parents.new_full(view.parents.shape[:2], self.logit)


class Dense(Fixed):
    """All fine: reproduces the backbone."""

    logit = 1.0


class Coarse(Fixed):
    """All coarse: the fewest tokens."""

    logit = -1.0
