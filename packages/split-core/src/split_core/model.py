"""SplitViT: a timm Vision Transformer on mixed-resolution tokens. `forward_features` is Figure 2 of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Bool, Float
from pydantic import ValidationError
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from split_core import registry
from split_core.attention import choose_backend
from split_core.backbone.blocks import BLOCKS
from split_core.backbone.check import check_backbone
from split_core.decision import Decision, Rule
from split_core.errors import SplitError, unknown
from split_core.packing import Packed, area_mean, dense_map, pack, token_mean
from split_core.policy import BackboneInfo, SplitPolicy, StageView
from split_core.positions import PositionTable
from split_core.pyramid import Down, PyramidEmbed
from split_core.quadtree import build_layout
from split_core.types import Layout, Pyramid, Splits

Pooling = Literal["area", "token"]


@dataclass(frozen=True)
class Features:
    """What the backbone made of a batch.

    Args:
        tokens: (T, d) after the final norm, prefix tokens included.
        packed: where each token stands.
        layout: what each patch token covers.
    """

    tokens: Float[Tensor, "T d"]
    packed: Packed
    layout: Layout

    @property
    def patches(self) -> Float[Tensor, "t d"]:
        """Patch tokens in the layout's order."""
        return self.tokens.index_select(0, self.packed.patch_index)

    @property
    def prefix(self) -> Float[Tensor, "b k d"]:
        """Class and register tokens."""
        return self.tokens[self.packed.prefix_index]

    def dense(self) -> Float[Tensor, "b d r c"]:
        """A value for every fine cell of the canvas: that of the token over it."""
        return dense_map(self.patches, self.layout)


class SplitViT(nn.Module):
    """A Vision Transformer that reads fine patches where its policy asks for them and coarse ones elsewhere.

    With every parent split it computes what the timm model computes. Use `wrap` to build one.

    Args:
        vit: the timm model; kept as it is under `.vit`.
        policy: scores parents.
        stages: S.
        decision: how scores become splits.
        attention: backend name, or "auto" for the first that runs on the input's device.
        down: image reduction of the coarse scales.
        pooling: how models that average their tokens weigh them: by the area they cover, or equally.
        antialias: how the position table is resampled.
    """

    def __init__(
        self, vit: nn.Module, policy: SplitPolicy, *, stages: int, decision: Decision, attention: str = "auto",
        down: Down = "area", pooling: Pooling = "area", antialias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vit = check_backbone(vit)
        patch_embed = self.vit.patch_embed
        self.embed = PyramidEmbed(patch_embed.proj, norm=patch_embed.norm, stages=stages, down=down)
        self.positions = PositionTable(self.vit, antialias=antialias)
        self.policy = policy
        self.decision = decision
        self.attention = attention
        self.pooling = pooling
        self.layout: Layout | None = None
        """The layout of the last forward, for inspection."""

    def forward(self, images: Float[Tensor, "b ch H W"], layout: Layout | None = None) -> Tensor:
        """What the timm model returns for these images; any H and W."""
        return self.forward_head(self.forward_features(images, layout=layout))

    def forward_features(self, images: Float[Tensor, "b ch H W"], layout: Layout | None = None) -> Features:
        """Image -> pyramid -> decisions -> layout -> packed sequence -> blocks (Fig. 2).

        Args:
            layout: a partition to use instead of the policy's.
        """
        pyramid = self.pyramid(images)
        if layout is None:
            layout = self.decide(pyramid, images)
        return self.encode(pyramid, layout)

    def tokenize(self, images: Float[Tensor, "b ch H W"], **seen: Any) -> Layout:
        """The decisions only. `seen`: objects=, generator= for policies that use them (see `StageView`)."""
        return self.decide(self.pyramid(images), images, **seen)

    def pyramid(self, images: Float[Tensor, "b ch H W"], valid: Bool[Tensor, "b r c"] | None = None) -> Pyramid:
        """Embeddings of every patch at every scale (Sec. 3.1)."""
        check_images(images, self.embed.proj.in_channels, self.embed.proj.weight.dtype)
        return self.embed(images, valid)

    def logits(
        self, pyramid: Pyramid, images: Float[Tensor, "b ch H W"], **seen: Any
    ) -> tuple[Float[Tensor, "b _"], ...]:
        """The policy's logits, index s - 1 for the parents at scale s. One policy serves all stages (Sec. 3.2)."""
        scales = range(1, self.embed.stages + 1)
        return tuple(self.policy(StageView(s, pyramid, images, **seen)) for s in scales)

    def decide(self, pyramid: Pyramid, images: Float[Tensor, "b ch H W"], **seen: Any) -> Layout:
        """Logits -> splits -> layout."""
        return build_layout(self.splits(pyramid, images, **seen), pyramid.valid)

    @torch.no_grad()
    def splits(self, pyramid: Pyramid, images: Float[Tensor, "b ch H W"], **seen: Any) -> Splits:
        """The policy's logits under the decision rule. Decisions are discrete: nothing here carries a gradient."""
        logits = self.logits(pyramid, images, **seen)
        return self.decision(logits, pyramid.grid, pyramid.valid, seen.get("generator"))

    def encode(self, pyramid: Pyramid, layout: Layout) -> Features:
        """Pack the tokens of `layout` and run the blocks. A layout of K * b images reads a pyramid of b."""
        packed = pack(pyramid, layout, self.positions.patches(pyramid.grid), self.positions.prefix())
        x = self.vit.norm_pre(self.vit.pos_drop(packed.tokens))
        backend = choose_backend(self.attention, x.device, _kernel_dtype(x))
        for block in self.vit.blocks:
            x = BLOCKS[type(block)](block, x, packed.segments, backend)
        self.layout = layout
        return Features(self.vit.norm(x), packed, layout)

    def forward_head(self, features: Features) -> Tensor:
        """The timm model's own head on the pooled tokens."""
        vit = self.vit
        if vit.global_pool == "token":
            return vit.forward_head(features.prefix)
        mean = area_mean if self.pooling == "area" else token_mean
        pooled = mean(features.patches, features.layout)
        if getattr(vit, "pool_include_prefix", False):
            cells = features.layout.valid_cells[:, None] if self.pooling == "area" else features.layout.counts[:, None]
            k = features.prefix.shape[1]
            pooled = (pooled * cells + features.prefix.sum(1)) / (cells + k)
        return vit.head(vit.head_drop(vit.fc_norm(pooled)))

    def unwrap(self) -> nn.Module:
        """The timm model inside."""
        return self.vit

    def __getstate__(self) -> dict:  # type: ignore[type-arg]
        return {**self.__dict__, "layout": None}


def wrap(
    model: nn.Module, policy: str | Mapping[str, Any] | SplitPolicy = "entropy", *, stages: int = 1,
    budget: float | None = None, rule: Rule | None = None, **options: Any,
) -> SplitViT:  # fmt: skip
    """Give a timm Vision Transformer adaptive patches.

    Args:
        model: a timm VisionTransformer. It is used as it is, not copied.
        policy: registered name, {"name": ..., setting: value}, or a SplitPolicy.
        stages: S, how often a coarse patch may split: coarse patches have side 2^S p.
        budget: token fraction rho to aim at.
        rule: decision rule (see `split_core.decision`). By default a learned policy splits where its
            probability exceeds one half; an unlearned one spends the budget of each image exactly, best first.
        options: attention, down, pooling, antialias of `SplitViT`.

    Raises:
        SplitError: the model cannot be wrapped, or a name or value is wrong; the message says which.
    """
    check_options(stages=stages, policy=policy, budget=budget, **options)
    vit = check_backbone(model)
    if isinstance(policy, SplitPolicy):
        scorer = policy
    else:
        try:
            scorer = registry.build("policy", policy, backbone_info(vit, stages=stages, budget=budget))
        except ValidationError as error:
            fault = error.errors()[0]
            raise SplitError(f"policy.{'.'.join(map(str, fault['loc']))}={fault['input']!r}: {fault['msg']}") from error
    if not scorer.ranks or (rule is None and budget is None):
        rule = "threshold"
    elif rule is None:
        rule = cast(Rule, scorer.default_rule)
    decision = Decision(rule, budget)
    weight = vit.patch_embed.proj.weight
    scorer.to(weight.device, weight.dtype)
    return SplitViT(vit, scorer, stages=stages, decision=decision, **options)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "attention": (str,), "down": get_args(Down), "pooling": get_args(Pooling), "antialias": (True, False)
}  # fmt: skip
"""What `wrap` passes on, and the values each may have (a type where any value of it may)."""


