"""DTEM: ToMe's merging on an embedding of its own, learned by merging softly (Lee and Hong 2024).

One linear layer per block makes the embedding from what the block's attention reads, detached, so that what tokens say
and when they merge are learned apart. Deployed, the r best pairs merge as in ToMe. In training the choice is relaxed:

    1. each token of A keeps its `targets` most similar tokens of B; logits are similarities / temperature;
    2. r rounds of softmax over all those pairs of an image, each adding log(1 - what is taken) to the logits, give
       every pair a weight; together they sum to r (the continuous relaxation of the r best pairs);
    3. a token that would give more than itself gives itself;
    4. the shares move: sizes and values of B become size-weighted means, A's sizes shrink by what they gave;
    5. the r lightest tokens of A leave, so that training sees as many tokens as deployment.

Gradients reach the embedding through sizes (proportional attention) and values. The backbone trains along where the
engine lets it; adapt.backbone_lr=0 gives the modular training of the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from split_baselines.configs import DTEMConfig
from split_baselines.merging import Matching, follow, halves, match, remain, similarity
from split_baselines.tome import ToMe, rates
from split_core.reduced import Tokens
from split_core.tap import Tap

WIDE = 1024
"""Channels from which the merging embedding is two heads wide."""


class DTEM(ToMe):
    """Merges tokens by the similarity of a learned embedding."""

    def __init__(self, config: DTEMConfig, vit: nn.Module) -> None:
        super().__init__(config, vit)
        dim, blocks = self.vit.embed_dim, self.vit.blocks
        first: Any = blocks[0]
        width = config.width or first.attn.head_dim * (2 if dim >= WIDE else 1)
        weight = self.vit.patch_embed.proj.weight
        self.metric = nn.ModuleList(nn.Linear(dim, width) for _ in blocks).to(weight.device, weight.dtype)

    def reduce(self, index: int, tokens: Tokens, tap: Tap) -> Tokens:
        r = min(rates(self.config, len(self.vit.blocks))[index], tokens.count // 2)
        if r == 0 or not self.training:
            return super().reduce(index, tokens, tap)
        scores = similarity(self._embedding(index, tap), tokens.prefix)
        shares = soft_pairs(scores, r, self.config.targets, self.config.temperature)
        return soft_merge(tokens, shares, scores, r)

    def matching(self, index: int, tap: Tap, r: int) -> Matching:
        with torch.no_grad():
            return match(self._embedding(index, tap), r, tap.prefix)

    def _embedding(self, index: int, tap: Tap) -> Float[Tensor, "b n e"]:
        return self.metric[index](tap.input[:, tap.prefix :].detach())


def soft_pairs(scores: Float[Tensor, "b a c"], r: int, targets: int, temperature: float) -> Float[Tensor, "b a c"]:
    """What share of itself each token of A gives to each of B; an image's shares sum to at most r."""
    best, place = scores.topk(min(targets, scores.shape[2]), dim=-1)
    logits = (best / temperature).flatten(1)
    taken = torch.zeros_like(logits)
    remaining = logits
    for _ in range(r):
        share = remaining.softmax(-1)
        taken = taken + share
        remaining = remaining + torch.log1p(-share.clamp(max=1 - 1e-6))
    pairs = taken.view_as(best)
    pairs = pairs / pairs.sum(-1, keepdim=True).clamp_min(1)
    return torch.zeros_like(scores).scatter(-1, place, pairs)


def soft_merge(tokens: Tokens, shares: Float[Tensor, "b a c"], scores: Float[Tensor, "b a c"], r: int) -> Tokens:
    """Move the shares, then let the r lightest tokens of A leave. Owners follow the hard choice."""
    a, b = halves(tokens.count, tokens.prefix)
    patches = tokens.patches
    size = patches.new_ones(patches.shape[:2]) if tokens.weight is None else tokens.weight
    given = shares.to(patches.dtype) * size[:, a, None]
    received = size[:, b] + given.sum(1)
    values = (patches[:, b] * size[:, b, None] + given.transpose(1, 2) @ patches[:, a]) / received[..., None]
    kept_size = size[:, a] - given.sum(2)
    order = kept_size.argsort(dim=1, stable=True)
    leave, stay = order[:, :r], order[:, r:].sort(dim=1).values
    target = torch.empty(patches.shape[:2], dtype=torch.long, device=patches.device)
    count = stay.shape[1]
    of_a = torch.empty_like(order)
    of_a.scatter_(1, stay, torch.arange(count, device=order.device).expand_as(stay))
    of_a.scatter_(1, leave, count + scores.argmax(-1).gather(1, leave))
    target[:, a], target[:, b] = of_a, count + torch.arange(scores.shape[2], device=order.device)
    remaining = patches[:, a].gather(1, stay[..., None].expand(-1, -1, patches.shape[2]))
    sizes = torch.cat([kept_size.gather(1, stay).clamp_min(0), received], 1)
    cell = remain(tokens.cell, target, count + scores.shape[2], tokens.prefix)
    return tokens.with_patches(torch.cat([remaining, values], 1), follow(tokens.owner, target), sizes, cell)
