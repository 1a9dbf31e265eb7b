"""From normalised images to grey levels and means over blocks, for heuristics that look at pixels (Sec. 2, APT).

Only pixels of the picture count: blocks may reach past the image (sizes that the coarse patch does not divide) or,
where images of different sizes share a canvas, past the picture.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.policy import BackboneInfo, StageView
from split_policies.heuristic import Heuristic

LUMA = {1: (1.0,), 3: (0.2989, 0.5870, 0.1140)}
"""Weights of the channels, APT's for RGB."""


class PixelHeuristic(Heuristic):
    """Heuristic that scores grey levels.

    Args:
        tau: thresholds, scale 1 first.
        info: patch size, and the normalisation to undo.
    """

    def __init__(self, tau: tuple[float, ...], info: BackboneInfo) -> None:
        super().__init__(tau, stages=info.stages)
        self.info = info

    def luma(self, view: StageView) -> Float[Tensor, "b H W"]:
        """Grey levels of the un-normalised images, 0..255, float32."""
        return luma(view.images, mean=self.info.mean, std=self.info.std)

    def block(self, scale: int) -> tuple[int, int]:
        """Rows and columns of pixels under a parent at `scale`."""
        return self.info.patch_size[0] << scale, self.info.patch_size[1] << scale

    def weight(self, view: StageView) -> Float[Tensor, "b H W"] | None:
        """1 on pixels of cells that hold picture; None where the whole image is picture."""
        valid = view.pyramid.valid
        if valid is None:
            return None
        (rows, cols), (height, width) = self.info.patch_size, view.images.shape[-2:]
        cells = valid[:, : view.grid.cells[0], : view.grid.cells[1]]
        return cells.float().repeat_interleave(rows, 1).repeat_interleave(cols, 2)[:, :height, :width]

    def block_mean(self, values: Float[Tensor, "b H W"], view: StageView) -> Float[Tensor, "b n"]:
        """Mean of a per-pixel quantity over the picture's pixels under each parent; 0 where there are none."""
        return block_mean(
            values, block=self.block(view.scale), shape=view.grid.shape(view.scale), weight=self.weight(view)
        )


def luma(
    images: Float[Tensor, "b ch H W"], *, mean: tuple[float, ...], std: tuple[float, ...], white: float = 255
) -> Float[Tensor, "b H W"]:
    """Grey levels 0..white of images normalised with `mean` and `std`.

    One pass for each channel, no un-normalised copy: the luma is affine in the normalised channels.

    Raises:
        SplitError: neither 1 nor 3 channels, or a normalisation for another number of channels.
    """
    channels = images.shape[1]
    if channels not in LUMA:
        raise SplitError(f"grey levels need images of 1 or 3 channels, these have {channels}")
    if channels == 1 and len(set(mean)) == len(set(std)) == 1:
        mean, std = mean[:1], std[:1]
    if len(mean) != channels or len(std) != channels:
        raise SplitError(
            f"images have {channels} channels but their normalisation has {len(mean)} means and {len(std)} stds"
        )
    images = images.float()
    gains = [white * w * s for w, s in zip(LUMA[channels], std, strict=True)]
    black = images.new_full((), white * sum(w * m for w, m in zip(LUMA[channels], mean, strict=True)))
    grey = torch.add(black, images[:, 0], alpha=gains[0])
    for c in range(1, channels):
        grey.add_(images[:, c], alpha=gains[c])
    return grey


def block_mean(
    values: Float[Tensor, "b H W"],
    *,
    block: tuple[int, int],
    shape: tuple[int, int],
    weight: Float[Tensor, "b H W"] | None = None,
) -> Float[Tensor, "b n"]:
    """Weighted mean over blocks, for a grid of `shape` that may reach past the image; 0 for blocks without weight."""
    if weight is not None:
        values = values * weight
    # ceil_mode keeps partial blocks at the right and bottom; their divisor counts pixels inside the image only.
    mean = F.avg_pool2d(values[:, None], block, ceil_mode=True, count_include_pad=False)[:, 0]
    if weight is not None:
        share = F.avg_pool2d(weight[:, None], block, ceil_mode=True, count_include_pad=False)[:, 0]
        mean = mean / share.clamp_min(1 / (block[0] * block[1]))
    return F.pad(mean, (0, shape[1] - mean.shape[2], 0, shape[0] - mean.shape[1])).flatten(1)
