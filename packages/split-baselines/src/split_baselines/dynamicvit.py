"""DynamicViT: small networks in front of three blocks score the patches, and the best stay (Rao et al. 2021).

Of the image's N patches, keep^i * N stay after stage i. Deployed, the rest leaves. In training all stay in the
sequence and a hard Gumbel-softmax choice with straight-through gradient weighs them as keys of attention (0 or 1);
two losses are added: the squared gap between the mean choice and keep^i, and the distance of what is kept at the end
to the same tokens of the dense model. Deviation: the paper's teacher is a frozen copy of the model before training;
here it is the model itself with every token, without gradient, so that no second set of weights is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from split_baselines.configs import DynamicViTConfig
from split_baselines.dropping import keeps, share_of, stages, take
from split_core.flops import Layers
from split_core.reduced import Tokens
from split_core.reducer import Reducer


class Predictor(nn.Module):
    """Log-probabilities (keep, drop) of each patch from its own features and the mean of those still kept."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        self.enter = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * half), nn.GELU())
        self.leave = nn.Sequential(
            nn.Linear(2 * half, half), nn.GELU(), nn.Linear(half, max(1, half // 2)), nn.GELU(),
            nn.Linear(max(1, half // 2), 2), nn.LogSoftmax(-1),
        )  # fmt: skip

    def forward(self, x: Float[Tensor, "b n d"], kept: Float[Tensor, "b n"] | None) -> Float[Tensor, "b n 2"]:
        own, shared = self.enter(x).chunk(2, -1)
        weight = torch.ones_like(shared[..., :1]) if kept is None else kept[..., None]
        mean = (shared * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1e-6)
        return self.leave(torch.cat([own, mean.expand_as(shared)], -1))


class DynamicViT(Reducer):
    """Keeps what its predictors say."""

    def __init__(self, config: DynamicViTConfig, vit: nn.Module) -> None:
        super().__init__(config, vit)
        self.at = stages(config, len(self.vit.blocks))
        weight = self.vit.patch_embed.proj.weight
        predictors = [Predictor(self.vit.embed_dim) for _ in self.at]
        self.predictors = nn.ModuleList(predictors).to(weight.device, weight.dtype)

    def plan(self, config: DynamicViTConfig, patches: int) -> Layers:
        layers, left = [], patches
        for index in range(len(self.vit.blocks)):
            if index in self.at:
                left = kept_after(config, self.at.index(index), patches)
            layers.append((left, left))
        return layers

    def strengths(self, cells: tuple[int, int]) -> Iterator[DynamicViTConfig]:
        return keeps(self.config, cells[0] * cells[1])

    def before(self, index: int, tokens: Tokens) -> Tokens:
        if index not in self.at or self.config.keep == 1:
            return tokens
        stage = self.at.index(index)
        scores = self.predictors[stage](tokens.patches, tokens.weight)
        if self.training:
            return self._choose(stage, scores, tokens)
        kept = kept_after(self.config, stage, tokens.owner.shape[1])
        order = scores[..., 0].argsort(dim=1, descending=True, stable=True)
        return take(tokens, order[:, :kept].sort(dim=1).values)

    def finish(self, images: Float[Tensor, "b ch H W"], tokens: Tokens) -> Tokens:
        """In training, the distance of prefix and kept tokens to the dense model's."""
        if not self.training or not self.config.distill_weight or tokens.weight is None:
            return tokens
        mask = F.pad(tokens.weight, (tokens.prefix, 0), value=1.0)
        gap = (tokens.x - self._dense(images)).square().mean(-1)
        distance = (gap * mask).sum() / mask.sum()
        return replace(tokens, losses=(*tokens.losses, ("distill", self.config.distill_weight * distance)))

    def _choose(self, stage: int, scores: Float[Tensor, "b n 2"], tokens: Tokens) -> Tokens:
        """A hard choice among the tokens still kept, and the loss on how many it keeps."""
        chosen = F.gumbel_softmax(scores.float(), hard=True, dim=-1)[..., 0].to(scores.dtype)
        mask = chosen if tokens.weight is None else chosen * tokens.weight
        gap = mask.float().mean(1) - self.config.keep ** (stage + 1)
        loss = self.config.ratio_weight * gap.square().mean() / len(self.at)
        return replace(tokens, weight=mask, losses=(*tokens.losses, (f"ratio_{stage}", loss)))

    @torch.no_grad()
    def _dense(self, images: Float[Tensor, "b ch H W"]) -> Float[Tensor, "b t d"]:
        """The tokens of the model itself when nothing is dropped."""
        tokens = self.enter(images)
        backend = self._backend(tokens)
        for index in range(len(self.vit.blocks)):
            tokens = self._block(index, tokens, backend)
        return self.vit.norm(tokens.x)


def kept_after(config: DynamicViTConfig, stage: int, patches: int) -> int:
    """Patch tokens left after a stage (from 0)."""
    return share_of(config.keep ** (stage + 1), patches)
