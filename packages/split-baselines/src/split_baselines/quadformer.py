"""Quadformer's tokenizer: a best-first quadtree with an exact number of tokens (Ronen et al. 2023).

Every image gets n_0 + 3 k tokens: from the coarsest grid on, the patch that would lose most by staying coarse splits,
k times. The order is `Decision("image")`'s; what makes the method is the score and that the count is never traded
between images. Of the paper's scores this is the one without a network: the error of a patch when it is shrunk to the
size it would be read at and enlarged again, summed over its pixels, so that large patches do not compete with small
ones by their mean.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_baselines.configs import QuadformerConfig
from split_core.policy import BackboneInfo, SplitPolicy, StageView


class Quadformer(SplitPolicy):
    """Scores parents by the squared error of shrinking them, summed over pixels and channels."""

    default_rule: ClassVar[str] = "image"
    exact: ClassVar[bool] = True

    def __init__(self, config: QuadformerConfig, info: BackboneInfo) -> None:
        super().__init__()
        self.patch = info.patch_size

    @torch.no_grad()
    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        rows, cols = view.grid.shape(0)
        height, width = rows * self.patch[0], cols * self.patch[1]
        images = view.images.float()
        h, w = images.shape[-2:]
        padded = F.pad(images, (0, width - w, 0, height - h), mode="replicate") if (h, w) != (height, width) else images
        factor = 1 << view.scale
        small = F.avg_pool2d(padded, factor)
        error = (padded - F.interpolate(small, scale_factor=factor, mode="bilinear", align_corners=False)).square()
        kernel = (self.patch[0] * factor, self.patch[1] * factor)
        return F.avg_pool2d(error.sum(1, keepdim=True), kernel).flatten(1) * (kernel[0] * kernel[1])
