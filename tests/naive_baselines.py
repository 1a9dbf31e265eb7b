"""The reducers written out token by token, image by image: what the vectorised ones are judged by."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention(block: Any, x: Tensor, sizes: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Attention branch of one image (t, d): the result, keys (t, e) meant over heads, the matrix (t, t) likewise."""
    attn = block.attn
    t, heads = len(x), attn.num_heads
    q, k, v = attn.qkv(block.norm1(x)).view(t, 3, heads, -1).unbind(1)
    q, k = attn.q_norm(q), attn.k_norm(k)
    out, matrices = torch.zeros_like(v), []
    for h in range(heads):
        logits = torch.stack([attn.scale * (q[i, h] @ k[:, h].T) for i in range(t)])
        logits = logits + torch.tensor([math.log(s) for s in sizes])
        weights = logits.softmax(-1)
        matrices.append(weights)
        out[:, h] = weights @ v[:, h]
    mixed = attn.proj(attn.norm(out.flatten(1)))
    return x + block.ls1(mixed), k.mean(1), torch.stack(matrices).mean(0)


def mlp(block: Any, x: Tensor) -> Tensor:
    return x + block.ls2(block.mlp(block.norm2(x)))


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
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(image[None])))[0]
    k = vit.num_prefix_tokens
    cells = [[i] for i in range(len(x) - k)]
    sizes = [1.0] * len(x)
    for index, block in enumerate(vit.blocks):
        entered = x
        x, keys, _ = attention(block, x, sizes if proportional else [1.0] * len(sizes))
        if metric is not None:
            keys = metric(index, entered)
        r = min(rates[index], (len(x) - k) // 2)
        merges = dict(pairs(keys[k:], r, k))
        if r:
            patches = range(len(x) - k)
            keep = [i for i in patches if i not in merges and (i + k) % 2 == 0]
            if not k:  # as in the original: by falling similarity where no prefix has to stay first
                order = [a for a, _ in pairs(keys, len(x), k)]
                keep = [a for a in order if a not in merges]
            keep += [i for i in patches if (i + k) % 2 == 1]
            rows, new_cells, new_sizes = list(x[:k]), [], sizes[:k]
            for i in keep:
                group = [i, *[a for a, b in merges.items() if b == i]]
                total = sum(sizes[k + g] for g in group)
                rows.append(sum(x[k + g] * sizes[k + g] for g in group) / total)
                new_cells.append([c for g in group for c in cells[g]])
                new_sizes.append(total)
            x, cells, sizes = torch.stack(rows), new_cells, new_sizes
        x = mlp(block, x)
    return vit.norm(x), cells


def evit(vit: Any, image: Tensor, keep: float, at: tuple[int, ...]) -> Tensor:
    """Final tokens of one image after the norm (t, d)."""
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(image[None])))[0]
    k = vit.num_prefix_tokens
    for index, block in enumerate(vit.blocks):
        x, _, matrix = attention(block, x, [1.0] * len(x))
        n = len(x) - k
        kept = math.ceil(keep * n)
        if index in at and kept < n:
            row = matrix[0, k:]
            ranked = sorted(range(n), key=lambda i: -float(row[i]))
            fused = sum(row[i] * x[k + i] for i in ranked[kept:])
            x = torch.stack([*x[:k], *[x[k + i] for i in sorted(ranked[:kept])], fused])
        x = mlp(block, x)
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
