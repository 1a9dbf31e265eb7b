"""Fine tokens on labelled objects: an upper bound for analysis, never a deployed policy."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_core.draws import uniform
from split_core.errors import SplitError
from split_core.plugins import PluginConfig
from split_core.policy import BackboneInfo, SplitPolicy, StageView


class Oracle(SplitPolicy):
    """logit = share of object cells under the parent, lowered and broken by a tie-break smaller than one cell.

    Parents that touch an object are positive, the others negative; among equals the order is random, so that a budget
    larger than the objects need is spent at random, and a smaller one does not favour the top of the picture.
    """

    analysis: ClassVar[bool] = True

    def __init__(self, config: PluginConfig, info: BackboneInfo) -> None:
        super().__init__()
        # Shares are multiples of 4^-s >= 4^-S: noise below that never changes the order of unequal ones.
        self.tie = 0.5 * 4.0**-info.stages

    @torch.no_grad()
    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        """Raises SplitError when the images come without labelled objects."""
        if view.objects is None:
            raise SplitError("policy oracle needs labelled objects, and this task or data set labels none")
        share = F.avg_pool2d(view.objects.float()[:, None], 1 << view.scale).flatten(1)
        order = uniform(share.shape, view.generator, share.device)
        return share + self.tie * (0.5 * order - 1)
