"""The multiplier that holds the token budget (Sec. 3.3), and the threshold that does so in the warm start.

    lambda <- [lambda + eta (P - rho)]_+                                  "paper"
    lambda  = [I + kappa (P - rho)]_+,  I <- [I + eta (P - rho)]_+        "pi"

Why the paper's integrator overshoots when a run is short. At the optimum lambda is the price of a token: the
error that one more unit of P would save. An integrator that starts at 0 lets the policy split freely until
lambda has climbed to that price, and since the policy answers late, lambda is above it when P is back at rho.
At five million rollouts nobody notices; at fifty thousand that transient is the whole run. Three cures, each a
setting:

  init = None   start at the price itself, measured on the first batches (`token_price`);
  kind = "pi"   a proportional term answers the gap at once and damps the loop;
  measure = "deployed"   read P where the model will be used, at the 0.5 threshold. While probabilities are soft,
                the sampled P and the deployed P differ (0.50 against 0.42), and holding the first misses the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from split_core.learn.config import DualConfig


class Dual:
    """lambda and its update.

    Args:
        config: kind, step sizes, start, warm-up.
        budget: rho.
    """

    def __init__(self, config: DualConfig, budget: float) -> None:
        self.config = config
        self.budget = budget
        self.integral = config.init or 0.0
        self.gap = 0.0
        self.prices: list[float] = []

    @property
    def value(self) -> float:
        """lambda >= 0."""
        proportional = self.config.gain * self.gap if self.config.kind == "pi" else 0.0
        return max(0.0, self.integral + proportional)

    @property
    def measuring(self) -> bool:
        """Whether the start is still being measured; the policy should not move meanwhile."""
        return self.config.init is None and len(self.prices) < self.config.price_batches

    def measure(self, price: float) -> None:
        """Add one batch's estimate of the token price; lambda starts at their mean."""
        self.prices.append(price)
        self.integral = max(0.0, sum(self.prices) / len(self.prices))

    def update(self, fraction: float) -> None:
        """One step on the token fraction of a batch."""
        self.gap = fraction - self.budget
        self.integral = max(0.0, self.integral + self.config.lr * self.gap)

    def state_dict(self) -> dict[str, Any]:
        return {"integral": self.integral, "gap": self.gap, "prices": list(self.prices)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.integral, self.gap, self.prices = state["integral"], state["gap"], list(state["prices"])


def token_price(
    error: Float[Tensor, "k b"],
    fraction: Float[Tensor, "k b"],
    score: Float[Tensor, "k b"],
    weight: Float[Tensor, " b"] | float = 1.0,
) -> Float[Tensor, ""]:
    """-dE/dP along a common shift of all logits: the error saved per unit of token fraction.

    By the score-function identity the derivative of E[f] in a common shift of the logits is Cov(f, sum_i(m_i - p_i)),
    here within each image's K rollouts. At the multiplier's fixed point lambda equals this ratio.

    Args:
        score: sum over the decisions of m_i - p_i.
        weight: of each image in the objective.
    """
    centred = (score - score.mean(0)) * weight
    slope_error = (error * centred).mean()
    slope_fraction = (fraction * centred).mean()
    return -slope_error / slope_fraction.clamp_min(1e-8)


class Threshold:
    """tau_split of the warm start: dual ascent on the same gap (Sec. 3.4).

    More tokens than rho raise tau, so that fewer parents are labelled to split.
    """

    def __init__(self, tau: float, lr: float, budget: float) -> None:
        self.tau, self.lr, self.budget = tau, lr, budget

    def update(self, fraction: float) -> None:
        """One step on the token fraction of the labels of a batch."""
        self.tau += self.lr * (fraction - self.budget)

    def state_dict(self) -> dict[str, Any]:
        return {"tau": self.tau}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tau = state["tau"]
