"""Masks of objects as COCO writes them: run lengths down the columns, or polygons that become such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from split_core.errors import SplitError

Code = dict[str, Any]
"""{"size": [H, W], "counts": run lengths as compressed text}."""
CHUNK = 16
"""Masks that are pasted at a time."""


def encode(masks: Bool[Tensor, "n H W"]) -> list[Code]:
    """Run lengths of each mask."""
    if not len(masks):
        return []
    columns = np.asfortranarray(masks.cpu().numpy().astype(np.uint8).transpose(1, 2, 0))
    return [_textual(code) for code in library().encode(columns)]


def decode(codes: Sequence[Code], size: tuple[int, int]) -> Bool[Tensor, "n H W"]:
    """Inverse of `encode`; `size` is that of the image, for none."""
    if not codes:
        return torch.zeros(0, *size, dtype=torch.bool)
    pixels = library().decode(list(codes))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).bool()


def from_annotation(segmentation: Any, size: tuple[int, int]) -> Code:
    """Polygons (a list of x, y, x, y ...), plain or compressed run lengths, as run lengths.

    Raises:
        ValueError: it is none of these, or for an image of another size.
    """
    mask = library()
    try:
        if isinstance(segmentation, list):
            code = mask.merge(mask.frPyObjects(segmentation, *size))
        elif isinstance(segmentation["counts"], list):
            code = mask.frPyObjects(segmentation, *size)
        else:
            code = segmentation
        if tuple(code["size"]) != size:
            raise ValueError(f"a mask of {tuple(code['size'])} px for an image of {size} px")
    except (KeyError, TypeError, RuntimeError, IndexError) as error:
        raise ValueError(f"a segmentation is neither polygons nor run lengths: {error!r}") from None
    return _textual(code)


def paste(masks: Float[Tensor, "n q q"], boxes: Float[Tensor, "n 4"], size: tuple[int, int]) -> Bool[Tensor, "n H W"]:
    """Pixels whose middle is more on a mask than off it, each mask stretched over its box.

    torchvision's paste_masks_in_image rounds boxes to whole pixels and adds one; this samples at exact positions, as
    the reference does.

    Args:
        masks: probabilities at q x q points of each box.
        boxes: left, top, right, bottom in px.
        size: (H, W) of the picture.
    """
    result = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    y, x = (torch.arange(side, device=masks.device) + 0.5 for side in size)
    for at in range(0, len(masks), CHUNK):
        own = boxes[at : at + CHUNK].to(masks.dtype)
        sides = (own[:, 2:] - own[:, :2]).clamp_min(1e-6)
        across = (x - own[:, :1]) / sides[:, :1] * 2 - 1
        down = (y - own[:, 1:2]) / sides[:, 1:] * 2 - 1
        points = torch.stack(
            [across[:, None].expand(-1, size[0], -1), down[:, :, None].expand(-1, -1, size[1])], -1
        )  # fmt: skip
        # the border's value reaches half a point outwards, as far as the box does; beyond it there is nothing
        there = (points.abs() <= 1).all(-1)
        read = F.grid_sample(masks[at : at + CHUNK, None], points, padding_mode="border", align_corners=False)[:, 0]
        result[at : at + CHUNK] = (read > 0.5) & there
    return result


def library() -> Any:
    """faster-coco-eval's functions on masks.

    Raises:
        SplitError: it is not installed.
    """
    try:
        from faster_coco_eval import mask
    except ModuleNotFoundError as error:
        raise SplitError(f"task=det needs {error.name}: pip install 'split-tasks[det]'") from error
    return mask


def _textual(code: Code) -> Code:
    counts = code["counts"]
    return {"size": list(code["size"]), "counts": counts.decode() if isinstance(counts, bytes) else counts}
