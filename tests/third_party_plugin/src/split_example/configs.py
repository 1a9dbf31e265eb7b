"""Settings of the entries. Torch-free, because the command line reads it before torch is loaded."""

from __future__ import annotations

from pydantic import Field

from split_core.learn.config import EstimatorConfig
from split_core.plugins import PluginConfig


class BrightConfig(PluginConfig):
    """Policy `bright`."""

    tau: float = Field(0.0, description="split above this mean normalised brightness")


class QuadrantConfig(PluginConfig):
    """Task `quadrant`."""


class SquaresConfig(PluginConfig):
    """Data set `squares`."""

    images: int = Field(256, ge=1, description="images in each split")
    size: int = Field(32, ge=8, description="side of the image in pixels")


class SmallConfig(PluginConfig):
    """Model `small`."""

    patch: int = Field(4, ge=1, description="side of a fine patch in pixels")
    dim: int = Field(16, ge=4, multiple_of=2, description="width of the tokens")
    depth: int = Field(2, ge=1, description="blocks")


class EveryOtherConfig(PluginConfig):
    """Reducer `every_other`."""

    at: int = Field(0, ge=0, description="block before which every other patch token is dropped")


class ReinforceConfig(EstimatorConfig):
    """Estimator `reinforce`."""

    rollouts: int = Field(4, ge=2, description="masks sampled per image")
    price: float = Field(1.0, ge=0, description="fixed cost of the whole image in fine tokens")
