"""Small models that tests build in milliseconds: timm Vision Transformers of each family, and plain policies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock, VisionTransformer
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
    "siglip": {"class_token": False, "global_pool": "map"},
    "map_with_class_token": {"global_pool": "map"},
    "post_norm": {"block_fn": ResPostBlock},
    "parallel": {"block_fn": ParallelScalingBlock, "init_values": 0.5},
    "parallel_things": {"block_fn": ParallelThingsBlock, "init_values": 0.5},
    "distilled": {},
    "eva": {},
    "eva02": {
        "use_rot_pos_emb": True, "ref_feat_shape": (2, 2), "swiglu_mlp": True, "scale_mlp": True, "qkv_fused": False,
    },
    "eva02_fused": {"use_rot_pos_emb": True, "ref_feat_shape": (16, 16), "init_values": 0.5, "scale_attn_inner": True},
    "eva_post_norm": {"use_post_norm": True, "global_pool": "token"},
    "dinov3": {
        "use_rot_pos_emb": True, "use_abs_pos_emb": False, "rope_type": "dinov3", "rope_rotate_half": True,
        "rope_temperature": 100.0, "num_reg_tokens": 4, "init_values": 0.5, "qkv_bias": False, "use_fc_norm": False,
    },
    "pe": {
        "use_rot_pos_emb": True, "attn_type": "rope", "rope_grid_offset": 1.0, "rope_grid_indexing": "xy",
        "use_pre_transformer_norm": True, "global_pool": "map", "attn_pool_num_heads": 2, "attn_pool_mlp_ratio": 2.0,
    },
    "rope_mixed": {
        "use_rot_pos_emb": True, "use_abs_pos_emb": False, "rope_type": "mixed", "attn_type": "rope",
        "rope_grid_indexing": "xy", "global_pool": "token", "init_values": 0.5,
    },
    "rope_axial_gap": {
        "use_rot_pos_emb": True, "use_abs_pos_emb": False, "class_token": False, "rope_grid_indexing": "xy",
    },
}  # fmt: skip
EVA = ("eva", "eva02", "eva02_fused", "eva_post_norm", "dinov3", "pe", "rope_mixed", "rope_axial_gap")
ROTARY = ("eva02", "eva02_fused", "dinov3", "pe", "rope_mixed", "rope_axial_gap")


def jitter(module: nn.Module, seed: int = 0, spread: float = 0.1) -> nn.Module:
    """Move every parameter off its start, so that zeros, ones and tiny position tables hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return module


def tiny_vit(family: str = "vit", *, seed: int = 0, **options: Any) -> VisionTransformer | Eva:
    """An untrained model of 2 blocks and 32 channels on 8 px patches, in eval mode."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5,
    }  # fmt: skip
    kind = Eva if family in EVA else VisionTransformerDistilled if "distilled" in family else VisionTransformer
    model = kind(**{**sizes, **FAMILIES[family], **options})
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
    return float((value - expected).detach().norm() / expected.detach().norm().clamp_min(1e-12))
