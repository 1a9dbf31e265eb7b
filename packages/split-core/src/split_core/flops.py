"""FLOPs of a plain ViT by the tokens that each layer reads, and the speed-up they promise if nothing else cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

Layers = Sequence[tuple[Any, Any]]
"""Patch tokens that the attention and the MLP of each block read: numbers, or arrays over images."""
Pairs = Sequence[Any]
"""Of each block, the pairs of tokens that attend to each other; None where every token attends to every other."""


def layer_flops(vit: Any, layers: Layers, pairs: Pairs | None = None) -> Any:
    """Multiply-adds times two of blocks and patch embedding.

    Per block and token: qkv and output projections 8 d^2, attention 4 n d (n the tokens in its window), MLP two for
    each of its weights. The embedding is counted for the tokens that enter the first block. What finds the tokens to
    merge or drop is not counted, as a policy is not: the number is what the tokens promise, and timing says what they
    keep.

    Args:
        layers: one pair for each block.
        pairs: of blocks with windows; None where there are none.
    """
    d, prefix = vit.embed_dim, vit.num_prefix_tokens
    mlp = sum(layer.weight.numel() for layer in vit.blocks[0].mlp.modules() if isinstance(layer, nn.Linear))
    total: Any = np.asarray(layers[0][0], dtype=np.float64) * 2 * vit.patch_embed.proj.weight.numel()
    for (attended, fed), shared in zip(layers, pairs or [None] * len(layers), strict=True):
        n, m = (np.asarray(count, dtype=np.float64) + prefix for count in (attended, fed))
        total = total + n * 8 * d * d + 4 * (n * n if shared is None else shared) * d + m * 2 * mlp
    return total


def forward_flops(model: Any, layout: Any) -> Any:
    """FLOPs of a splitting or reducing model for each image of the layout that it made.

    A look through the first blocks (`SplitPolicy.depth`) counts: beside the mixed sequence, or in its place where the
    mixed sequence goes on from there.
    """
    vit, depth, windows = model.vit, getattr(model, "depth", 0), model.windows
    layers = layout.per_layer(len(vit.blocks))
    pairs = _pairs(windows, len(vit.blocks), None if windows is None else layout.window_pairs())
    if not depth:
        return layer_flops(vit, layers, pairs)
    unit = 1 << layout.grid.stages
    coarse = np.prod([-(-cells // unit) for cells in layout.grid.cells])
    look = [(coarse, coarse)] * depth
    seen = _pairs(windows, depth, None if windows is None else coarse * (windows.size // unit) ** 2)
    if model.carries:
        return layer_flops(vit, look + list(layers[depth:]), seen + pairs[depth:])
    return layer_flops(vit, layers, pairs) + layer_flops(vit, look, seen)


def backbone_flops(vit: Any, patches: Any, windows: Any = None) -> Any:
    """The same for an image of `patches` patch tokens in every layer (array or number); windows are taken as full."""
    depth = len(vit.blocks)
    within = None if windows is None else np.asarray(patches, dtype=np.float64) * windows.size**2
    return layer_flops(vit, [(patches, patches)] * depth, _pairs(windows, depth, within))


def ideal_speedup(vit: Any, dense: int, flops: Any, windows: Any = None, further: float = 0.0) -> float:
    """F(N) over the mean of the images' `flops`: what their tokens promise.

    Args:
        dense: N, patches of an image.
        flops: of each image.
        windows: of the model's blocks, if some have them.
        further: what follows the backbone costs for N tokens (`Task.flops`), if `flops` count it too.
    """
    return float((backbone_flops(vit, dense, windows) + further) / np.mean(flops))


def _pairs(windows: Any, blocks: int, within: Any) -> list[Any]:
    """Of the first `blocks` blocks; `within` is that of a block with windows."""
    across = range(blocks) if windows is None else windows.global_blocks
    return [None if block in across else within for block in range(blocks)]
