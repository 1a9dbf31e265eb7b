"""Settings of the policies.  Torch-free, because the command line reads it before torch is loaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat

from split_core.plugins import PluginConfig


def _one_for_all(value: Any) -> Any:
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


Thresholds = Annotated[tuple[FiniteFloat, ...], BeforeValidator(_one_for_all), Field(min_length=1)]
"""One threshold per scale, scale 1 (parents of 2p pixels) first; the last serves all scales past the end."""

NORM = "scale every input embedding to mean 0, variance 1 first (no parameters)"


class LearnedConfig(PluginConfig):
    """Shared by the decision networks. The paper does not say whether their inputs are normalised.

    Patch embeddings differ by orders of magnitude between pretrained families and no other normalisation stands
    before the decision network, so `norm` is on by default: one learning rate then serves all backbones.
    """

    norm: bool = Field(True, description=NORM)
    dropout: float = Field(0.0, ge=0, lt=1, description="on what h reads and on its hidden units, while it learns")


class CrossAttentionConfig(LearnedConfig):
    """Cross-attention decision network (Sec. 3.2, Eq. 1). The paper leaves the inner sizes open; see `sizes`."""

    width: int | None = Field(None, ge=1, description="attention width; default d / 4 (256 at d = 1024)")
    heads: int | None = Field(None, ge=1, description="attention heads; default one per 64 of width")
    hidden: int | None = Field(None, ge=1, description="hidden units of h; default d / 32, at least 32")


class ContextConfig(CrossAttentionConfig):
    """The decision network with attention among the parents of a stage. Not in the paper."""

    layers: int = Field(2, ge=1, description="transformer layers over the parents")
    mix_width: int | None = Field(None, ge=1, description="their width; default d / 4")


class LookConfig(CrossAttentionConfig):
    """The decision network with a look through the backbone's first blocks. Not in the paper.

    Credit is noisy and context rich, so that the network soon learns the noise of a few thousand images by heart.
    Measured on composites (DINOv2 ViT-S/14, depth 6, 2,240 images, budget .5, unseen objects and backgrounds): object
    recall .52 without dropout, .82 with; .76 if it also compares parents with their children, which says little there.
    """

    depth: int | None = Field(None, ge=1, description="blocks the coarsest patches pass first; default half of them")
    dropout: float = Field(0.5, ge=0, lt=1, description="on what h reads and on its hidden units, while it learns")
    hidden: int | None = Field(None, ge=1, description="hidden units of h; default d / 4, at least 32")
    compare: bool | None = Field(
        None, description="also compare parent and children; default only with several stages, which share a context"
    )


class MLPConfig(LearnedConfig):
    """Two-layer MLP decision network (App. G)."""

    hidden: int | None = Field(None, ge=1, description="hidden units; default: as many parameters as xattn has")


class EntropyConfig(PluginConfig):
    """APT's entropy rule. Entropies are in bits and lie in 0 .. min(9, log2 of the pixels of a patch).

    The defaults are APT's for ImageNet (32 and 64 px patches). APT uses 2, 2, 0.3 for COCO at 1536 px and values in
    4 .. 6 elsewhere: thresholds do not carry over between data sets, so calibrate or give a budget.
    """

    tau: Thresholds = Field((5.75, 4.0), description="split above this entropy in bits; per scale, finest first")


class UpsampleMSEConfig(PluginConfig):
    """Quadformer-like rule. The default thresholds split about half of the parents of photographs at 224 px, p = 16."""

    tau: Thresholds = Field((30.0, 100.0), description="split above this squared error of grey levels (0..255)")
    mode: Literal["bilinear", "nearest"] = Field("bilinear", description="how the shrunk image is enlarged again")


class LaplacianConfig(PluginConfig):
    """Edge-strength rule. The default threshold splits about half of the parents of photographs at 224 px, p = 16."""

    tau: Thresholds = Field(
        (30.0,), description="split above this mean |8-neighbour Laplacian| of grey levels (0..255)"
    )


class CosineConfig(PluginConfig):
    """The warm-start rule (Sec. 3.4) as a policy.

    Dissimilarity lies in 0 .. 1; 0.5 is a child orthogonal to its parent. The paper gives no starting threshold (its
    dual ascent finds one); the default splits about half of the parents of photographs under DINOv2 ViT-S/14 at 224 px.
    Where the useful range lies depends on the backbone, so calibrate or give a budget.
    """

    tau: Thresholds = Field((0.2,), description="split above this dissimilarity of the most different child")


class RandomConfig(PluginConfig):
    """Random splits."""

    q: float = Field(0.5, ge=0, le=1, description="chance that a parent splits when no budget is given")
