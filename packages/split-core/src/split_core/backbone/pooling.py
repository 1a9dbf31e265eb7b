"""Attention pooling over a packed sequence (SigLIP, PE): learned queries read the tokens of each image."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from split_core.backbone.attentions import softmax_scale


def pool_attention(
    pool: Any, x: Float[Tensor, "T d"], image: Int[Tensor, " T"], batch: int, weight: Float[Tensor, " T"]
) -> Float[Tensor, "b d"]:
    """What timm's AttentionPoolLatent returns for each image.

    The queries are the same for all images, so that no attention kernel is needed: a softmax over the tokens of
    each image, in float32.

    Args:
        image: image of every token.
        weight: how many alike each token stands for.
    """
    heads = pool.num_heads
    q = pool.q_norm(pool.q(pool.latent[0]).unflatten(-1, (heads, -1)).transpose(0, 1))  # (h, l, e)
    k, v = pool.kv(x).unflatten(-1, (2, heads, -1)).unbind(1)
    score = torch.einsum("the,hle->thl", pool.k_norm(k), q).float() * softmax_scale(pool)
    where = image[:, None, None].expand_as(score)
    # The softmax does not depend on what is subtracted; no gradient need flow through the maximum.
    top = score.new_full((batch, *score.shape[1:]), -torch.inf).scatter_reduce(0, where, score.detach(), "amax")
    share = (score - top[image]).exp() * weight[:, None, None]
    total = share.new_zeros(batch, *share.shape[1:]).index_add(0, image, share)
    share = (share / total[image]).to(v.dtype)
    mixed = v.new_zeros(batch, pool.latent_len, *v.shape[1:])
    mixed = mixed.index_add(0, image, share.transpose(1, 2).unsqueeze(-1) * v.unsqueeze(1))
    out = pool.proj_drop(pool.proj(mixed.flatten(2)))
    if pool.mlp is not None:
        out = out + pool.mlp(pool.norm(out))
    return {"token": out[:, 0], "avg": out.mean(1)}[pool.pool]
