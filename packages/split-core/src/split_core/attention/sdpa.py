"""Portable backend: torch's scaled_dot_product_attention, as few calls as the images' lengths allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from split_core.attention.base import AttentionBackend
from split_core.packing import Segments

WORTH_GROUPING = 4
"""Images per distinct length from which gathering them into batches beats one call each (measured on CPU)."""


@dataclass(frozen=True)
class Groups:
    """Images of equal length brought together: `order` sorts the tokens, `back` restores them."""

    order: Int[Tensor, " T"]
    back: Int[Tensor, " T"]
    shapes: tuple[tuple[int, int], ...]
    """(images, length) of each group."""


class SdpaAttention(AttentionBackend):
    """The CPU default, in three cases.

    All images of one length (all fine, or an exact per-image budget): an ordinary batch. Many images of few
    lengths: tokens are gathered so that each length is one batch. Otherwise one call per image on a
    torch.split, whose backward is one concatenation where slicing by index would add up a full gradient per
    image (6x slower at 64 images).
    """

    name = "sdpa"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, dropout: float) -> Tensor:
        if segments.uniform is not None:
            return _batch(q, k, v, segments.uniform, scale, dropout)
        groups = self._groups(segments)
        if groups is not None:
            sizes = [images * length for images, length in groups.shapes]
            lengths = [length for _, length in groups.shapes]
            qs, ks, vs = (x.index_select(0, groups.order).split(sizes) for x in (q, k, v))
            parts = zip(qs, ks, vs, lengths, strict=True)
            return torch.cat([_batch(*part, scale, dropout) for part in parts]).index_select(0, groups.back)
        qs, ks, vs = (x.split(segments.lengths) for x in (q, k, v))
        parts = zip(qs, ks, vs, segments.lengths, strict=True)
        return torch.cat([_batch(*part, scale, dropout) for part in parts])

    def _groups(self, segments: Segments) -> Groups | None:
        """Grouping of these segments, worked out once per forward; None where it does not pay."""
        if self.name not in segments.kept:
            few = len(set(segments.lengths)) * WORTH_GROUPING <= len(segments.lengths)
            segments.kept[self.name] = group(segments.lengths, segments.cu_seqlens) if few else None
        return segments.kept[self.name]


def group(lengths: Sequence[int], cu_seqlens: Int[Tensor, " b1"]) -> Groups:
    """Sort images by length (stable) and say where each token goes."""
    device = cu_seqlens.device
    length = torch.tensor(lengths, device=device)
    images = length.argsort(stable=True)
    sorted_length = length[images]
    total = sum(lengths)
    starts = sorted_length.cumsum(0) - sorted_length
    shift = torch.repeat_interleave(cu_seqlens[:-1].long()[images] - starts, sorted_length, output_size=total)
    order = torch.arange(total, device=device) + shift
    back = torch.empty_like(order).scatter_(0, order, torch.arange(total, device=device))
    shapes = tuple((lengths.count(n), n) for n in sorted(set(lengths)))
    return Groups(order, back, shapes)


def _batch(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float, dropout: float) -> Tensor:
    """Attention over consecutive images that all have `length` tokens."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout).transpose(1, 2).flatten(0, 1)
