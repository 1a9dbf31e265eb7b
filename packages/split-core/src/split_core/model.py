"""SplitViT: a timm Vision Transformer on mixed-resolution tokens. `forward_features` is Figure 2 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from split_core import hub
from split_core.attention import AttentionBackend, choose_backend
from split_core.backbone.blocks import BLOCKS, compiled
from split_core.backbone.check import check_backbone
from split_core.backbone.stream import Streams, streams
from split_core.decision import Decision, check_reachable
from split_core.errors import SplitError
from split_core.features import Features, Pooling, check_taps, timm_head
from split_core.packing import Packed, carry, coarse_map, pack
from split_core.policy import SplitPolicy, StageView
from split_core.positions import PositionTable
from split_core.pyramid import Down, PyramidEmbed, check_waste
from split_core.quadtree import build_layout, coarse_layout
from split_core.rope import Place, RopeTable
from split_core.types import Layout, Look, Pyramid, Splits
from split_core.windows import Windows


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
        compile_blocks: run the blocks through torch.compile.
        rope: where a coarse token stands for rotary positions, if the model has them.
        windows: within which most blocks attend; None means that all attend across the image.

    Raises:
        SplitError: the model is of a kind that cannot run so; or, at its own image size, a coarse patch is far larger
            than the image or the budget below what coarse patches alone spend.
    """

    def __init__(
        self, vit: nn.Module, policy: SplitPolicy, *, stages: int, decision: Decision, attention: str = "auto",
        down: Down = "area", pooling: Pooling = "area", antialias: bool = True, rope: Place = "center",
        compile_blocks: bool = False, windows: Windows | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vit = check_backbone(vit)
        patch_embed = self.vit.patch_embed
        self.windows = windows
        if windows is not None:
            windows.check_model(blocks=len(self.vit.blocks), prefix=self.vit.num_prefix_tokens, stages=stages)
        side = 0 if windows is None else windows.size
        self.embed = PyramidEmbed(patch_embed.proj, norm=patch_embed.norm, stages=stages, down=down, window=side)
        own = self.embed.grid(tuple(patch_embed.img_size))
        check_waste(own)
        if decision.budget is not None and decision.rule in ("image", "batch"):
            check_reachable(decision.budget, own)
        self.positions = PositionTable(self.vit, antialias=antialias)
        self.rope = RopeTable(self.vit, place=rope)
        self.policy = policy
        self.decision = decision
        self.attention = attention
        self.pooling = pooling
        self.compile_blocks = compile_blocks
        self.spec: hub.Spec | None = None
        """What the model was wrapped with, where that has a name."""
        self.layout: Layout | None = None
        """The layout of the last forward, for inspection."""
        self.taps: tuple[int, ...] = ()
        """Blocks whose output every `encode` brings along, because the task reads them (`Task.taps`)."""

    def forward(self, images: Float[Tensor, "b ch H W"], layout: Layout | None = None) -> Any:
        """What the timm model returns for these images: logits; any H and W."""
        return self.forward_head(self.forward_features(images, layout=layout))

    def forward_features(
        self, images: Float[Tensor, "b ch H W"], layout: Layout | None = None,
        valid: Bool[Tensor, "b r c"] | None = None, **seen: Any,
    ) -> Features:  # fmt: skip
        """Image -> pyramid -> decisions -> layout -> packed sequence -> blocks (Fig. 2).

        Args:
            layout: a partition to use instead of the policy's.
            valid: as for `PyramidEmbed`, when pictures of different sizes share a canvas.
            seen: as for `tokenize`.
        """
        pyramid = self.pyramid(images, valid)
        layout = layout or self.decide(pyramid, images, **seen)
        self.layout = layout
        return self.encode(pyramid, layout)

    def features(
        self, images: Float[Tensor, "b ch H W"], taps: Sequence[int], layout: Layout | None = None
    ) -> tuple[Float[Tensor, "b d r c"], ...]:
        """Dense maps of the tokens after the blocks numbered `taps`, rising: what dense heads read (Sec. 4.3)."""
        pyramid = self.pyramid(images)
        self.layout = layout = layout or self.decide(pyramid, images)
        features = self.encode(pyramid, layout, taps=taps)
        return tuple(features.dense(tap) for tap in range(len(taps)))

    def tokenize(self, images: Float[Tensor, "b ch H W"], **seen: Any) -> Layout:
        """The decisions only. `seen`: objects=, generator= for policies that use them (see `StageView`)."""
        return self.decide(self.pyramid(images), images, **seen)

    def pyramid(self, images: Float[Tensor, "b ch H W"], valid: Bool[Tensor, "b r c"] | None = None) -> Pyramid:
        """Embeddings of every patch at every scale (Sec. 3.1)."""
        check_images(images, self.embed.proj.in_channels, self.embed.proj.weight.dtype)
        pyramid = self.embed(images, valid)
        return replace(pyramid, look=self.look(pyramid)) if self.depth else pyramid

    @property
    def depth(self) -> int:
        """Blocks that the coarsest patches pass before anything is decided (`SplitPolicy.depth`)."""
        return self.policy.depth

    @property
    def carries(self) -> bool:
        """Whether the mixed sequence goes on from there (`SplitPolicy.carries`)."""
        return self.policy.carries

    def look(self, pyramid: Pyramid) -> Look:
        """The coarsest patches through the first blocks; under no_grad where the result only serves decisions."""
        layout = coarse_layout(pyramid.grid, pyramid.batch, pyramid.valid, pyramid.levels[0].device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.carries):
            packed = self.pack(pyramid, layout)
            after, _ = self.run(packed.tokens, self.streams(packed, layout), stop=self.depth)
            change = after - packed.tokens
            tokens, patch_change = (coarse_map(x.index_select(0, packed.patch_index), layout) for x in (after, change))
            return Look(tokens, patch_change, change[packed.prefix_index])

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

    def encode(
        self,
        pyramid: Pyramid,
        layout: Layout,
        *,
        taps: Sequence[int] | None = None,
        attention: AttentionBackend | None = None,
    ) -> Features:
        """Pack the tokens of `layout` and run the blocks. A layout of K * b images reads a pyramid of b.

        Args:
            taps: numbers of the blocks whose output is wanted too, rising; None means the model's own.
            attention: mixes tokens instead of the model's own backend.
        """
        taps = self.taps if taps is None else taps
        packed = self.pack(pyramid, layout)
        x, start = packed.tokens, 0
        if self.carries:
            assert pyramid.look is not None
            x, start = carry(pyramid.look, packed, layout), self.depth
        x, tapped = self.run(x, self.streams(packed, layout, attention), start=start, taps=taps)
        return Features(self.vit.norm(x), packed, layout, tapped)

    def pack(self, pyramid: Pyramid, layout: Layout) -> Packed:
        """The tokens of `layout` as they enter the first block."""
        packed = pack(pyramid, layout, self.positions.patches(pyramid.grid), self.positions.prefix())
        return replace(packed, tokens=self.vit.norm_pre(self.vit.pos_drop(packed.tokens)))

    def streams(self, packed: Packed, layout: Layout, attention: AttentionBackend | None = None) -> Streams:
        """What each block must know of a packed batch."""
        if attention is None:
            attention = choose_backend(self.attention, packed.tokens.device, kernel_dtype(packed.tokens))
        return streams(packed, layout, attention, self.rope, self.windows)

    def run(
        self, x: Float[Tensor, "T d"], streams: Streams, *, start: int = 0, stop: int | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "T d"], tuple[Tensor, ...]]:  # fmt: skip
        """Blocks start .. stop - 1, and the tokens after those of `taps`.

        Raises:
            SplitError: a tap is none of these blocks, or they do not rise.
        """
        stop = len(self.vit.blocks) if stop is None else stop
        check_taps(taps, start, stop)
        tapped = []
        for index, block in enumerate(self.vit.blocks[start:stop], start=start):
            execute = BLOCKS[type(block)]
            execute = compiled(execute) if self.compile_blocks else execute
            if self.vit.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(execute, block, x, streams(index), use_reentrant=False)
            else:
                x = execute(block, x, streams(index))
            if index in taps:
                tapped.append(x)
        return x, tuple(tapped)

    def forward_head(self, features: Features) -> Any:
        """The timm model's own head on the pooled tokens: logits (two for a distilled model that trains as such)."""
        return timm_head(self.vit, features, self.pooling)

    @property
    def transforms(self) -> dict[str, Any]:
        """How images are prepared for the model: arguments of `timm.data.create_transform`."""
        return hub.transforms(self.vit)

    def save_pretrained(self, folder: str | Path, **options: Any) -> Path:
        """Write weights, configuration and model card; `split_core.load_pretrained` reads them (`hub.save`)."""
        return hub.save(self, folder, **options)

    def push_to_hub(self, repo: str, **options: Any) -> str:
        """Save and upload to the Hugging Face Hub (`hub.push`)."""
        return hub.push(self, repo, **options)

    def unwrap(self) -> nn.Module:
        """The timm model inside."""
        return self.vit

    def __getstate__(self) -> dict:  # type: ignore[type-arg]
        return {**self.__dict__, "layout": None}


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


def kernel_dtype(x: Tensor) -> torch.dtype:
    """The dtype attention will see: autocast's where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
