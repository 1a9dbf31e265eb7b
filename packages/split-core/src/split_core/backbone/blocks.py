"""A timm transformer block, run on a packed sequence.

The original modules do the work; only attention's token mixing and DropPath, which must know where an image
ends, are spelled out here. Each executor serves exactly one class (a subclass may compute something else), and
`probe` compares it with the block it stands for before a model is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from timm.layers.drop import DropPath
from timm.models.vision_transformer import Attention, Block  # type: ignore[attr-defined]
from torch import Tensor, nn

from split_core.attention import AttentionBackend
from split_core.attention.masked import MaskedAttention
from split_core.errors import SplitError
from split_core.packing import Segments


@dataclass(frozen=True)
class Stream:
    """What a block must know of a packed sequence besides its tokens.

    Args:
        segments: where each image lies.
        attention: mixes the tokens of an image.
    """

    segments: Segments
    attention: AttentionBackend


Executor = Callable[[Any, Tensor, Stream], Tensor]


def run_block(block: Any, x: Float[Tensor, "T d"], stream: Stream) -> Tensor:
    """Pre-norm block: x + attention(norm x), then x + MLP(norm x), with LayerScale and per-image DropPath."""
    attended = ATTENTION[type(block.attn)](block.attn, block.norm1(x), stream)
    x = x + drop_path(block.drop_path1, block.ls1(attended), stream.segments)
    return x + drop_path(block.drop_path2, block.ls2(block.mlp(block.norm2(x))), stream.segments)


def run_attention(attn: Any, x: Float[Tensor, "T d"], stream: Stream) -> Tensor:
    """Multi-head attention with q/k norms, output norm and gate where the module has them."""
    q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).unbind(1)
    q, k = attn.q_norm(q), attn.k_norm(k)
    dropout = attn.attn_drop.p if attn.training else 0.0
    out = stream.attention.attend(q, k, v, stream.segments, scale=attn.scale, dropout=dropout).flatten(1)
    out = attn.norm(out) if hasattr(attn, "norm") else out
    if getattr(attn, "gate", None) is not None:
        out = out * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))


def drop_path(module: nn.Module, x: Float[Tensor, "T d"], segments: Segments) -> Tensor:
    """Stochastic depth per image: timm's module would see one sample and drop the whole batch at once."""
    if not isinstance(module, DropPath) or not module.training or not module.drop_prob:
        return x
    keep = 1 - module.drop_prob
    kept = torch.full((len(segments.lengths),), keep, device=x.device).bernoulli()
    if module.scale_by_keep:
        kept = kept / keep
    return x * kept.to(x.dtype)[segments.image, None]


BLOCKS: dict[type[nn.Module], Executor] = {Block: run_block}
ATTENTION: dict[type[nn.Module], Executor] = {Attention: run_attention}


def probe(block: Any, index: int, dim: int, tolerance: float = 1e-4) -> None:
    """Compare a block with its executor on random input.

    Raises:
        SplitError: the block's class has no executor, or the two differ by more than `tolerance` (relative).
    """
    known = type(block) in BLOCKS
    attn_known = known and type(block.attn) in ATTENTION
    if not attn_known:
        culprit = type(block.attn).__name__ if known else type(block).__name__
        raise SplitError(
            f"blocks.{index} is a {culprit}, which has no packed executor; supported are "
            f"{', '.join(c.__name__ for c in (*BLOCKS, *ATTENTION))}"
        )
    parameter = next(block.parameters())
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(2, 5, dim, generator=generator).to(parameter.device, parameter.dtype)
    cu_seqlens = torch.tensor([0, 5, 10], device=x.device, dtype=torch.int32)
    modes = [(module, module.training) for module in block.modules()]
    block.eval()
    try:
        with torch.no_grad():
            expected = block(x).flatten(0, 1)
            stream = Stream(Segments(cu_seqlens, (5, 5), 5), MaskedAttention())
            packed = BLOCKS[type(block)](block, x.flatten(0, 1), stream)
    finally:
        for module, training in modes:
            module.training = training
    allowed = tolerance if parameter.dtype == torch.float32 else 3e-2
    error = ((packed - expected).norm() / expected.norm().clamp_min(1e-12)).item()
    if not error <= allowed:
        raise SplitError(
            f"blocks.{index} ({type(block).__name__}) gives other values packed than by itself (relative difference "
            f"{error:.2g}): it computes something its class does not; it was probably patched or hooked. Not wrapped."
        )
