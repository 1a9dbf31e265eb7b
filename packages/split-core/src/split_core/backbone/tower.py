"""A transformers vision encoder (CLIP, SigLIP) under the names that timm gives the parts of a ViT.

Vision-language models read such encoders: LLaVA-1.5 takes the tokens before CLIP's last layer, without its final norm.
`VisionTower` keeps the original modules and shows them as `SplitViT` expects them. transformers is not imported:
whatever has CLIP's parts fits, and the probe of every block (`split_core.backbone.probe`) checks that it computes the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from split_core.errors import SplitError


@dataclass(frozen=True)
class TowerAttention:
    """CLIP's attention (q, k, v apart, no norms), with the attributes of timm's.

    Args:
        module: the original.
    """

    module: Any
    q_norm = k_norm = proj_drop = nn.Identity()

    @property
    def num_heads(self) -> int:
        return self.module.num_heads

    @property
    def scale(self) -> float:
        return self.module.scale

    @property
    def q_proj(self) -> nn.Module:
        return self.module.q_proj

    @property
    def k_proj(self) -> nn.Module:
        return self.module.k_proj

    @property
    def v_proj(self) -> nn.Module:
        return self.module.v_proj

    @property
    def proj(self) -> nn.Module:
        return self.module.out_proj

    @property
    def attn_drop(self) -> nn.Dropout:
        return nn.Dropout(self.module.dropout)

    @property
    def training(self) -> bool:
        return self.module.training


class TowerBlock(nn.Module):
    """An encoder layer with the attributes of a timm Block.

    Args:
        layer: has layer_norm1, self_attn, layer_norm2 and mlp; called by itself it must give the same.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        missing = [name for name in ("layer_norm1", "self_attn", "layer_norm2", "mlp") if not hasattr(layer, name)]
        attention = getattr(layer, "self_attn", None)
        missing += [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "out_proj") if not hasattr(attention, n)]
        if missing:
            raise SplitError(
                f"cannot wrap a vision tower of {type(layer).__name__}s: {', '.join(missing)} missing. CLIP's and "
                f"SigLIP's encoder layers are supported"
            )
        self.layer = layer
        self.ls1 = self.ls2 = self.drop_path1 = self.drop_path2 = nn.Identity()

    @property
    def norm1(self) -> Any:
        return self.layer.layer_norm1

    @property
    def norm2(self) -> Any:
        return self.layer.layer_norm2

    @property
    def mlp(self) -> Any:
        return self.layer.mlp

    @property
    def attn(self) -> TowerAttention:
        return TowerAttention(self.layer.self_attn)

    def forward(self, x: Float[Tensor, "b n d"]) -> Tensor:
        """The layer by itself."""
        out = self.layer(x, attention_mask=None)
        return out[0] if isinstance(out, tuple) else out


@dataclass(frozen=True)
class TowerEmbed:
    """Patch embedding of a tower, under timm's names."""

    proj: nn.Conv2d
    norm: nn.Module
    img_size: tuple[int, int]
    patch_size: tuple[int, int]

    @property
    def grid_size(self) -> tuple[int, int]:
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]


