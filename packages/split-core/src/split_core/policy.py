"""What a splitting policy is: a view of one stage in, one logit per parent out (Sec. 3.2).

A policy scores every parent of a stage, whether or not the parent exists in the end: existence follows from
the coarser stages (`Splits.nested`), so a batch needs no ragged bookkeeping and no device read. At S = 1 the
two are the same; at S > 1 the extra scores cost under 0.3% of a ViT-L.

Learned and heuristic policies share one rule, "split where the logit is positive": a heuristic returns
score - threshold. How logits become splits (threshold, sample, budget) is `split_core.decision`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from split_core.errors import SplitError
from split_core.types import Grid, Pyramid, upsample


@dataclass(frozen=True)
class BackboneInfo:
    """What a policy may know of the backbone when it is built.

    Args:
        dim: embedding width d.
        patch_size: fine patch (rows, columns) in pixels.
        stages: S.
        budget: token fraction aimed at, or None.
        mean, std: the normalisation of the images that the model sees (per channel), so that pixel
            heuristics can undo it.
        blocks: L, the blocks of the backbone.
    """

    dim: int
    patch_size: tuple[int, int]
    stages: int
    budget: float | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    blocks: int = 0


@dataclass(frozen=True)
class StageView:
    """All that a policy sees when it decides for the parents at one scale.

    Args:
        scale: scale s of the parents, S .. 1.
        pyramid: pre-positional embeddings of every scale.
        images: (b, c, H, W) normalised images, not padded.
        objects: (b, r, c) fine cells on labelled objects, for analysis policies only; None in deployment.
        generator: source of randomness for policies that draw; None is torch's global one.
    """

    scale: int
    pyramid: Pyramid
    images: Float[Tensor, "b ch H W"]
    objects: Bool[Tensor, "b r c"] | None = None
    generator: torch.Generator | None = None

    @property
    def grid(self) -> Grid:
        return self.pyramid.grid

    @property
    def parents(self) -> Float[Tensor, "b n d"]:
        """z^p: embeddings of the parents, raster order."""
        return self.pyramid.levels[self.scale]

    @property
    def children(self) -> Float[Tensor, "b n 4 d"]:
        """z^c: embeddings of their four children. Computed at each access: read it once."""
        return self.pyramid.children(self.scale)

    @property
    def context(self) -> Float[Tensor, "b n d"]:
        """For each parent the coarsest token over it after the first `SplitPolicy.depth` blocks.

        Raises:
            SplitError: the policy looks through no block.
        """
        look, grid = self.pyramid.look, self.grid
        if look is None:
            raise SplitError("view.context needs a policy with depth >= 1: the blocks that the coarse patches pass")
        if self.scale == grid.stages:
            return look.tokens
        tokens = look.tokens.transpose(1, 2).unflatten(2, grid.shape(grid.stages))
        return upsample(tokens, 1 << (grid.stages - self.scale)).flatten(2).transpose(1, 2)


class SplitPolicy(nn.Module):
    """Base of all policies.

    Class attributes:
        learned: it has parameters that an estimator can train.
        default_rule: decision rule used when a budget is given and the user names none.
        analysis: it sees labels, so it is a bound to compare with and no rival.
        ranks: its logits order the parents; without that a budget cannot be spent best first, and every rule is
            `threshold`.
        exact: an exact count per image is what it is: no threshold is ever calibrated for it.
        stochastic: it draws at random, so its numbers are means over draws.

    Attributes (not in the paper; 0 and False are the paper's pipeline):
        depth: blocks of the backbone through which the coarsest patches go before anything is decided; the policy
            then finds them in `StageView.context`.
        carries: go on from there: the coarse tokens keep what those blocks computed, the children of split parents
            join them with their own embedding plus what their coarse ancestor learned, and only the remaining
            blocks run on the mixed sequence. Otherwise the look serves the decision only.
    """

    learned: ClassVar[bool] = False
    default_rule: ClassVar[str] = "image"
    analysis: ClassVar[bool] = False
    ranks: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False
    depth: int = 0
    carries: bool = False

    def forward(self, view: StageView) -> Float[Tensor, "b n"]:
        """Logits of the parents at view.scale; positive means split.

        Returns: (b, n) float tensor in raster order of the parents' grid.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward(view)")

    def rescale(self, shift: float, gain: float) -> None:
        """From now on give gain * (logit + shift). Wanted of learned policies that one estimator hands to the next."""
        raise NotImplementedError(f"{type(self).__name__} does not define rescale(shift, gain)")
