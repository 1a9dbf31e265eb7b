"""Batch-shaping losses for gates, as MSViT trains its own with (Havtorn et al. 2023).

A gate that is nearly always open or nearly always shut has stopped depending on the image. Batch-shaping asks more
than the right mean: over a batch, a gate's values should follow a prior with mass near 0 and near 1. The loss is the
squared distance between the values' ranks and the prior's distribution function at those values (Cramer-von Mises).
The generalised loss gives each place of the image a prior of its own, whose location is learned, and shapes those
locations by a prior again: places may be always coarse or always fine as long as the image as a whole meets the budget.

Priors are binary concrete (relaxed Bernoulli) distributions, whose distribution function is elementary:
    P(g <= x) = sigmoid(temperature * logit(x) - location).
MSViT's gate itself is a policy (an MLP on the coarse token, `mlp_parent`) under an estimator that passes gradients
through hard decisions; add `GeneralisedBatchShaping` to its loss.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

EDGE = 1e-6


def concrete_cdf(
    value: Float[Tensor, "*any"], location: Float[Tensor, "*other"], temperature: float
) -> Float[Tensor, "*any"]:
    """Distribution function of a binary concrete variable; `location` is the log-odds of its Bernoulli."""
    return torch.sigmoid(temperature * value.clamp(EDGE, 1 - EDGE).logit() - location)


def batch_shaping(
    gates: Float[Tensor, "b *rest"], location: Float[Tensor, "*other"], temperature: float = 0.5
) -> Float[Tensor, ""]:
    """Mean squared distance between the ranks of a gate's values over the batch and the prior at those values.

    Args:
        gates: probabilities in (0, 1); the first axis is the batch, each place after it a gate of its own.
        location: log-odds of the prior, one for all or one per place.
        temperature: below 1 the prior has its mass near 0 and 1.
    """
    ordered = gates.float().sort(dim=0).values
    count = len(ordered)
    ranks = torch.arange(1, count + 1, device=gates.device) / (count + 1)
    return (concrete_cdf(ordered, location, temperature) - ranks.view(-1, *[1] * (gates.ndim - 1))).square().mean()


class GeneralisedBatchShaping(nn.Module):
    """Batch-shaping with a learned prior for each place, shaped in turn to the wanted share of open gates.

    Args:
        places: gates of an image.
        share: of them that should be open.
        temperature: of the places' priors.
        spread: temperature of the prior over places; below 1 it lets places be nearly always open or shut.
    """

    def __init__(self, places: int, share: float, *, temperature: float = 0.5, spread: float = 0.5) -> None:
        super().__init__()
        start = torch.tensor(share).logit()
        self.location = nn.Parameter(torch.full((places,), float(start)))
        self.temperature, self.spread = temperature, spread
        self.register_buffer("wanted", start)

    wanted: Tensor

    def forward(self, gates: Float[Tensor, "b n"]) -> Float[Tensor, ""]:
        """The loss of a batch of gate probabilities; its gradient moves gates and priors."""
        own = batch_shaping(gates, self.location, self.temperature)
        places = batch_shaping(self.location.sigmoid(), self.wanted, self.spread)
        return own + places
