"""The dense timm model with the task's head on it: what every speed is compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from split_core.engine.session import Learner
from split_core.features import Features
from split_core.packing import Packed, Segments
from split_core.quadtree import build_layout, uniform_splits
from split_core.types import Grid, Layout

Images = Float[Tensor, "b ch H W"]


def dense_reference(learner: Learner) -> Callable[[Images], Any]:
    """The timm model's own forward; for a task with a head of its own, that head on the timm model's features.

    Nothing adaptive takes part: no pyramid, no decision, no packing.
    """
    model, vit = learner.model, cast(Any, learner.model.vit)
    if learner.task.model_head:
        return vit

    def run(images: Images) -> Any:
        taps = list(model.taps)
        tokens, tapped = vit.forward_intermediates(
            images, indices=taps or 1, return_prefix_tokens=True, norm=False, output_fmt="NLC"
        )
        grid = Grid(model.embed.grid(images.shape[-2:]).cells, stages=1)
        layout = _all_fine(grid, len(images), images.device)
        flat = tuple(torch.cat((prefix, patches), 1).flatten(0, 1) for patches, prefix in tapped) if taps else ()
        return learner.task.output(model, Features(tokens.flatten(0, 1), _packed(tokens, layout), layout, flat))

    return run


def _packed(tokens: Float[Tensor, "b n d"], layout: Layout) -> Packed:
    """A batch of equal sequences as one."""
    batch, length, _ = tokens.shape
    positions = torch.arange(batch * length, device=tokens.device).view(batch, length)
    prefix = length - layout.lengths[0]
    cu_seqlens = torch.arange(0, (batch + 1) * length, length, device=tokens.device, dtype=torch.int32)
    segments = Segments(cu_seqlens, (length,) * batch, length)
    return Packed(tokens.flatten(0, 1), segments, positions[:, prefix:].flatten(), positions[:, :prefix])


@lru_cache(maxsize=8)
def _all_fine(grid: Grid, batch: int, device: torch.device) -> Layout:
    return build_layout(uniform_splits(grid, batch, split=True, device=device))
