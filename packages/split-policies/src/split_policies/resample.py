"""Two more pixel heuristics: what shrinking a patch loses (Quadformer-like), and edge strength."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_core.policy import BackboneInfo, StageView
from split_policies.configs import LaplacianConfig, UpsampleMSEConfig
from split_policies.pixels import PixelHeuristic


class UpsampleMSE(PixelHeuristic):
    """Mean squared difference between the grey image and its shrunk, then enlarged self.

    A parent at scale s is seen shrunk by 2^s, so that is the factor. Quadformer compares features; pixels do here.
    """

    def __init__(self, config: UpsampleMSEConfig, info: BackboneInfo) -> None:
        super().__init__(config.tau, info)
        self.mode = config.mode

    def score(self, view: StageView) -> Float[Tensor, "b n"]:
        grey = self.luma(view)
        return self.block_mean((grey - resample(grey, 1 << view.scale, mode=self.mode)).square_(), view)


class Laplacian(PixelHeuristic):
    """Mean |8 x pixel - its 8 neighbours|. The border is replicated: a picture's edge is not an edge in it."""

    def __init__(self, config: LaplacianConfig, info: BackboneInfo) -> None:
        super().__init__(config.tau, info)

    def score(self, view: StageView) -> Float[Tensor, "b n"]:
        grey = self.luma(view)
        around = F.avg_pool2d(F.pad(grey[:, None], (1, 1, 1, 1), mode="replicate"), 3, stride=1)[:, 0]
        return self.block_mean(grey.sub_(around).abs_().mul_(9), view)


def resample(grey: Float[Tensor, "b H W"], factor: int, *, mode: str) -> Float[Tensor, "b H W"]:
    """Shrink by block means (partial blocks over what they hold), enlarge to the same size."""
    height, width = grey.shape[-2:]
    small = F.avg_pool2d(grey[:, None], factor, ceil_mode=True, count_include_pad=False)
    size = (small.shape[-2] * factor, small.shape[-1] * factor)
    if mode == "nearest":
        large = F.interpolate(small, size=size, mode="nearest")
    else:
        large = F.interpolate(small, size=size, mode=mode, align_corners=False)
    return large[:, 0, :height, :width]
