"""Model `llava`: the vision tower of a LLaVA checkpoint; task `vqa` takes its projector and language model."""

from __future__ import annotations

import copy

from torch import nn

from split_core.backbone.tower import VisionTower
from split_core.errors import SplitError
from split_core.task import ModelContext
from split_tasks.vqa.configs import LlavaModelConfig
from split_tasks.vqa.language import shared_llava
from split_tasks.vqa.llava import image_statistics, keeps_prefix


def build(config: LlavaModelConfig, context: ModelContext) -> nn.Module:
    """The tower, in float32, as a copy: training it leaves the shared checkpoint as it is.

    Raises:
        SplitError: the checkpoint cannot be loaded, or its tower has other channels.
    """
    mean, std = image_statistics(config.checkpoint)
    llava = shared_llava(config)
    tower = VisionTower(
        copy.deepcopy(llava.model.vision_tower), layers=llava.config.vision_feature_layer, mean=mean, std=std,
        checkpoint=config,
    )  # fmt: skip
    keeps_prefix(llava.config, tower)
    channels = tower.patch_embed.proj.in_channels
    if context.in_chans not in (None, channels):
        raise SplitError(f"model=llava: it wants {channels} channels, not {context.in_chans}")
    return tower.float()
