"""The dense timm model with the task's head on it: what every speed is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def dense_reference(learner: Learner) -> Callable[..., Any]:
    """The timm model's own forward; for a task with a head of its own, that head on the timm model's features.

    Nothing adaptive takes part: no pyramid, no decision, no packing; padding is read like everything else. Where the
    model has windows, so has the dense one.
    """
    model, vit = learner.model, cast(Any, learner.model.vit)
    if learner.task.model_head:
        if model.windows is None:
            return lambda images, valid=None: vit(images)
        return lambda images, valid=None: vit.forward_head(windowed(model, images)[0])

    def run(images: Images, valid: Tensor | None = None) -> Any:
        taps = list(model.taps)
        tokens, tapped = (_whole if model.windows is None else windowed)(model, images, taps)
        grid = Grid(model.embed.grid(images.shape[-2:]).cells, stages=1)
        layout = _all_fine(grid, len(images), images.device)
        flat = tuple(tap.flatten(0, 1) for tap in tapped)
        return learner.task.output(model, Features(tokens.flatten(0, 1), _packed(tokens, layout), layout, flat))

    return run


def _whole(model: Any, images: Images, taps: list[int]) -> tuple[Float[Tensor, "b n d"], list[Tensor]]:
    """Tokens of timm's own forward, and those after the taps."""
    prefix = model.vit.num_prefix_tokens > 0
    tokens, tapped = model.vit.forward_intermediates(
        images, indices=taps or 1, return_prefix_tokens=prefix, norm=False, output_fmt="NLC"
    )
    tapped = [torch.cat((parts[1], parts[0]), 1) if prefix else parts for parts in tapped]
    return tokens, tapped if taps else []


def windowed(model: Any, images: Images, taps: Sequence[int] = ()) -> tuple[Float[Tensor, "b n d"], list[Tensor]]:
    """The same with window attention, which timm lacks: its blocks on the windows of the image cut apart (ViTDet)."""
    vit, windows, tapped = model.vit, model.windows, []
    found = vit._pos_embed(vit.patch_embed(images))
    x, across = found if isinstance(found, tuple) else (found, None)  # Eva gives its rotary rows too
    within = _window_rope(model) if across is not None else None
    x, (rows, cols), side = vit.norm_pre(x), vit.patch_embed.grid_size, windows.size
    for index, block in enumerate(vit.blocks):
        rope = across if index in windows.global_blocks else within
        options = {} if rope is None else {"rope": rope[index] if model.rope.per_block else rope}
        if index in windows.global_blocks:
            x = block(x, **options)
        else:
            parts = x.unflatten(1, (rows // side, side, cols // side, side)).transpose(2, 3)
            out = block(parts.reshape(-1, side**2, x.shape[2]), **options)
            x = out.view_as(parts).transpose(2, 3).flatten(1, 4)
        if index in taps:
            tapped.append(x)
    return vit.norm(x), tapped


def _window_rope(model: Any) -> Tensor:
    """Rotary rows of a window in timm's layout: sines and cosines at the width of a head, heads before tokens."""
    side, per_block = model.windows.size, model.rope.per_block
    rows = model.rope.cells(Grid((side, side), 0))
    rows = rows[:, :-1].transpose(1, 2) if per_block else rows[:-1]
    half = getattr(model.vit.blocks[0].attn, "rotate_half", False)
    parts = (part.repeat(*[1] * (part.ndim - 1), 2) if half else part.repeat_interleave(2, -1)
             for part in rows.chunk(2, -1))  # fmt: skip
    return torch.cat([*parts], -1)


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
