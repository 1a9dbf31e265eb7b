"""Rotary positions for every cell of the pyramid: sines and cosines of its angles (EVA-02, DINOv3, PE, RoPE-ViT).

timm turns queries and keys by angles that are linear in a fine cell's (row, column). A coarse token stands in the
middle of the cells it covers ("center"), as absolute tables resampled to its grid have it; APT puts it on the top-left
of them ("corner"). Angles are made from that place; cosines of fine cells are never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from timm.layers.pos_embed_sincos import freq_bands
from torch import Tensor

from split_core.errors import SplitError
from split_core.positions import GridTable
from split_core.types import Grid

Place = Literal["center", "corner"]
Cells = Float[Tensor, "m 2"]


class RopeTable(GridTable):
    """Rotary rows of a timm model per grid.

    Args:
        vit: the model; read is `rope`, whose frequencies are its parameters or buffers.
        place: where in its block a coarse token stands.

    Raises:
        SplitError: the model's rotary positions are of an unknown kind, augmented in training, or not what their class
            says; or it has none and a place is asked for.
    """

    def __init__(self, vit: Any, *, place: Place = "center") -> None:
        super().__init__(vit)
        self.place = place
        if self.rope is not None:
            self._check()
        elif place != "center":
            raise SplitError(f"rope={place!r}: a {type(vit).__name__} without rotary positions has no use for it")

    @property
    def rope(self) -> Any:
        """timm's module of rotary positions, or None."""
        return getattr(self.vit, "rope", None)

    @property
    def per_block(self) -> bool:
        """Whether every block has angles of its own (mixed RoPE)."""
        return self.rope is not None and type(self.rope).__name__ == "RotaryEmbeddingMixed"

    def cells(self, grid: Grid) -> Float[Tensor, "*L m1 *h e"] | None:
        """Sines, then cosines, of every cell's angles, fine first, and last a row that turns nothing.

        Mixed RoPE has axes for the block and the head besides; None for models without rotary positions.
        """
        return self._rows(grid)

    def _sources(self) -> tuple[Tensor, ...]:
        rope = self.rope
        if rope is None:
            return ()
        own = (*rope.parameters(), *rope.buffers())
        return own or (self.vit.patch_embed.proj.weight.detach(),)

    def _resample(self, grid: Grid) -> Tensor:
        weight = self.vit.patch_embed.proj.weight
        places = []
        for s in range(grid.stages + 1):
            middle = ((1 << s) - 1) / 2 if self.place == "center" else 0.0
            rows, cols = (torch.arange(n, device=weight.device, dtype=torch.float32) for n in grid.shape(s))
            places.append(torch.cartesian_prod(rows, cols).view(-1, 2) * (1 << s) + middle)
        angles = self._angles(torch.cat(places), grid.cells)
        still = angles.new_zeros(*angles.shape[:1], 1, *angles.shape[2:]) if self.per_block else angles[:1] * 0
        angles = torch.cat([angles, still], 1 if self.per_block else 0)
        return torch.cat([angles.sin(), angles.cos()], -1).to(weight.dtype)

    def _angles(self, cells: Cells, shape: tuple[int, int]) -> Tensor:
        return ANGLES[type(self.rope).__name__](self.rope, cells, shape)

    def _check(self) -> None:
        """Compare with the model's own rows at its native size."""
        rope, kind = self.rope, type(self.rope).__name__
        if kind not in ANGLES:
            raise SplitError(f"cannot wrap a model whose rotary positions are a {kind}; known are {', '.join(ANGLES)}")
        if any(getattr(rope, f"{name}_coords", None) is not None for name in ("shift", "jitter", "rescale")):
            raise SplitError(
                "cannot wrap a model that shifts, jitters or rescales its rotary positions in training: the cells of a "
                "layout stay where they are. Create it with rope_shift_coords=None, rope_jitter_coords=None, "
                "rope_rescale_coords=None"
            )
        rows, cols = self.vit.patch_embed.grid_size
        with torch.no_grad():
            own = rope.get_embed(shape=[rows, cols]).float()
            cells = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).view(-1, 2).to(own)
            angles = self._angles(cells, (rows, cols))
            angles = angles.transpose(1, 2) if self.per_block else angles
            # Every angle appears twice in timm's rows: in both halves of a head, or in neighbours.
            half = self.vit.blocks[0].attn.rotate_half if hasattr(self.vit.blocks[0].attn, "rotate_half") else False
            wide = torch.cat([angles, angles], -1) if half else angles.repeat_interleave(2, -1)
            error = (torch.cat([wide.sin(), wide.cos()], -1) - own).abs().max().item()
        if not error <= (1e-3 if self.vit.patch_embed.proj.weight.dtype.itemsize >= 4 else 3e-2):
            raise SplitError(f"the model's {kind} gives other angles than its class (by {error:.2g}). Not wrapped")


def _axial(rope: Any, cells: Cells, shape: tuple[int, int]) -> Float[Tensor, "m f"]:
    """EVA: index (+ offset), as a share of the grid times the grid of pretraining where there is one."""
    place = cells + getattr(rope, "grid_offset", 0.0)
    if rope.ref_feat_shape is not None:
        place = place / place.new_tensor(shape) * place.new_tensor(rope.ref_feat_shape)
    bands = freq_bands(rope.dim // 4, temperature=float(rope.temperature), step=1, device=cells.device)
    return (_order(rope, place)[:, :, None] * bands).flatten(1)


def _dinov3(rope: Any, cells: Cells, shape: tuple[int, int]) -> Float[Tensor, "m f"]:
    """DINOv3: centres of cells in -1 .. 1."""
    sides = {"separate": shape, "min": (min(shape),) * 2, "max": (max(shape),) * 2}[rope.normalize_coords]
    place = 2 * (cells + 0.5 + getattr(rope, "grid_offset", 0.0)) / cells.new_tensor(sides) - 1
    return (2 * math.pi * _order(rope, place)[:, :, None] / rope.periods).flatten(1)


def _mixed(rope: Any, cells: Cells, shape: tuple[int, int]) -> Float[Tensor, "L m h f"]:
    """RoPE-ViT: learned frequencies of each block and head for both axes."""
    first, second = (frequency.float()[:, None] for frequency in rope.freqs)
    place = _order(rope, cells)[:, :, None, None]
    return place[:, 0] * first + place[:, 1] * second


def _mrope(rope: Any, cells: Cells, shape: tuple[int, int]) -> Float[Tensor, "m f"]:
    """Qwen2-VL's: every channel turns with time (0 in a picture), row or column."""
    place = torch.cat([torch.zeros_like(cells[:, :1]), cells], 1)
    return place.index_select(1, rope.axis) * rope.inv_freq


def _order(rope: Any, place: Cells) -> Cells:
    return place.flip(1) if getattr(rope, "grid_indexing", "ij") == "xy" else place


ANGLES: dict[str, Callable[[Any, Cells, tuple[int, int]], Tensor]] = {
    "RotaryEmbeddingCat": _axial, "RotaryEmbeddingDinoV3": _dinov3, "RotaryEmbeddingMixed": _mixed,
    "RotaryEmbeddingMRope": _mrope,
}  # fmt: skip
"""By name, because older versions of timm lack some: (module, fine cells, shape of the grid) -> angles."""
