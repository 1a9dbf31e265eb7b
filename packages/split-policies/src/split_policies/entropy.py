"""APT's heuristic: entropy of the grey levels of a patch (baseline of Sec. 4).

    luma in 0..255, 512 bins of width 0.5, H = -sum p log2(p + 1e-10) bits; a patch stays coarse if H < tau

With n pixels and c in a bin this is log2 n - sum c log2 c / n: the epsilon moves it by less than 1e-7 bits.

Deviations from APT: only the coarse scale that is asked is scored (APT scores the fine one too and never uses it);
one count over (patch, bin) serves a band of patches (one-hot needs gigabytes at 1536 px); pixels outside the
picture are not counted; H == tau stays coarse (the decision rule is logit > 0).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from split_core.policy import BackboneInfo, StageView
from split_policies.configs import EntropyConfig
from split_policies.pixels import PixelHeuristic, luma

BINS = 512
BINS_PER_LEVEL = 2
BAND = 1 << 18
"""Pixels of an image that are counted at a time: passes over them stay in a core's cache."""


class Entropy(PixelHeuristic):
    """Split patches of high entropy."""

    def __init__(self, config: EntropyConfig, info: BackboneInfo) -> None:
        super().__init__(config.tau, info)

    def score(self, view: StageView) -> Float[Tensor, "b n"]:
        return block_entropy(
            view.images, mean=self.info.mean, std=self.info.std, block=self.block(view.scale),
            shape=view.grid.shape(view.scale), weight=self.weight(view),
        )  # fmt: skip


def block_entropy(
    images: Float[Tensor, "b ch H W"],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    block: tuple[int, int],
    shape: tuple[int, int],
    weight: Float[Tensor, "b H W"] | None = None,
) -> Float[Tensor, "b n"]:
    """Entropy in bits of the grey levels of every block, for a grid of `shape` that may reach past the image.

    Blocks without pixels score 0; pixels of weight 0 are not counted. Grey levels and histograms exist for one band of
    block rows at a time, so that memory stays below that of the image however small the blocks are; the number of
    bands does not grow with the batch.

    Args:
        images: normalised with mean and std.
        block: rows and columns of pixels.
    """
    rows, cols = shape
    height, width = images.shape[-2:]
    in_band = max(1, min(height * width // (cols * BINS), BAND // (block[0] * width)))
    c = torch.arange(block[0] * block[1] + 1, device=images.device, dtype=torch.float32)
    c_log_c = torch.special.xlogy(c, c) / math.log(2)
    offset = None
    bands = []
    for top in range(0, height, in_band * block[0]):
        band = slice(top, top + in_band * block[0])
        # The distance of two bins is 1, and twice a float is exact: these are the grey levels' own bins.
        bins = luma(images[:, :, band], mean=mean, std=std, white=255.0 * BINS_PER_LEVEL)
        if offset is None or offset.shape != bins.shape:  # the last band may be lower
            offset = _offsets(bins.shape, block, cols, bins.device)
        outside = None if weight is None else weight[:, band] == 0
        counts = _histograms(bins, offset, -(-bins.shape[1] // block[0]) * cols, outside)
        bands.append(_entropy(counts, c_log_c))
    entropy = torch.cat(bands, dim=1)
    return F.pad(entropy, (0, rows * cols - entropy.shape[1]))


def _offsets(shape: tuple[int, ...], block: tuple[int, int], cols: int, device: torch.device) -> Int[Tensor, "b h w"]:
    """First bin of the block that each pixel lies in, blocks of all images in raster order."""
    rows = -(-shape[1] // block[0])
    # 32 bits, because passes over 64 would take most of the time
    wide = torch.int32 if shape[0] * rows * cols * BINS < 1 << 31 else torch.int64
    image, row, col = (torch.arange(n, device=device, dtype=wide) for n in shape)
    row = row // block[0] + image[:, None] * rows
    return ((row * cols)[..., None] + col // block[1]) * BINS


def _histograms(
    bins: Float[Tensor, "b h w"], offset: Int[Tensor, "b h w"], blocks: int, outside: Bool[Tensor, "b h w"] | None
) -> Int[Tensor, "b n bins"]:
    size, spare = len(bins) * blocks * BINS, 0
    # Clamped as integers, so that a NaN pixel lands in a bin too: an index out of range would end a CUDA process.
    index = bins.to(torch.int32).clamp_(0, BINS - 1).to(offset.dtype).add_(offset)
    if outside is not None:
        index.masked_fill_(outside, size)
        spare = 1  # a bin past the last, which nobody reads
    count = bincount if index.device.type == "cpu" else scatter_count
    return count(index.flatten(), size + spare)[:size].view(len(bins), blocks, BINS)


def bincount(index: Int[Tensor, " n"], size: int) -> Int[Tensor, " size"]:
    """How often each of 0..size-1 occurs. On a CPU several times as fast as `scatter_count`; on a GPU it would wait."""
    return torch.bincount(index, minlength=size)


def scatter_count(index: Int[Tensor, " n"], size: int) -> Int[Tensor, " size"]:
    """The same without a read from the device."""
    index = index.long()
    return index.new_zeros(size, dtype=torch.int32).scatter_add_(
        0, index, index.new_ones((), dtype=torch.int32).expand_as(index)
    )


def _entropy(counts: Int[Tensor, "b n bins"], c_log_c: Float[Tensor, " c"]) -> Float[Tensor, "b n"]:
    # Looked up: counts are small integers, and logarithms would take longer than counting.
    total = c_log_c.index_select(0, counts.flatten()).view(counts.shape).sum(-1)
    n = counts.sum(-1).clamp_min_(1).float()
    return n.log2() - total / n
