"""Compare what a model computes with what is computed for it on packed tokens, part by part, before it is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from split_core.attention.masked import MaskedAttention
from split_core.backbone.attentions import ATTENTION
from split_core.backbone.blocks import BLOCKS
from split_core.backbone.pooling import pool_attention
from split_core.backbone.stream import Stream
from split_core.errors import SplitError
from split_core.packing import Segments

TOLERANCE = 1e-4
"""Relative difference allowed in float32; in half precision 300 times that."""
PATCHES = 5


def probe(block: Any, index: int, dim: int, *, rope: str | None = None, prefix: int = 0) -> None:
    """Compare a block with its executor on random input.

    Args:
        rope: "shared" if the model gives its blocks rotary positions, "per_head" if each head has its own.
        prefix: tokens before the patches, which are not turned.

    Raises:
        SplitError: the block's class has no executor, or the two differ.
    """
    unknown = _unknown(block)
    if unknown is not None:
        raise SplitError(
            f"blocks.{index} is a {type(unknown).__name__}, which has no packed executor; supported are "
            f"{', '.join(c.__name__ for c in (*BLOCKS, *ATTENTION))}"
        )
    x, segments = _sample(block, dim, PATCHES + prefix)
    options, rows = {}, None
    if rope is not None:
        pairs = round(block.attn.scale**-2) // 2
        angles = torch.randn(PATCHES, block.attn.num_heads, pairs, generator=_generator(1)).to(x)
        angles = angles[:, 0] if rope == "shared" else angles
        turned = torch.cat([angles.new_zeros(prefix, *angles.shape[1:]), angles]).repeat(2, *[1] * (angles.ndim - 1))
        rows = torch.cat([turned.sin(), turned.cos()], -1)
        half = getattr(block.attn, "rotate_half", False)
        wide = torch.cat([angles, angles], -1) if half else angles.repeat_interleave(2, -1)
        # timm's layout: both functions at the width of a head, heads before tokens
        own = torch.cat([wide.sin(), wide.cos()], -1)
        options = {"rope": own if rope == "shared" else own.transpose(0, 1)}
    with _as_in_eval(block):
        expected = block(x, **options).flatten(0, 1)
        packed = BLOCKS[type(block)](block, x.flatten(0, 1), Stream(segments, segments, MaskedAttention(), rows))
    _compare(f"blocks.{index} ({type(block).__name__})", packed, expected)


def probe_pool(pool: Any, dim: int) -> None:
    """Compare attention pooling with its packed form.

    Raises:
        SplitError: the two differ.
    """
    x, segments = _sample(pool, dim, PATCHES)
    with _as_in_eval(pool):
        packed = pool_attention(pool, x.flatten(0, 1), segments.image, 2, torch.ones_like(x.flatten(0, 1)[:, 0]))
        _compare(f"attn_pool ({type(pool).__name__})", packed, pool(x))


def _unknown(block: Any) -> nn.Module | None:
    """The part of a block that no executor stands for."""
    if type(block) not in BLOCKS:
        return block
    attentions = [part.attn for part in block.attns] if hasattr(block, "attns") else [getattr(block, "attn", None)]
    return next((attn for attn in attentions if attn is not None and type(attn) not in ATTENTION), None)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sample(module: nn.Module, dim: int, length: int) -> tuple[Tensor, Segments]:
    parameter = next(module.parameters())
    x = torch.randn(2, length, dim, generator=_generator(0)).to(parameter.device, parameter.dtype)
    starts = torch.tensor([0, length, 2 * length], device=x.device, dtype=torch.int32)
    return x, Segments(starts, (length, length), length)


@contextmanager
def _as_in_eval(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def _compare(name: str, packed: Tensor, expected: Tensor) -> None:
    allowed = TOLERANCE * (1 if expected.dtype in (torch.float32, torch.float64) else 300)
    error = ((packed - expected).norm() / expected.norm().clamp_min(1e-12)).item()
    if not error <= allowed:
        raise SplitError(
            f"{name} gives other values packed than by itself (relative difference "
            f"{error:.2g}): it computes something its class does not; it was probably patched or hooked. Not wrapped."
        )
