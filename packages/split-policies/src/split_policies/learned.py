"""What the decision networks share: input normalisation and the two-layer head h of Eq. 1."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.policy import SplitPolicy
from split_policies.configs import LearnedConfig


class LearnedPolicy(SplitPolicy):
    """Base of the decision networks. One network serves every stage (Sec. 3.2).

    Args:
        features: width of what h reads.
        hidden: hidden units of h.
        config: normalisation and dropout.
    """

    learned: ClassVar[bool] = True
    default_rule: ClassVar[str] = "threshold"

    def __init__(self, features: int, *, hidden: int, config: LearnedConfig) -> None:
        super().__init__()
        self.norm, self.dropout = config.norm, config.dropout
        self.expand = nn.Linear(features, hidden)
        self.decide = nn.Linear(hidden, 1)
        # Logits start within about 0.1 of zero: both choices equally likely, far from where the sigmoid saturates.
        # Not exactly zero, or the layers below would get no gradient at the first step.
        nn.init.normal_(self.decide.weight, std=0.02)
        nn.init.zeros_(self.decide.bias)

    def inputs(self, embeddings: Float[Tensor, "*cells d"]) -> Float[Tensor, "*cells d"]:
        """Embeddings as the network reads them."""
        return normalised(embeddings, self.norm)

    def head(self, features: Float[Tensor, "b n features"]) -> Float[Tensor, "b n"]:
        """h: the logit of every parent. Dropout acts on what h reads and on its hidden units, in train mode."""
        hidden = F.gelu(self.expand(F.dropout(features, self.dropout, self.training)))
        return self.decide(F.dropout(hidden, self.dropout, self.training)).squeeze(-1)

    @torch.no_grad()
    def rescale(self, shift: float, gain: float) -> None:
        self.decide.bias.add_(shift).mul_(gain)
        self.decide.weight.mul_(gain)


def normalised(embeddings: Float[Tensor, "*cells d"], norm: bool) -> Float[Tensor, "*cells d"]:
    """Each embedding at mean 0, variance 1 if `norm`, else as it is."""
    return F.layer_norm(embeddings, embeddings.shape[-1:]) if norm else embeddings
