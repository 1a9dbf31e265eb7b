"""Settings of the estimators.  Torch-free, because the command line reads it before torch is loaded."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from split_core.plugins import PluginConfig


class DualConfig(PluginConfig):
    """How the multiplier lambda of the token budget moves (Sec. 3.3; cures of its overshoot in learn/dual.py)."""

    kind: Literal["paper", "pi"] = Field(
        "paper", description="paper: lambda integrates the gap; pi: plus a share of it"
    )
    lr: float = Field(5e-4, gt=0, description="step of lambda per unit of (token fraction - budget)")
    gain: float = Field(1.0, ge=0, description="share of the gap that kind=pi adds to lambda at once")
    init: float | None = Field(0.0, ge=0, description="lambda at the start; null measures the price of a token")
    price_batches: int = Field(8, ge=1, description="batches that init=null measures on, without moving the policy")
    measure: Literal["sampled", "deployed"] = Field(
        "sampled", description="token fraction lambda reads: of the sampled masks (paper), or at the deployed rule"
    )


def check_steps(images: int, batch_size: int) -> None:
    """Refuse images that do not fill one batch: nothing would be trained and nothing would say so."""
    if 0 < images < batch_size:
        raise ValueError(f"images={images} do not fill one batch of {batch_size}; images=0 skips this")


class EstimatorConfig(PluginConfig):
    """What every estimator needs to be run by the engine."""

    images: int = Field(50_000, ge=0, description="images seen while the policy learns; 0 skips the phase")
    batch_size: int = Field(512, ge=1, description="images per step")
    lr: float = Field(1e-5, gt=0, description="peak learning rate of the policy")
    schedule: Literal["constant", "cosine"] = Field("constant", description="of the learning rate; cosine ends at zero")
    grad_clip: float | None = Field(1.0, gt=0, description="largest gradient norm of the policy; null for no limit")
    snapshots: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (), description="shares of the run at which the policy is kept too, and evaluated as NAME_stepK"
    )

    @model_validator(mode="after")
    def _check_steps(self) -> EstimatorConfig:
        check_steps(self.images, self.batch_size)
        return self

    @property
    def steps(self) -> int:
        """Batches seen."""
        return self.images // self.batch_size

    @property
    def kept(self) -> tuple[int, ...]:
        """Steps after which the policy is kept, rising; the end is no snapshot."""
        return tuple(sorted({round(share * self.steps) for share in self.snapshots} - {0, self.steps}))

    def decay(self, progress: float) -> float:
        """Factor on `lr` at a share of the run."""
        return 1.0 if self.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * progress))


def check_price(dual: DualConfig, steps: int) -> None:
    """Refuse a run whose every batch goes into measuring the price of a token."""
    if dual.init is None and 0 < steps <= dual.price_batches:
        raise ValueError(
            f"the {steps} batches of these images are all spent on measuring the price of a token"
            f" (dual.price_batches={dual.price_batches}); give more images, or dual.init a number"
        )


class PPOConfig(EstimatorConfig):
    """Whole-mask PPO; defaults are the paper's (Sec. 3.3, App. A)."""

    rollouts: int = Field(4, ge=2, description="K, masks sampled per image")
    epochs: int = Field(2, ge=1, description="updates over the same rollouts")
    clip: float = Field(0.1, gt=0, lt=1, description="clip range of the whole-mask probability ratio")
    entropy_bonus: float = Field(0.0, ge=0, description="weight of the decisions' mean entropy in the objective")
    normalize_advantage: bool = Field(False, description="weigh images by the inverse spread of their rollouts' errors")
    reach: int | None = Field(
        None, ge=0, description="parents to each side whose error a split answers for; null: the whole image's (paper)"
    )
    dual: DualConfig = Field(DualConfig(), description="the multiplier of the token budget")

    @model_validator(mode="after")
    def _check_price(self) -> PPOConfig:
        check_price(self.dual, self.steps)
        return self


class CreditConfig(EstimatorConfig):
    """Per-parent credit through the union sequence. Not in the paper; see learn/credit.py."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate of the policy")
    batch_size: int = Field(64, ge=1, description="images per step")
    masks: int = Field(1, ge=1, description="random masks per image, whose credits are averaged")
    softness: float = Field(0.1, ge=0, lt=0.5, description="gates are drawn at this and one minus this, not at 0 and 1")
    clip: float = Field(3.0, gt=0, description="largest target, in running standard deviations")
    huber: float = Field(1.0, gt=0, description="where the regression's loss turns from square to linear, likewise")
    repeats: int = Field(8, ge=1, description="updates per batch: one on it, the others on earlier ones")
    replay: int = Field(256, ge=1, description="earlier batches kept for that")


class GateConfig(EstimatorConfig):
    """Straight-through gates, the differentiable rivals of App. B; see learn/gate.py."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate of the policy")
    batch_size: int = Field(64, ge=1, description="images per step")
    relax: Literal["union", "blend"] = Field(
        "union", description="all scales in one weighted sequence, or fine tokens that mix the scales"
    )
    temperature: float = Field(1.0, gt=0, description="of the relaxed gates")
    dual: DualConfig = Field(DualConfig(), description="the multiplier of the token budget")

    @model_validator(mode="after")
    def _check_price(self) -> GateConfig:
        check_price(self.dual, self.steps)
        return self


class SupervisedConfig(EstimatorConfig):
    """Labelled objects as targets: a bound, not a rival."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate of the policy")
    batch_size: int = Field(64, ge=1, description="images per step")
