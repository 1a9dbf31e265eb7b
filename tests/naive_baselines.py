"""The reducers written out token by token, image by image: what the vectorised ones are judged by."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaBlockPostNorm
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor

POST_NORM = (ResPostBlock, EvaBlockPostNorm)


def entered(vit: Any, image: Tensor) -> Tensor:
    """Tokens of one image (t, d) as timm gives them to the first block."""
    x = vit._pos_embed(vit.patch_embed(image[None]))
    return vit.norm_pre(x[0] if isinstance(x, tuple) else x)[0]


def stands(vit: Any, x: Tensor) -> list[int | None]:
    """The cell that each token of the dense model stands on; None for prefix tokens."""
    return [None] * vit.num_prefix_tokens + list(range(len(x) - vit.num_prefix_tokens))


def turned(vit: Any, index: int, x: Tensor, cells: list[int | None]) -> Tensor:
    """Queries or keys (t, h, e) of block `index`, each turned by timm's own angles of its cell, if it stands on one."""
    if getattr(vit, "rope", None) is None:
        return x
    own, half = (
        vit.rope.get_embed(shape=vit.patch_embed.grid_size),
        getattr(vit.blocks[index].attn, "rotate_half", False),
    )
    out = x.clone()
    for i, cell in enumerate(cells):
        for h in range(x.shape[1]):
            if cell is not None:
                row = own[cell] if own.ndim == 2 else own[index, h, cell]
                out[i, h] = apply_rot_embed_cat(x[i, h], row, half=half)
    return out


