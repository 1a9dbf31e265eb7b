"""A heuristic policy returns score - threshold: positive means split."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from split_core.policy import BackboneInfo, SplitPolicy, StageView
from split_example.configs import BrightConfig


class Bright(SplitPolicy):
    """Splits parents whose mean normalised brightness is above tau."""

    def __init__(self, config: BrightConfig, info: BackboneInfo) -> None:
        super().__init__()
        self.tau = config.tau
        self.patch = info.patch_size

    def forward(self, view: StageView) -> Tensor:
        rows, cols = view.grid.shape(0)
        height, width = rows * self.patch[0], cols * self.patch[1]
        grey = view.images.mean(1, keepdim=True)
        padded = F.pad(grey, (0, width - grey.shape[-1], 0, height - grey.shape[-2]))
        return F.adaptive_avg_pool2d(padded, view.grid.shape(view.scale)).flatten(1) - self.tau
