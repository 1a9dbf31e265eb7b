"""Small models that tests build in milliseconds: timm Vision Transformers of each family, and plain policies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from split_core.policy import SplitPolicy, StageView

FAMILIES: dict[str, dict[str, Any]] = {
    "vit": {},
    "gap": {"class_token": False, "global_pool": "avg", "fc_norm": True},
    "gap_with_class_token": {"global_pool": "avg"},
    "gap_over_prefix": {"global_pool": "avg", "reg_tokens": 2, "pool_include_prefix": True},
    "clip": {"pre_norm": True},
    "dinov2": {"init_values": 0.5},
    "registers": {"reg_tokens": 4},
    "registers_without_position": {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.5},
    "deit3": {"no_embed_class": True, "init_values": 0.5},
    "qk_norm": {"qk_norm": True},
    "attention_norm": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "no_positions": {"pos_embed": "none"},
    "embed_norm": {"embed_norm_layer": nn.LayerNorm},
    "no_head": {"num_classes": 0},
}


def jitter(module: nn.Module, seed: int = 0, spread: float = 0.1) -> nn.Module:
    """Move every parameter off its start, so that zeros, ones and tiny position tables hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return module


def tiny_vit(family: str = "vit", *, seed: int = 0, **options: Any) -> VisionTransformer:
    """An untrained model of 2 blocks and 32 channels on 8 px patches, in eval mode."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5,
    }  # fmt: skip
    model = VisionTransformer(**{**sizes, **FAMILIES[family], **options})
    jitter(model, seed)
    return model.eval()


class Logits(SplitPolicy):
    """Scores drawn once from a seed for each image row and parent, whatever the image shows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, view: StageView) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + view.scale)
        return torch.randn(view.parents.shape[:2], generator=generator).to(view.parents.device)


class Bright(SplitPolicy):
    """Scores by content, each image on its own: the first channel of the parent's embedding."""

    def forward(self, view: StageView) -> Tensor:
        return view.parents[..., 0] - 0.05


class Linear(SplitPolicy):
    """The smallest learned policy: one linear layer on the parent's embedding."""

    learned: ClassVar[bool] = True
    default_rule: ClassVar[str] = "threshold"

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, view: StageView) -> Tensor:
        return self.score(view.parents).squeeze(-1)


class Everywhere(SplitPolicy):
    """Every parent splits: the dense model."""

    def forward(self, view: StageView) -> Tensor:
        return view.parents.new_ones(view.parents.shape[:2])


def images(batch: int, height: int = 32, width: int | None = None, *, seed: int = 1) -> Tensor:
    """Normalised noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width or height, generator=generator)


def relative(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference as a share of the expected norm."""
    return float((value - expected).detach().norm() / expected.norm().clamp_min(1e-12))
