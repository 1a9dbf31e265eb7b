"""What a reducer is: a timm Vision Transformer that reads fewer tokens in its later layers (ToMe, EViT ...).

A rival to splitting, offered through the hook `split_reducers`. It offers a task and the engine what `SplitViT`
does: `forward_features` (Features whose layout says which cells each token stands for), `forward_head`, `embed.grid`,
`layout`, `attention`, `unwrap`; and instead of a policy with a decision rule it has settings, of which `spend` picks
the weakest that computes no more than splitting at the same budget.

The timm modules are composed, never changed: blocks are run by the executors that `SplitViT` uses, on the same
attention backends, and a subclass says in `reduce` (between attention and MLP) or `before` (in front of a block)
what becomes of the tokens. All images keep equally many, so a batch stays a plain (b, n, d) tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor, nn

from split_core import registry
from split_core.attention import AttentionBackend, choose_backend
from split_core.backbone.blocks import BLOCKS
from split_core.backbone.check import check_reducible
from split_core.backbone.stream import Stream
from split_core.errors import SplitError, unknown
from split_core.features import Features, check_taps, timm_head
from split_core.flops import Layers, backbone_flops, layer_flops
from split_core.model import check_images, kernel_dtype
from split_core.packing import Segments
from split_core.plugins import PluginConfig
from split_core.reduced import FineEmbed, Reduced, ReducedFeatures, Tokens, packed_cover
from split_core.tap import Tap


class Reducer(nn.Module):
    """Base of all reducers. Every token kept in every layer, it is the timm model.

    Class attributes:
        learned, analysis, exact, default_rule, stochastic: as for `SplitPolicy`; the engine asks both.

    Args:
        config: settings of the subclass.
        vit: the timm model; kept as it is under `.vit`.

    Raises:
        SplitError: the model cannot be run this way; names the part that cannot.
    """

    windows: ClassVar[None] = None
    """As `SplitViT.windows`: a model with some is refused."""
    learned: ClassVar[bool] = False
    analysis: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    stochastic: ClassVar[bool] = False
    default_rule: ClassVar[str] = "threshold"

    def __init__(self, config: Any, vit: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.vit = check_reducible(vit)
        self.embed = FineEmbed(self.vit)
        self.attention = "auto"
        self.layout: Reduced | None = None
        """The cover of the last forward, for inspection: `.layers` are its tokens per layer."""
        self.taps: tuple[int, ...] = ()
        """As `SplitViT.taps`."""

    # What a subclass says

    def plan(self, config: Any, patches: int) -> Layers:
        """Patch tokens that attention and MLP of each block read, of an image of `patches` cells."""
        raise NotImplementedError(f"{type(self).__name__} does not define plan(config, patches)")

    def strengths(self, cells: tuple[int, int]) -> Iterator[PluginConfig]:
        """Settings like the present ones that reduce more and more; the present ones if there is nothing to turn."""
        yield self.config

    def before(self, index: int, tokens: Tokens) -> Tokens:
        """What block `index` is given."""
        return tokens

    def reduce(self, index: int, tokens: Tokens, tap: Tap) -> Tokens:
        """What the MLP of block `index` is given.

        Args:
            tokens: after attention.
            tap: input, keys and class attention of the block.
        """
        return tokens

    def key_weight(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        """As how many keys each patch token draws attention."""
        return tokens.weight

    def enter(self, images: Float[Tensor, "b ch H W"]) -> Tokens:
        """What block 0 is given, each patch token standing for its own cell."""
        x = self.embed(images)
        prefix = self.vit.num_prefix_tokens
        own = torch.arange(x.shape[1] - prefix, device=x.device).expand(len(x), -1)
        table = self.embed.rope.cells(self.embed.grid(images.shape[-2:]))
        return Tokens(x, prefix, own, table=table, cell=None if table is None else own)

    def finish(self, images: Float[Tensor, "b ch H W"], tokens: Tokens) -> Tokens:
        """The tokens after the final norm; a place for losses that training adds."""
        return tokens

    # What the engine and users call

    def forward(self, images: Float[Tensor, "b ch H W"]) -> Any:
        """What the timm model returns for these images; any H and W."""
        return self.forward_head(self.forward_features(images))

    def forward_features(
        self, images: Float[Tensor, "b ch H W"], *, taps: Sequence[int] | None = None, objects: Tensor | None = None,
        generator: torch.Generator | None = None, valid: Tensor | None = None,
    ) -> ReducedFeatures:  # fmt: skip
        """Image -> tokens -> blocks on fewer and fewer of them.

        Args:
            taps: numbers of the blocks whose output is wanted too, rising; None means the model's own.
            objects, generator: for the sake of analysis and random policies; a reducer reads neither.
            valid: must be None: all images of a batch keep equally many tokens.

        Raises:
            SplitError: pictures of different sizes share the canvas.
        """
        if valid is not None:
            raise SplitError(
                f"{type(self).__name__} would read the padding of a canvas as picture; it can be compared where all "
                "pictures fill the canvas"
            )
        vit, proj = self.vit, self.vit.patch_embed.proj
        check_images(images, proj.in_channels, proj.weight.dtype)
        grid = self.embed.grid(images.shape[-2:])
        taps = self.taps if taps is None else taps
        check_taps(taps, 0, len(vit.blocks))
        tokens = self.enter(images)
        backend = self._backend(tokens)
        layers: list[tuple[int, int]] = []
        tapped: list[Tokens] = []
        for index in range(len(vit.blocks)):
            entered = self.before(index, tokens)
            tokens = self._block(index, entered, backend)
            layers.append((entered.count, tokens.count))
            if index in taps:
                tapped.append(tokens)
        tokens = self.finish(images, replace(tokens, x=vit.norm(tokens.x)))
        packed, cover = packed_cover(tokens, grid, tuple(layers))
        self.layout = cover
        return ReducedFeatures(
            packed.tokens, packed, cover, tuple(part.x.flatten(0, 1) for part in tapped), tokens.weight,
            tuple(packed_cover(part, grid, tuple(layers)) for part in tapped), tokens.losses,
        )  # fmt: skip

    def forward_head(self, features: Features) -> Any:
        """The timm model's own head on the pooled tokens."""
        return timm_head(self.vit, features, "area")

    def features(self, images: Float[Tensor, "b ch H W"], taps: Sequence[int]) -> tuple[Float[Tensor, "b d r c"], ...]:
        """Dense maps of the tokens after the blocks numbered `taps`, rising."""
        features = self.forward_features(images, taps=taps)
        return tuple(features.dense(tap) for tap in range(len(taps)))

    def spend(self, budget: float, cells: tuple[int, int] | None = None) -> None:
        """Take the settings of `settings_for`."""
        self.config = self.settings_for(budget, cells)

    def settings_for(self, budget: float, cells: tuple[int, int] | None = None) -> Any:
        """The weakest settings that compute no more than the model on `budget` of the tokens from the first layer on.

        Args:
            budget: token fraction in (0, 1].
            cells: rows and columns of patches; the model's own by default.

        Raises:
            SplitError: no settings do.
        """
        if not 0 < budget <= 1:
            raise SplitError(f"budget {budget} is not a token fraction; it must lie in (0, 1]")
        cells = cells or tuple(self.vit.patch_embed.grid_size)
        patches = cells[0] * cells[1]
        allowed = float(backbone_flops(self.vit, budget * patches)) * (1 + 1e-9)
        least = float("inf")
        for config in self.strengths(cells):
            flops = float(layer_flops(self.vit, self.plan(config, patches)))
            if flops <= allowed:
                return config
            least = min(least, flops)
        share = least / float(backbone_flops(self.vit, patches))
        raise SplitError(
            f"{type(self).__name__} cannot be matched to budget {budget:g}: splitting at that share of the tokens "
            f"computes {allowed / float(backbone_flops(self.vit, patches)):.3f} of the dense model's FLOPs, "
            f"its own fewest are {share:.3f}. Raise the budget, or leave it out"
        )

    def unwrap(self) -> nn.Module:
        """The timm model inside."""
        return self.vit

    def _backend(self, tokens: Tokens) -> AttentionBackend:
        return choose_backend(self.attention, tokens.x.device, kernel_dtype(tokens.x))

    def _block(self, index: int, entered: Tokens, backend: AttentionBackend) -> Tokens:
        """One block with `reduce` between its attention and its MLP."""
        block: nn.Module = self.vit.blocks[index]
        tap = Tap(backend, entered.prefix, self.key_weight(entered))
        reduced: list[Tokens] = []

        def between(x: Float[Tensor, "T d"]) -> tuple[Tensor, Segments]:
            tokens = self.reduce(index, replace(entered, x=x.view_as(entered.x)), tap)
            reduced.append(tokens)
            return tokens.x.flatten(0, 1), tokens.segments

        images = entered.segments
        stream = Stream(images, images, tap, entered.rope(index), between, tap.watch)
        x = BLOCKS[type(block)](block, entered.x.flatten(0, 1), stream)
        return replace(reduced[0], x=x.view_as(reduced[0].x))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "layout": None}


def build_reducer(spec: str | Mapping[str, Any], vit: nn.Module, *, budget: float | None = None) -> Reducer:
    """A registered reducer around a timm model.

    Args:
        spec: name, or {"name": ..., setting: value}.
        vit: the timm model; used as it is.
        budget: set its strength by `Reducer.spend`.

    Raises:
        SplitError: no such reducer or setting, or a model or budget that it cannot work on.
    """
    try:
        choice = registry.choose("reducer", spec)
    except ValidationError as error:
        raise SplitError(_explained(error, spec)) from error
    reducer = registry.build("reducer", choice, vit)
    if not isinstance(reducer, Reducer):
        raise SplitError(f"{choice.name!r} is no split_core.reducer.Reducer but a {type(reducer).__name__}")
    if budget is not None:
        reducer.spend(budget)
    return reducer


def _explained(error: ValidationError, spec: str | Mapping[str, Any]) -> str:
    """One line on the first fault."""
    name = spec if isinstance(spec, str) else str(spec["name"])
    fault = error.errors()[0]
    key = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return f"{name}: {unknown('setting', key, registry.get('reducer', name).entry.config.model_fields)}"
    return f"{name}: {key}={fault['input']!r}: {fault['msg']}"
