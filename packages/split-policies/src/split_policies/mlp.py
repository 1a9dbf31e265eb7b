"""Decision networks without attention (App. G, Table 15), with as many parameters as the cross-attention one."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.policy import BackboneInfo, StageView
from split_policies.configs import MLPConfig
from split_policies.learned import LearnedPolicy
from split_policies.sizes import mlp_hidden


class ParentMLP(LearnedPolicy):
    """MLP(parent): decides without a look at the fine patches."""

    def __init__(self, config: MLPConfig, info: BackboneInfo) -> None:
        hidden = config.hidden or mlp_hidden(info.dim, inputs=info.dim)
        super().__init__(info.dim, hidden=hidden, config=config)

    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        return self.head(self.inputs(view.parents))


class ConcatMLP(LearnedPolicy):
    """MLP([parent ; child 1 ; .. ; child 4]), the children in raster order."""

    def __init__(self, config: MLPConfig, info: BackboneInfo) -> None:
        hidden = config.hidden or mlp_hidden(info.dim, inputs=5 * info.dim)
        super().__init__(5 * info.dim, hidden=hidden, config=config)

    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        family = torch.cat([view.parents.unsqueeze(2), view.children], dim=2)
        return self.head(self.inputs(family).flatten(2))
