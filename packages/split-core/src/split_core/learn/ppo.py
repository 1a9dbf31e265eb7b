"""PPO with a Lagrange dual on whole partitions (Sec. 3.3).

    C = (E + lambda P) / (1 + lambda)              per image and rollout
    A_l = -(C_l - mean of the other C_j)           leave-one-out over the K rollouts of an image
    r_l = pi(M_l | x) / pi_old(M_l | x)            whole-mask ratio
    L = -E[min(r A, clip(r, 1 - eps, 1 + eps) A)]

The K rollouts of an image share its pyramid and run as one packed batch of K * b partitions under no_grad
(not inference_mode, whose tensors could not enter the policy's graph). Optional, off by default because the
paper has none of them: an entropy bonus, advantages in units of their spread over an image's rollouts, the
cures of the multiplier's overshoot (`split_core.learn.dual`), and, for errors that have a place, an advantage and a
ratio for each decision (`reach`, `split_core.learn.surroundings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.decision import Decision, decision_entropy, existing, log_probs
from split_core.errors import SplitError
from split_core.learn.config import PPOConfig
from split_core.learn.dual import Dual, token_price
from split_core.learn.estimator import ErrorMapOf, ErrorOf, Estimator, EstimatorContext, Lesson
from split_core.learn.surroundings import Surroundings, surroundings
from split_core.model import SplitViT
from split_core.quadtree import build_layout
from split_core.types import Pyramid, Splits

MAX_LOG_RATIO = 20.0
"""log r is clamped here: far past the clip range, and exp of it stays finite in float32."""


@dataclass(frozen=True)
class Rollouts:
    """K sampled partitions of each image and what they cost. Row k is the k-th rollout of all images.

    Args:
        splits: (K * b) partitions, row k * b + i is image i.
        log_probs: (K, b, n) log pi_old of each decision, 0 where none was asked for.
        error, fraction: (K, b) E(x, M) and P(x, M).
        score: (K, b) sum of m_i - p_i over the decisions taken.
        deployed: (b,) token fraction of the policy's own 0.5 threshold.
        near: what each decision of the K * b partitions answers for, if not for the whole image.
    """

    splits: Splits
    log_probs: Float[Tensor, "k b n"]
    error: Float[Tensor, "k b"]
    fraction: Float[Tensor, "k b"]
    score: Float[Tensor, "k b"]
    deployed: Float[Tensor, " b"]
    near: Surroundings | None = None

    def cost(self, weight: float) -> Float[Tensor, "k b g"]:
        """C, one for each image or, with surroundings, for each decision."""
        error, fraction = (self.error, self.fraction) if self.near is None else (self.near.error, self.near.fraction)
        return ((error + weight * fraction) / (1 + weight)).view(*self.error.shape, -1)


class PPO(Estimator):
    """The paper's estimator.

    Args:
        config: K, epochs, clip, dual ...
        context: budget and run length.
    """

    def __init__(self, config: PPOConfig, context: EstimatorContext) -> None:
        self.config = config
        self.context = context
        self.dual = Dual(config.dual, context.budget)
        self._metrics: dict[str, float] = {}

    def losses(self, model: SplitViT, lesson: Lesson) -> Iterator[Tensor]:
        images = lesson.images
        with torch.no_grad():
            pyramid = model.pyramid(images, lesson.valid)
            rollouts = self._rollouts(model, pyramid, lesson)
        if self.dual.measuring:
            price = token_price(rollouts.error, rollouts.fraction, rollouts.score, self._weight(rollouts))
            self.dual.measure(self.context.mean(float(price)))
            self._metrics = self._describe(rollouts)
            return
        weight = self.dual.value
        gain = advantage(rollouts.cost(weight)) * self._weight(rollouts)[:, None]
        answers = gain.shape[2]
        old = _grouped(rollouts.log_probs, answers)
        described = self._describe(rollouts) | {"advantage_std": float(gain.std())}
        for epoch in range(self.config.epochs):
            logits = model.logits(pyramid, images)
            now = log_probs(logits, rollouts.splits, pyramid.valid).view_as(rollouts.log_probs)
            loss, clipped, kl = ppo_loss(_grouped(now, answers), old, gain, self.config.clip)
            parents = sum(logit.shape[1] for logit in logits)
            entropy = decision_entropy(logits, rollouts.splits, pyramid.valid).mean() / parents
            described |= {
                f"clip_fraction_{epoch + 1}": float(clipped),
                f"kl_{epoch + 1}": float(kl),
                "entropy": float(entropy.detach()),
            }
            yield answers * loss - self.config.entropy_bonus * entropy
        measured = rollouts.deployed if self.config.dual.measure == "deployed" else rollouts.fraction
        self.dual.update(self.context.mean(float(measured.mean())))
        self._metrics = described

    def _rollouts(self, model: SplitViT, pyramid: Pyramid, lesson: Lesson) -> Rollouts:
        times, reach = self.config.rollouts, self.config.reach
        if reach is None:
            return sample_rollouts(model, pyramid, lesson.images, lesson.error_of, times, lesson.generator)
        return sample_rollouts(
            model, pyramid, lesson.images, lesson.map_of or (lambda _: None), times, lesson.generator, reach=reach
        )

    def _weight(self, rollouts: Rollouts) -> Float[Tensor, " b"]:
        if self.config.normalize_advantage:
            return image_weight(rollouts.error)
        return torch.ones_like(rollouts.error[0])

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        return {"dual": self.dual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dual.load_state_dict(state["dual"])

    def _describe(self, rollouts: Rollouts) -> dict[str, float]:
        return {
            "lambda": self.dual.value,
            "error": float(rollouts.error.mean()),
            "token_fraction": float(rollouts.fraction.mean()),
            "deployed_fraction": float(rollouts.deployed.mean()),
        }


def sample_rollouts(
    model: SplitViT, pyramid: Pyramid, images: Tensor, error_of: ErrorOf | ErrorMapOf, times: int,
    generator: torch.Generator | None, *, reach: int | None = None,
) -> Rollouts:  # fmt: skip
    """Sample K partitions of each image from the policy and run them all in one packed batch.

    Args:
        error_of: the error of each rollout; with `reach`, the map of where it lies.
        reach: as `PPOConfig.reach`.

    Raises:
        SplitError: `reach` where the error has no place.
    """
    logits = model.logits(pyramid, images)
    repeated = tuple(logit.repeat(times, 1) for logit in logits)
    valid = None if pyramid.valid is None else pyramid.valid.repeat(times, 1, 1)
    splits = Decision("sample")(repeated, pyramid.grid, valid, generator)
    layout = build_layout(splits, valid)
    error = error_of(model.encode(pyramid, layout))
    near = None
    if reach is not None:
        if error is None:
            raise SplitError("estimator.reach: the error of this run has no place in the picture; use reach=null")
        near = surroundings(error, layout, reach)
        error = error.float().flatten(1).sum(1) / layout.valid_cells
    assert error is not None
    deployed = build_layout(Decision("threshold")(logits, pyramid.grid, pyramid.valid), pyramid.valid)
    shape = (times, pyramid.batch)
    return Rollouts(
        splits=splits,
        log_probs=log_probs(logits, splits, pyramid.valid).view(*shape, -1),
        error=error.float().view(shape),
        fraction=layout.token_fraction.view(shape),
        score=_score(logits, splits, pyramid.valid).view(shape),
        deployed=deployed.token_fraction,
        near=near,
    )


def _grouped(log_probs: Float[Tensor, "k b n"], groups: int) -> Float[Tensor, "k b g"]:
    """Of the whole mask, for one ratio an image (the paper's); or as they are, for one each decision."""
    return log_probs.sum(2, keepdim=True) if groups == 1 else log_probs


def advantage(cost: Float[Tensor, "k b *g"]) -> Float[Tensor, "k b *g"]:
    """Leave-one-out: how much cheaper a rollout is than the mean of the image's others."""
    others = (cost.sum(0) - cost) / (cost.shape[0] - 1)
    return others - cost


def image_weight(error: Float[Tensor, "k b"]) -> Float[Tensor, " b"]:
    """1 / (spread of the error over the image's rollouts + its mean over the batch).

    Without it the few images on which masks matter most decide the update. The mean in the denominator keeps
    an image on which they hardly matter, whose spread is noise, below twice the typical weight. The weight does
    not depend on lambda, so that the price of a token can be measured under the same weights.
    """
    spread = error.std(0)
    return 1 / (spread + spread.mean() + 1e-8)


def ppo_loss(
    now: Float[Tensor, "k b *g"], old: Float[Tensor, "k b *g"], gain: Float[Tensor, "k b *g"], clip: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """The clipped surrogate, with the share of clipped rollouts and the approximate KL from the old policy."""
    log_ratio = (now - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    with torch.no_grad():
        clipped = ((ratio - 1).abs() > clip).float().mean()
        kl = (ratio - 1 - log_ratio).mean()
    return -surrogate.mean(), clipped, kl


def _score(logits: tuple[Tensor, ...], splits: Splits, valid: Tensor | None) -> Float[Tensor, " kb"]:
    total = torch.zeros(splits.batch, device=logits[0].device)
    for logit, mask, asked in zip(logits, splits.masks, existing(splits, valid), strict=True):
        p = logit.float().sigmoid().repeat(splits.batch // logit.shape[0], 1)
        total += ((mask.flatten(1).float() - p) * asked).sum(1)
    return total