class VisionTower(nn.Module):
    """CLIP's or SigLIP's vision encoder up to the layers that a language model reads.

    Args:
        model: transformers' vision model, or a wrapper that holds it as `vision_model`. Its modules are shared.
        layers: indices into its hidden states, as in LlavaConfig.vision_feature_layer: -2 is the input of the last
            layer. Blocks after the last of them are left out.
        mean, std: normalisation of its images.
        checkpoint: by what a task finds the parts that belong to it (projector, language model).

    Attributes have timm's names: patch_embed, pos_embed, cls_token, blocks, norm_pre, norm ... There is no head: the
    wrapped model returns the mean of the patch tokens. Where several layers are read, `taps` are the numbers of their
    blocks, rising, and `order` says at which tap each of the layers is.

    Raises:
        SplitError: the encoder has other parts, or a layer that it does not have.
    """

    global_pool = "avg"
    attn_pool = None
    grad_checkpointing = False
    no_embed_class = False
    pool_include_prefix = False
    reg_token = None

    def __init__(
        self, model: nn.Module, *, layers: int | Sequence[int] = -2, mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5), checkpoint: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        inner: Any = getattr(model, "vision_model", model)
        embeddings, encoder = getattr(inner, "embeddings", None), getattr(inner, "encoder", None)
        if not all(hasattr(embeddings, n) for n in ("patch_embedding", "position_embedding")) or encoder is None:
            raise SplitError(
                f"cannot wrap a {type(model).__name__} as vision tower: CLIP's embeddings and encoder are needed"
            )
        depth = len(encoder.layers)
        after = [_blocks_before(index, depth) for index in ([layers] if isinstance(layers, int) else layers)]
        assert embeddings is not None
        self.embeddings: Any = embeddings
        self.blocks = nn.ModuleList(TowerBlock(layer) for layer in encoder.layers[: max(after)])
        self.taps = tuple(sorted({n - 1 for n in after})) if len(after) > 1 else ()
        self.order = tuple(self.taps.index(n - 1) for n in after) if self.taps else ()
        self.norm_pre = getattr(inner, "pre_layrnorm", nn.Identity())  # transformers spells it so
        # hidden states come before the final norm
        self.norm = self.pos_drop = self.fc_norm = self.head_drop = self.head = nn.Identity()
        self.embed_dim = int(self.embeddings.patch_embedding.out_channels)
        self.num_prefix_tokens = int(hasattr(embeddings, "class_embedding"))
        self.pretrained_cfg = {"mean": tuple(mean), "std": tuple(std)}
        self.checkpoint = checkpoint
        rows = self.embeddings.position_embedding.weight.shape[0] - self.num_prefix_tokens
        grid = self.patch_embed.grid_size
        if grid[0] * grid[1] != rows:
            raise SplitError(f"the vision tower has {rows} positions and a grid of {grid[0]}x{grid[1]} patches")

    @property
    def patch_embed(self) -> TowerEmbed:
        proj, side = self.embeddings.patch_embedding, int(self.embeddings.image_size)
        patch = (int(proj.kernel_size[0]), int(proj.kernel_size[1]))
        return TowerEmbed(proj, nn.Identity(), (side, side), patch)

    @property
    def pos_embed(self) -> Float[Tensor, "1 n d"]:
        return self.embeddings.position_embedding.weight[None]

    @property
    def cls_token(self) -> Float[Tensor, "1 1 d"] | None:
        return self.embeddings.class_embedding[None, None] if self.num_prefix_tokens else None

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters are of the stem and which of what block, as timm's models say it."""
        return {"stem": r"^embeddings|norm_pre", "blocks": r"^blocks\.(\d+)"}

    def tokens(self, images: Float[Tensor, "b ch H W"]) -> Float[Tensor, "b n d"]:
        """What the dense encoder gives after the last block read, the class token included."""
        return self.forward_intermediates(images, indices=[])[0]

    def forward_intermediates(
        self, images: Float[Tensor, "b ch H W"], indices: Any, **_: Any
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Tokens after the last block, and (patches, prefix) after the blocks named: timm's method as far as it is used
        here, (b, n, d) without final norm."""
        x, kept = self.norm_pre(self.embeddings(images)), []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if not isinstance(indices, int) and index in indices:
                kept.append((x[:, self.num_prefix_tokens :], x[:, : self.num_prefix_tokens]))
        return x, kept

    def forward(self, images: Float[Tensor, "b ch H W"]) -> Float[Tensor, "b d"]:
        """Mean of the dense patch tokens."""
        return self.tokens(images)[:, self.num_prefix_tokens :].mean(1)


def _blocks_before(index: int, depth: int) -> int:
    """Blocks that a hidden state has passed: hidden_states[0] is the embedding, [-1] the last block's output."""
    blocks = index if index >= 0 else depth + 1 + index
    if not 1 <= blocks <= depth:
        raise SplitError(
            f"vision_feature_layer {index}: the tower has {depth} layers, so 1 to {depth} or -{depth} to -1"
        )
    return blocks
