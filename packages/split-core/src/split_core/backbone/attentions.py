"""timm's attention modules over a packed sequence: their own projections and norms around a backend's token mixing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from timm.layers.attention import AttentionRope
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import Attention  # type: ignore[attr-defined]
from torch import Tensor
from torch.nn import functional as F

from split_core.backbone.stream import Stream
from split_core.backbone.tower import TowerAttention

Heads = tuple[Float[Tensor, "T h e"], Float[Tensor, "T k e"], Float[Tensor, "T k e"]]


def run_attention(attn: Any, x: Float[Tensor, "T d"], stream: Stream) -> Float[Tensor, "T d"]:
    """Multi-head attention with q/k norms, rotary positions, output norm and gate where the module has them."""
    q, k, v = ATTENTION[type(attn)](attn, x)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if stream.watch is not None:
        stream.watch(x, k)
    if stream.rope is not None:
        half = getattr(attn, "rotate_half", False)
        q, k = (rotate(t, stream.rope, half=half) for t in (q, k))
    if k.shape[1] != q.shape[1]:  # grouped queries: head h reads key head h // group
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    dropout = attn.attn_drop.p if attn.training else 0.0
    out = stream.attention.attend(q, k, v, stream.segments, scale=softmax_scale(attn), dropout=dropout).flatten(1)
    out = attn.norm(out) if hasattr(attn, "norm") else out
    if getattr(attn, "gate", None) is not None:
        out = out * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))


def softmax_scale(module: Any) -> float:
    """What timm multiplies q k^T with: its fused kernels do not read the module's `scale`."""
    return module.head_dim**-0.5 if getattr(module, "fused_attn", False) else module.scale


def rotate(x: Float[Tensor, "T h e"], rope: Float[Tensor, "T *h e"], *, half: bool) -> Float[Tensor, "T h e"]:
    """Turn the pairs of channels of each head by the token's angles.

    Args:
        rope: sines, then cosines, of e / 2 angles.
        half: channel i is paired with i + e / 2 instead of its neighbour.
    """
    sin, cos = (rope.unsqueeze(1) if rope.ndim == 2 else rope).chunk(2, -1)
    if half:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


def _fused(attn: Any, x: Tensor) -> Heads:
    return attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).unbind(1)


def _split(attn: Any, x: Tensor) -> Heads:
    q = attn.q_proj(x).unflatten(-1, (attn.num_heads, -1))
    k, v = (proj(x).unflatten(-1, (-1, q.shape[-1])) for proj in (attn.k_proj, attn.v_proj))
    return q, k, v


def _rope(attn: Any, x: Tensor) -> Heads:
    return _split(attn, x) if attn.qkv is None else _fused(attn, x)


def _eva(attn: Any, x: Tensor) -> Heads:
    """EVA learns no bias for keys; its fused projection gets the three biases put together at each call."""
    if attn.qkv is None:
        return _split(attn, x)
    if attn.q_bias is None:
        return _fused(attn, x)
    bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    if attn.qkv_bias_separate:
        return (attn.qkv(x) + bias).unflatten(-1, (3, attn.num_heads, -1)).unbind(1)
    return F.linear(x, attn.qkv.weight, bias).unflatten(-1, (3, attn.num_heads, -1)).unbind(1)


ATTENTION: dict[type, Callable[[Any, Tensor], Heads]] = {
    Attention: _fused, AttentionRope: _rope, EvaAttention: _eva, TowerAttention: _split,
}  # fmt: skip
"""Attention class -> its queries, keys and values."""