def check_options(*, stages: Any, policy: Any, budget: Any, **options: Any) -> None:
    """One clear line for an argument of `wrap` that is of the wrong kind."""
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise SplitError(f"stages={stages!r}: a whole number of at least 1 is needed")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float)):
        raise SplitError(f"budget={budget!r}: a number in (0, 1] is needed, or None")
    if not isinstance(policy, str | Mapping | SplitPolicy):
        raise SplitError(f"policy={policy!r}: a name, a mapping with a name, or a SplitPolicy is needed")
    for name, value in options.items():
        if name not in OPTIONS:
            raise SplitError(unknown("option of wrap", name, OPTIONS))
        allowed = OPTIONS[name]
        if not (isinstance(value, str) if allowed == (str,) else value in allowed):
            raise SplitError(f"{name}={value!r}: one of {', '.join(map(str, allowed))} is needed")


def backbone_info(vit: VisionTransformer, *, stages: int, budget: float | None) -> BackboneInfo:
    """What policies may know of a timm model."""
    config = getattr(vit, "pretrained_cfg", None) or {}
    mean, std = (tuple(config.get(key) or (0.5, 0.5, 0.5)) for key in ("mean", "std"))
    return BackboneInfo(vit.embed_dim, tuple(vit.patch_embed.patch_size), stages, budget, mean, std)


def check_images(images: Tensor, channels: int, dtype: torch.dtype = torch.float32) -> None:
    """Raise one clear line for input that a convolution would reject in its own words, or accept wrongly."""
    if not isinstance(images, Tensor):
        raise SplitError(f"images must be a torch tensor; got {type(images).__name__}")
    if images.ndim != 4:
        raise SplitError(f"images must be (batch, channels, height, width); got shape {tuple(images.shape)}")
    if images.shape[1] != channels:
        raise SplitError(f"the model wants {channels} channels; got {images.shape[1]} (shape {tuple(images.shape)})")
    if not images.is_floating_point():
        raise SplitError(
            f"images must be normalised floats; got {images.dtype}. Divide by 255 and apply the model's mean and std"
        )
    if images.dtype != dtype and not torch.is_autocast_enabled(images.device.type):
        raise SplitError(f"the model is in {dtype} and the images in {images.dtype}; convert one, or use autocast")
    if min(images.shape[-2:]) < 1:
        raise SplitError(f"images have no pixels: shape {tuple(images.shape)}")


def _kernel_dtype(x: Tensor) -> torch.dtype:
    """The dtype attention will see: autocast's where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
