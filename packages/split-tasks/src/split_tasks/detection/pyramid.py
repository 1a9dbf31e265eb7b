"""Simple feature pyramid: maps at several resolutions from the one map of a plain ViT, without top-down paths."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F


class SimplePyramid(nn.Module):
    """Maps of `channels` each.

    Args:
        dim: width of the tokens.
        channels: of every map.
        scales: resolutions in units of the ViT's, of 4, 2, 1, 0.5, 0.25, falling. 0.25 is the map at 0.5 with every
            second point left out.
    """

    def __init__(self, dim: int, *, channels: int, scales: Sequence[float]) -> None:
        super().__init__()
        self.scales = tuple(scales)
        self.levels = nn.ModuleList(_level(dim, channels, scale) for scale in self.scales if scale > 0.25)

    def forward(self, features: Float[Tensor, "b d r c"]) -> tuple[Float[Tensor, "b k _ _"], ...]:
        """Finest first; odd grids keep their last row and column."""
        maps: list[Tensor] = [level(features) for level in self.levels]
        if self.scales[-1] == 0.25:
            maps.append(F.max_pool2d(maps[-1], 1, stride=2))
        return tuple(maps)


class ConvNorm(nn.Conv2d):
    """Convolution without bias, then LayerNorm over channels."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = LayerNorm2d(outputs, eps=1e-6)

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(super().forward(input))


def _level(dim: int, channels: int, scale: float) -> nn.Sequential:
    """Change of resolution, then a 1 x 1 and a 3 x 3 convolution."""
    change: list[nn.Module]
    if scale == 4:
        half = dim // 2
        change = [
            nn.ConvTranspose2d(dim, half, 2, stride=2), LayerNorm2d(half, eps=1e-6), nn.GELU(),
            nn.ConvTranspose2d(half, dim // 4, 2, stride=2),
        ]  # fmt: skip
    elif scale == 2:
        change = [nn.ConvTranspose2d(dim, dim // 2, 2, stride=2)]
    else:
        change = [] if scale == 1 else [nn.MaxPool2d(2, ceil_mode=True)]
    width = {4.0: dim // 4, 2.0: dim // 2}.get(scale, dim)
    return nn.Sequential(*change, ConvNorm(width, channels, 1), ConvNorm(channels, channels, 3))
