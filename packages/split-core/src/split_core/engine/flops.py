"""FLOPs of a plain ViT by sequence length, and the speed-up that fewer tokens would give if nothing else cost."""

from __future__ import annotations

from typing import Any

import numpy as np


def backbone_flops(vit: Any, patches: Any) -> Any:
    """Multiply-adds times two of blocks and patch embedding for an image of `patches` patch tokens (array or number).

    Per block and token: qkv and output projections 8 d^2, MLP 4 r d^2 (r its ratio), attention 4 n d.
    """
    n = np.asarray(patches, dtype=np.float64) + vit.num_prefix_tokens
    d = vit.embed_dim
    hidden = vit.blocks[0].mlp.fc1.out_features
    per_block = n * (8 * d * d + 4 * d * hidden) + 4 * n * n * d
    weight = vit.patch_embed.proj.weight
    return len(vit.blocks) * per_block + np.asarray(patches) * 2 * weight.numel()


def ideal_speedup(vit: Any, dense: int, tokens: Any) -> float:
    """F(N) over the mean F(n_i): what the images' token counts promise."""
    return float(backbone_flops(vit, dense) / np.mean(backbone_flops(vit, tokens)))