def heads_of(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (t, h, e)."""
    if getattr(attn, "qkv", None) is None:
        return tuple(proj(x).view(len(x), attn.num_heads, -1) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))  # type: ignore[return-value]
    qkv = attn.qkv(x)
    if getattr(attn, "q_bias", None) is not None:
        qkv = qkv + torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    return qkv.view(len(x), 3, attn.num_heads, -1).unbind(1)


def read(block: Any, x: Tensor) -> Tensor:
    """What attention reads."""
    return x if isinstance(block, POST_NORM) else block.norm1(x)


def added(block: Any, which: str, x: Tensor) -> Tensor:
    """What a branch adds: normed, or scaled where the block scales."""
    if isinstance(block, POST_NORM):
        return getattr(block, f"norm{which}")(x)
    if hasattr(block, f"ls{which}"):
        return getattr(block, f"ls{which}")(x)
    gamma = getattr(block, f"gamma_{which}")
    return x if gamma is None else gamma * x


def attention(
    vit: Any, index: int, x: Tensor, sizes: list[float], cells: list[int | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention branch of one image (t, d): the result, keys (t, e) meant over heads, the matrix (t, t) likewise."""
    block = vit.blocks[index]
    attn = block.attn
    t, heads = len(x), attn.num_heads
    q, k, v = heads_of(attn, read(block, x))
    q, k = attn.q_norm(q), attn.k_norm(k)
    keys = k.mean(1)
    q, k = turned(vit, index, q, cells), turned(vit, index, k, cells)
    out, matrices = torch.zeros_like(v), []
    for h in range(heads):
        logits = torch.stack([attn.scale * (q[i, h] @ k[:, h].T) for i in range(t)])
        logits = logits + torch.tensor([math.log(s) for s in sizes])
        weights = logits.softmax(-1)
        matrices.append(weights)
        out[:, h] = weights @ v[:, h]
    mixed = attn.proj(attn.norm(out.flatten(1)))
    return x + added(block, "1", mixed), keys, torch.stack(matrices).mean(0)


def mlp(block: Any, x: Tensor) -> Tensor:
    return x + added(block, "2", block.mlp(x if isinstance(block, POST_NORM) else block.norm2(x)))


def pairs(metric: Tensor, r: int, prefix: int) -> list[tuple[int, int]]:
    """The r merges (from, to) among patch tokens, by looking at every pair."""
    even = [i for i in range(len(metric)) if (i + prefix) % 2 == 0]
    odd = [i for i in range(len(metric)) if (i + prefix) % 2 == 1]
    unit = metric / metric.norm(dim=-1, keepdim=True)
    best = []
    for a in even:
        score, _, b = max((float(unit[a] @ unit[b]), -b, b) for b in odd)
        best.append((score, a, b))
    best.sort(key=lambda item: -item[0])
    return [(a, b) for _, a, b in best[:r]]


def tome(
    vit: Any, image: Tensor, rates: list[int], *, proportional: bool = True, metric: Any = None
) -> tuple[Tensor, list[list[int]]]:
    """Final tokens of one image after the norm (t, d), and the cells that each patch token stands for."""
    x = entered(vit, image)
    k, places = vit.num_prefix_tokens, stands(vit, x)
    cells = [[i] for i in range(len(x) - k)]
    sizes = [1.0] * len(x)
    for index, block in enumerate(vit.blocks):
        before = x
        x, keys, _ = attention(vit, index, x, sizes if proportional else [1.0] * len(sizes), places)
        if metric is not None:
            keys = metric(index, read(block, before))
        r = min(rates[index], (len(x) - k) // 2)
        merges = dict(pairs(keys[k:], r, k))
        if r:
            patches = range(len(x) - k)
            keep = [i for i in patches if i not in merges and (i + k) % 2 == 0]
            if not k:  # as in the original: by falling similarity where no prefix has to stay first
                order = [a for a, _ in pairs(keys, len(x), k)]
                keep = [a for a in order if a not in merges]
            keep += [i for i in patches if (i + k) % 2 == 1]
            rows, new_cells, new_sizes, new_places = list(x[:k]), [], sizes[:k], places[:k]
            for i in keep:
                group = [i, *[a for a, b in merges.items() if b == i]]
                total = sum(sizes[k + g] for g in group)
                rows.append(sum(x[k + g] * sizes[k + g] for g in group) / total)
                new_cells.append([c for g in group for c in cells[g]])
                new_sizes.append(total)
                new_places.append(places[k + i])
            x, cells, sizes, places = torch.stack(rows), new_cells, new_sizes, new_places
        x = mlp(block, x)
    return vit.norm(x), cells


def evit(vit: Any, image: Tensor, keep: float, at: tuple[int, ...]) -> Tensor:
    """Final tokens of one image after the norm (t, d)."""
    x = entered(vit, image)
    k, places = vit.num_prefix_tokens, stands(vit, x)
    for index, block in enumerate(vit.blocks):
        x, _, matrix = attention(vit, index, x, [1.0] * len(x), places)
        n = len(x) - k
        kept = math.ceil(keep * n)
        if index in at and kept < n:
            row = matrix[0, k:]
            ranked = sorted(range(n), key=lambda i: -float(row[i]))
            fused = sum(row[i] * x[k + i] for i in ranked[kept:])
            stay = [k + i for i in sorted(ranked[:kept])]
            x, places = torch.stack([*x[:k], *x[stay], fused]), [*places[:k], *[places[i] for i in stay], None]
        x = mlp(block, x)
    return vit.norm(x)


def dynamicvit(vit: Any, image: Tensor, predictors: Any, kept: dict[int, int]) -> Tensor:
    """Final tokens of one image after the norm (t, d); `kept`: at which blocks how many patches stay."""
    x = entered(vit, image)
    k, places = vit.num_prefix_tokens, stands(vit, x)
    for index, block in enumerate(vit.blocks):
        if index in kept:
            score = predictors[list(kept).index(index)](x[None, k:], None)[0, :, 0].tolist()
            best = sorted(range(len(score)), key=lambda j: -score[j])[: kept[index]]
            stay = [*range(k), *[k + j for j in sorted(best)]]
            x, places = x[stay], [places[i] for i in stay]
        x = mlp(block, attention(vit, index, x, [1.0] * len(x), places)[0])
    return vit.norm(x)


def soft_pairs(scores: Tensor, r: int, targets: int, temperature: float) -> Tensor:
    """Shares (a, c) that DTEM's training moves, for one image."""
    logits = {
        (a, b): float(scores[a, b]) / temperature
        for a in range(scores.shape[0])
        for b in sorted(range(scores.shape[1]), key=lambda j: -float(scores[a, j]))[:targets]
    }
    taken = dict.fromkeys(logits, 0.0)
    for _ in range(r):
        top = max(logits.values())
        total = sum(math.exp(v - top) for v in logits.values())
        share = {key: math.exp(v - top) / total for key, v in logits.items()}
        for key, value in share.items():
            taken[key] += value
            logits[key] += math.log(1 - min(value, 1 - 1e-6))
    result = torch.zeros_like(scores)
    for (a, b), value in taken.items():
        result[a, b] = value / max(1.0, sum(v for (x, _), v in taken.items() if x == a))
    return result
