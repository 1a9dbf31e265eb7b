"""APT's heuristic: entropy of the grey levels of a patch (baseline of Sec. 4).

    luma in 0..255, 512 bins of width 0.5, H = -sum p log2(p + 1e-10) bits; a patch stays coarse if H < tau

Deviations from APT: only the coarse scale that is asked is scored (APT scores the fine one too and never uses it);
histograms are filled by scatter_add in bands of patches (one-hot needs gigabytes at 1536 px); pixels outside the
picture are not counted; H == tau stays coarse (the decision rule is logit > 0).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from split_core.policy import BackboneInfo, StageView
from split_policies.configs import EntropyConfig
from split_policies.pixels import PixelHeuristic

BINS = 512
BINS_PER_LEVEL = 2
EPS = 1e-10


class Entropy(PixelHeuristic):
    """Split patches of high entropy."""

    def __init__(self, config: EntropyConfig, info: BackboneInfo) -> None:
        super().__init__(config.tau, info)

    def score(self, view: StageView) -> Float[Tensor, "b n"]:
        shape = view.grid.shape(view.scale)
        return block_entropy(self.luma(view), block=self.block(view.scale), shape=shape, weight=self.weight(view))


def block_entropy(
    grey: Float[Tensor, "b H W"],
    *,
    block: tuple[int, int],
    shape: tuple[int, int],
    weight: Float[Tensor, "b H W"] | None = None,
) -> Float[Tensor, "b n"]:
    """Entropy in bits of the grey levels (0..255) of every block, for a grid of `shape` that may reach past the image.

    Blocks without pixels score 0. The histograms exist for one band of block rows at a time, so that memory stays near
    that of the image however small the blocks are; the number of bands does not grow with the batch.
    """
    rows, cols = shape
    b, height, _ = grey.shape
    in_band = max(1, grey.numel() // (b * cols * BINS)) if b else rows
    bands = []
    for top in range(0, height, in_band * block[0]):
        band = slice(top, top + in_band * block[0])
        counts = _histograms(grey[:, band], block, cols, None if weight is None else weight[:, band])
        bands.append(_entropy(counts))
    entropy = torch.cat(bands, dim=1)
    return F.pad(entropy, (0, 0, 0, rows - entropy.shape[1])).flatten(1)


def _histograms(
    grey: Tensor, block: tuple[int, int], cols: int, weight: Tensor | None
) -> Float[Tensor, "b rows cols bins"]:
    b, height, width = grey.shape
    rows = -(-height // block[0])
    pad = (0, cols * block[1] - width, 0, rows * block[0] - height)
    if any(pad) and weight is None:
        weight = grey.new_ones(()).expand_as(grey)

    def blocks(values: Float[Tensor, "b h w"]) -> Float[Tensor, "n pixels"]:
        padded = F.pad(values, pad).view(b, rows, block[0], cols, block[1])
        return padded.transpose(2, 3).reshape(b * rows * cols, block[0] * block[1])

    # Clamped as integers, so that a NaN pixel lands in a bin too: an index out of range would end a CUDA process.
    # In 32 bits, because passes over 64 would take most of the time.
    index = (blocks(grey) * BINS_PER_LEVEL).int().clamp_(0, BINS - 1).long()
    ones = grey.new_ones(()).expand(index.shape) if weight is None else blocks(weight)
    counts = grey.new_zeros(b * rows * cols, BINS).scatter_add_(1, index, ones)
    return counts.view(b, rows, cols, BINS)


def _entropy(counts: Float[Tensor, "b rows cols bins"]) -> Float[Tensor, "b rows cols"]:
    p = counts.div_(counts.sum(-1, keepdim=True).clamp_min_(1))
    return (p + EPS).log2_().mul_(p).sum(-1).neg_()
