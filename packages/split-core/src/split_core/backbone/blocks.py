"""A timm transformer block, run on a packed sequence.

The original modules do the work; only attention's token mixing and DropPath, which must know where an image
ends, are spelled out here. Each executor serves exactly one class (a subclass may compute something else), and
`probe` compares it with the block it stands for before a model is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import (
    Block,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
)
from torch import Tensor, nn

from split_core.backbone.attentions import run_attention, softmax_scale
from split_core.backbone.stream import Stream, drop_path
from split_core.backbone.tower import TowerBlock

Executor = Callable[[Any, Tensor, Stream], Tensor]


def run_block(block: Any, x: Float[Tensor, "T d"], stream: Stream) -> Tensor:
    """Pre-norm block: x + attention(norm x), then x + MLP(norm x), with LayerScale and per-image DropPath."""
    attended = run_attention(block.attn, block.norm1(x), stream)
    x = x + drop_path(block.drop_path1, block.ls1(attended), stream.images)
    x, images = (x, stream.images) if stream.between is None else stream.between(x)
    return x + drop_path(block.drop_path2, block.ls2(block.mlp(block.norm2(x))), images)


def run_eva_block(block: Any, x: Float[Tensor, "T d"], stream: Stream) -> Tensor:
    """EVA's pre-norm block: as `run_block`, its LayerScale a bare parameter."""
    attended = run_attention(block.attn, block.norm1(x), stream)
    x = x + drop_path(block.drop_path1, _scaled(attended, block.gamma_1), stream.images)
    x, images = (x, stream.images) if stream.between is None else stream.between(x)
    return x + drop_path(block.drop_path2, _scaled(block.mlp(block.norm2(x)), block.gamma_2), images)


def run_post_norm_block(block: Any, x: Float[Tensor, "T d"], stream: Stream) -> Tensor:
    """Post-norm block: x + norm(attention x), then x + norm(MLP x)."""
    attended = run_attention(block.attn, x, stream)
    x = x + drop_path(block.drop_path1, block.norm1(attended), stream.images)
    x, images = (x, stream.images) if stream.between is None else stream.between(x)
    return x + drop_path(block.drop_path2, block.norm2(block.mlp(x)), images)


def run_parallel_block(block: Any, x: Float[Tensor, "T d"], stream: Stream) -> Tensor:
    """Attention and MLP side by side behind one projection (ViT-22B)."""
    hidden, *heads = block.in_proj(block.in_norm(x)).split(block.in_split, -1)
    if block.mlp_bias is not None:
        hidden = hidden + block.mlp_bias
    q, k, v = (head.unflatten(-1, (block.num_heads, -1)) for head in heads)
    dropout = block.attn_drop.p if block.training else 0.0
    q, k = block.q_norm(q), block.k_norm(k)
    attended = stream.attention.attend(q, k, v, stream.segments, scale=softmax_scale(block), dropout=dropout).flatten(1)
    hidden = block.mlp_drop(block.mlp_act(hidden))
    if getattr(block, "out_proj", None) is not None:
        out = block.out_proj(torch.cat([attended, hidden], -1))
    else:
        out = block.attn_out_proj(attended) + block.mlp_out_proj(hidden)
    return x + drop_path(block.drop_path, block.ls(out), stream.images)


def run_things_block(block: Any, x: Float[Tensor, "T d"], stream: Stream) -> Tensor:
    """Several attentions side by side, then several MLPs (Three Things Everyone Should Know)."""
    attended = [
        drop_path(part.drop_path, part.ls(run_attention(part.attn, part.norm(x), stream)), stream.images)
        for part in block.attns
    ]
    x = x + torch.stack(attended).sum(0)
    fed = [drop_path(part.drop_path, part.ls(part.mlp(part.norm(x))), stream.images) for part in block.ffns]
    return x + torch.stack(fed).sum(0)


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


BLOCKS: dict[type[nn.Module], Executor] = {
    Block: run_block, EvaBlock: run_eva_block, ResPostBlock: run_post_norm_block,
    EvaBlockPostNorm: run_post_norm_block, ParallelScalingBlock: run_parallel_block,
    ParallelThingsBlock: run_things_block, TowerBlock: run_block,
}  # fmt: skip
BETWEEN: tuple[type[nn.Module], ...] = (Block, EvaBlock, ResPostBlock, EvaBlockPostNorm, TowerBlock)
"""Blocks whose executors call `Stream.between`.

The parallel ones do not. In ParallelScalingBlock attention and MLP read the same input, so that nothing lies between
them, and reducing after both would be another method; ParallelThingsBlock has several attentions, whose keys and class
attention no method says how to join.
"""


@cache
def compiled(executor: Executor) -> Executor:
    """The executor through torch.compile, once for all blocks of a kind and all token counts.

    Attention and DropPath stay outside the graphs, and the number of tokens is a symbol in them, so that no batch is
    padded and none is compiled anew.
    """
    return torch.compile(executor, dynamic=True)
