"""FLOPs of a plain ViT by the tokens that each layer reads, and the speed-up they promise if nothing else cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

Layers = Sequence[tuple[Any, Any]]
"""Patch tokens that the attention and the MLP of each block read: numbers, or arrays over images."""


def layer_flops(vit: Any, layers: Layers) -> Any:
    """Multiply-adds times two of blocks and patch embedding.

    Per block and token: qkv and output projections 8 d^2, attention 4 n d, MLP two for each of its weights. The
    embedding is counted for the tokens that enter the first block. What finds the tokens to merge or drop is not
    counted, as a policy is not: the number is what the tokens promise, and timing says what they keep.

    Args:
        layers: one pair for each block.
    """
    d, prefix = vit.embed_dim, vit.num_prefix_tokens
    mlp = sum(layer.weight.numel() for layer in vit.blocks[0].mlp.modules() if isinstance(layer, nn.Linear))
    total: Any = np.asarray(layers[0][0], dtype=np.float64) * 2 * vit.patch_embed.proj.weight.numel()
    for attended, fed in layers:
        n, m = (np.asarray(count, dtype=np.float64) + prefix for count in (attended, fed))
        total = total + n * 8 * d * d + 4 * n * n * d + m * 2 * mlp
    return total


def forward_flops(model: Any, layout: Any) -> Any:
    """FLOPs of a splitting or reducing model for each image of the layout that it made.

    A look through the first blocks (`SplitPolicy.depth`) counts: beside the mixed sequence, or in its place where the
    mixed sequence goes on from there.
    """
    vit, depth = model.vit, getattr(model, "depth", 0)
    layers = layout.per_layer(len(vit.blocks))
    if not depth:
        return layer_flops(vit, layers)
    unit = 1 << layout.grid.stages
    coarse = np.prod([-(-cells // unit) for cells in layout.grid.cells])
    look = [(coarse, coarse)] * depth
    if model.carries:
        return layer_flops(vit, look + list(layers[depth:]))
    return layer_flops(vit, layers) + layer_flops(vit, look)


def backbone_flops(vit: Any, patches: Any) -> Any:
    """The same for an image of `patches` patch tokens in every layer (array or number)."""
    return layer_flops(vit, [(patches, patches)] * len(vit.blocks))


def ideal_speedup(vit: Any, dense: int, flops: Any) -> float:
    """F(N) over the mean of the images' `flops`: what their tokens promise."""
    return float(backbone_flops(vit, dense) / np.mean(flops))
