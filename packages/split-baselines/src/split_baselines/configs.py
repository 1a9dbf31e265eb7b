"""Settings of the reducers and of the one policy here. No torch: listings and --help read this module."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from split_core.plugins import PluginConfig

Keep = Annotated[float, Field(gt=0, le=1)]
Rates = Annotated[float, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], ...]


class MergeConfig(PluginConfig):
    """Shared by the methods that merge r tokens in every block."""

    r: Rates = Field(
        8.0,
        description="tokens merged in each block: a number (its mean; 6.5 is 6, 7, 6, 7 ...) or one for every block",
    )
    inflect: float = Field(
        0.0, ge=-1, le=1, description="slope of a number r over depth: 1 falls from 2r to 0, -1 rises to 2r, 0 is level"
    )
    proportional: bool = Field(
        True,
        description="merged tokens draw attention by their size (log size on the logits); off for MAE-pretrained ViTs",
    )


class ToMeConfig(MergeConfig):
    """Reducer `tome` (Bolya et al. 2023)."""


class DTEMConfig(MergeConfig):
    """Reducer `dtem` (Lee and Hong 2024)."""

    width: int | None = Field(
        None, ge=1, description="width of the merging embedding; null is a head's, twice that from 1024 channels on"
    )
    temperature: float = Field(0.1, gt=0, description="of the soft merging in training")
    targets: int = Field(3, ge=1, description="most similar tokens that a token may softly merge into")


class StagedConfig(PluginConfig):
    """Shared by the methods that drop tokens at a few blocks."""

    keep: Keep = Field(0.7, description="share of the patch tokens kept at each stage")
    at: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="blocks of the stages, from 0; null is a quarter, half and three quarters of the depth"
    )


class EViTConfig(StagedConfig):
    """Reducer `evit` (Liang et al. 2022)."""

    fuse: bool = Field(
        True, description="what is dropped goes on as one token, weighted by the class token's attention"
    )


class DynamicViTConfig(StagedConfig):
    """Reducer `dynamicvit` (Rao et al. 2021)."""

    ratio_weight: float = Field(2.0, ge=0, description="weight of the loss on the share of tokens kept")
    distill_weight: float = Field(
        0.5, ge=0, description="weight of the distance of kept tokens to those of the dense model"
    )


class ResizeConfig(PluginConfig):
    """Reducer `resize`."""

    scale: Keep = Field(0.84, description="side of the shrunk image as a share of the image's; patches stay whole")
    grid: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = Field(
        None, description="rows and columns of patches of the shrunk image, instead of `scale`"
    )


class QuadformerConfig(PluginConfig):
    """Policy `quadformer` (Ronen et al. 2023)."""
