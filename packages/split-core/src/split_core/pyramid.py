"""Image -> embeddings of every patch at every scale (Sec. 3.1; APT's multi-scale patch embedding).

    E_0 = E(img)      A_0 = E_0,  A_s = A(A_{s-1})      level_s = E(down_s(img)) + Z(A_s)

E is the pretrained patch embedding. A is one 2x2 stride-2 convolution shared by all scales, Z one linear layer
that starts at zero, so at the start a coarse token is the pretrained embedding of the patch shrunk to p px.

Deviations: `down` defaults to the exact block mean ("area"); APT's bilinear without antialias reads only the
centre 2x2 pixels of a block once s >= 2 and is kept for parity. In eval mode without gradients, each coarse
level is one convolution of kernel 2^s p folded from E, A and Z (exact up to rounding).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.kept import Version, version_of
from split_core.types import Grid, Pyramid
from split_core.windows import check_canvas

Down = Literal["area", "bilinear"]
WASTE = 64
"""Padded cells per cell of the image from which a canvas is refused: memory for nothing."""


class PyramidEmbed(nn.Module):
    """Multi-scale patch embedding around a pretrained one.

    Args:
        proj: the pretrained convolution E, kernel and stride p.
        norm: the normalisation that follows it, or Identity. Folding needs Identity.
        stages: S >= 1.
        down: how the image is reduced for coarse scales.
        window: side of the model's windows in fine cells, 0 without.
    """

    def __init__(
        self, proj: nn.Conv2d, *, stages: int, norm: nn.Module | None = None, down: Down = "area", window: int = 0
    ) -> None:
        super().__init__()
        self.stages = stages
        self.window = window
        self.down = down
        self.patch_size: tuple[int, int] = (proj.kernel_size[0], proj.kernel_size[1])
        # E belongs to the backbone and is registered there; listing it here too would save it twice.
        object.__setattr__(self, "proj", proj)
        object.__setattr__(self, "norm", norm if norm is not None else nn.Identity())
        dim = proj.out_channels
        self.aggregate = nn.Conv2d(dim, dim, 2, stride=2)
        self.zero = nn.Linear(dim, dim)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)
        self.to(proj.weight.device, proj.weight.dtype)
        self._folded: tuple[Version, list[tuple[Tensor, Tensor]]] | None = None

    proj: nn.Conv2d
    norm: nn.Module

    def forward(self, images: Float[Tensor, "b ch H W"], valid: Bool[Tensor, "b r c"] | None = None) -> Pyramid:
        """Levels 0 .. S of a batch; the image is zero-padded bottom and right to whole coarse patches.

        Args:
            images: any H, W >= 1.
            valid: (b, r, c) cells of the padded fine grid that hold picture, when images of different sizes
                share a canvas.

        Raises:
            SplitError: a coarse patch is so much larger than the image that padding would be nearly all of it, or
                windows do not divide the image.
        """
        grid = self.grid(images.shape[-2:])
        check_waste(grid)
        images = self._pad(images, grid)
        fine = self._normed(self.proj(images))
        folds = self._folds() if self._can_fold() else None
        if folds is not None:
            coarse = [F.linear(_blocks(images, w), w.flatten(1), b) for w, b in folds]
        else:
            coarse = [_flat(level) for level in self._coarse(images, fine)]
        return Pyramid((_flat(fine), *coarse), grid, valid)

    def grid(self, size: tuple[int, int] | torch.Size) -> Grid:
        """The quadtree over a canvas of (H, W) pixels."""
        (height, width), (ph, pw) = size, self.patch_size
        cells = -(-height // ph), -(-width // pw)
        if self.window:
            check_canvas(cells, self.window, self.patch_size)
        return Grid(cells, self.stages, self.window)

    def _pad(self, images: Tensor, grid: Grid) -> Tensor:
        rows, cols = grid.shape(0)
        extra_h = rows * self.patch_size[0] - images.shape[-2]
        extra_w = cols * self.patch_size[1] - images.shape[-1]
        return F.pad(images, (0, extra_w, 0, extra_h)) if extra_h or extra_w else images

    def _coarse(self, images: Tensor, fine: Tensor) -> list[Tensor]:
        levels, aggregated = [], fine
        for s in range(1, self.stages + 1):
            aggregated = self.aggregate(aggregated)
            smaller = self._downsample(images, 1 << s)
            levels.append(self._normed(self.proj(smaller)) + self.zero(aggregated.movedim(1, -1)).movedim(-1, 1))
        return levels

    def _downsample(self, images: Tensor, factor: int) -> Tensor:
        if self.down == "area":
            return F.avg_pool2d(images, factor)
        return F.interpolate(images, scale_factor=1 / factor, mode="bilinear", antialias=False, align_corners=False)

    def _normed(self, level: Tensor) -> Tensor:
        if isinstance(self.norm, nn.Identity):
            return level
        return self.norm(level.movedim(1, -1)).movedim(-1, 1)

    def _can_fold(self) -> bool:
        linear = self.down == "area" and isinstance(self.norm, nn.Identity)
        return linear and not self.training and not torch.is_grad_enabled()

    def _folds(self) -> list[tuple[Tensor, Tensor]] | None:
        """One (weight, bias) per coarse scale, rebuilt when a parameter has changed; None if that cannot be known."""
        layers = (self.proj, self.aggregate, self.zero)
        version = version_of(t for layer in layers for t in (layer.weight, layer.bias) if t is not None)
        if version is None:
            return None
        if self._folded is None or self._folded[0] != version:
            self._folded = (version, [self._fold(s) for s in range(1, self.stages + 1)])
        return self._folded[1]

    def _fold(self, scale: int) -> tuple[Tensor, Tensor]:
        """level_s as one convolution: E on the block mean, plus Z after s aggregations of E; linear in the pixels."""
        dtype = self.proj.weight.dtype
        proj = self.proj.weight.double()
        dim = proj.shape[0]
        proj_bias = proj.new_zeros(dim) if self.proj.bias is None else self.proj.bias.double()
        factor = 1 << scale
        weight = proj.repeat_interleave(factor, 2).repeat_interleave(factor, 3) / factor**2
        bias = proj_bias.clone()
        kernel, offset = proj, proj_bias
        agg, agg_bias = self.aggregate.weight.double(), self.aggregate.bias
        assert agg_bias is not None
        for _ in range(scale):
            rows = [
                torch.cat([torch.einsum("ok,kchw->ochw", agg[:, :, i, j], kernel) for j in (0, 1)], 3) for i in (0, 1)
            ]
            kernel = torch.cat(rows, 2)
            offset = agg.sum((2, 3)) @ offset + agg_bias.double()
        zero = self.zero.weight.double()
        weight = weight + torch.einsum("ok,kchw->ochw", zero, kernel)
        bias = bias + zero @ offset + self.zero.bias.double()
        return weight.to(dtype), bias.to(dtype)

    def train(self, mode: bool = True) -> PyramidEmbed:
        """Switching mode drops the folded weights, so that even edits through `.data` are seen afterwards."""
        self._folded = None
        return super().train(mode)

    def __getstate__(self) -> dict:  # type: ignore[type-arg]
        return {**self.__dict__, "_folded": None}


def check_waste(grid: Grid) -> None:
    """Refuse a canvas that padding to whole coarse patches makes WASTE times larger than the image."""
    cells, padded = grid.cells[0] * grid.cells[1], grid.size(0)
    if padded > WASTE * cells:
        raise SplitError(
            f"stages={grid.stages}: a coarse patch spans 2^{grid.stages} fine ones and the image has "
            f"{grid.cells[0]}x{grid.cells[1]}; padding it would make {padded} cells of {cells}. Use fewer stages"
        )


def _flat(level: Float[Tensor, "b d r c"]) -> Float[Tensor, "b n d"]:
    return level.flatten(2).transpose(1, 2)


def _blocks(images: Float[Tensor, "b ch H W"], kernel: Float[Tensor, "d ch kh kw"]) -> Float[Tensor, "b n pixels"]:
    """The pixels under each position of a kernel that moves by its own size.

    As a matrix product the folded embedding of one image takes a third of the time of a convolution with so
    large a stride on CPU; at batch 16 the two tie.
    """
    b, channels = images.shape[:2]
    kh, kw = kernel.shape[-2:]
    rows, cols = images.shape[-2] // kh, images.shape[-1] // kw
    split = images.reshape(b, channels, rows, kh, cols, kw).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(b, rows * cols, channels * kh * kw)
