"""Window attention as a property of a model (ViTDet, EVA-02's detector; the paper's Table 3): most blocks attend within
square windows of the fine grid, a few across the image.

    window block    tokens of one window, rotary positions counted from its corner
    global block    tokens of one image

A coarse patch lies in one window, hence windows are whole coarse patches and grids whole windows; anything else is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from split_core.errors import SplitError, unknown


@dataclass(frozen=True)
class Windows:
    """Which blocks attend within what.

    Args:
        size: side of a window in fine cells.
        global_blocks: numbers of the blocks, from 0, that attend across the image.

    Raises:
        SplitError: one of them is no such number.
    """

    size: int
    global_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise SplitError(f"windows.size={self.size!r}: a whole number of patches of at least 1 is needed")
        blocks = tuple(self.global_blocks)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in blocks):
            raise SplitError(f"windows.global_blocks={list(blocks)}: numbers of blocks from 0 are needed")
        object.__setattr__(self, "global_blocks", tuple(sorted(set(blocks))))

    @staticmethod
    def of(value: Any) -> Windows | None:
        """Windows as given, or as read back from a configuration.

        Raises:
            SplitError: neither.
        """
        if value is None or isinstance(value, Windows):
            return value
        if not isinstance(value, Mapping):
            raise SplitError(f"windows={value!r}: a split_core.Windows is needed, or None")
        for name in value:
            if name not in ("size", "global_blocks"):
                raise SplitError(unknown("setting of windows", name, ("size", "global_blocks")))
        if "size" not in value:
            raise SplitError("windows: size is missing, the side of a window in patches")
        blocks = value.get("global_blocks", ())
        return Windows(value["size"], tuple(blocks) if isinstance(blocks, Sequence) else blocks)

    def check_model(self, *, blocks: int, prefix: int, stages: int) -> None:
        """Refuse a model that has no such blocks, or tokens that belong to no window, or too large coarse patches.

        Args:
            blocks: how many the model has.
            prefix: its class and register tokens.
            stages: S.
        """
        if self.global_blocks and self.global_blocks[-1] >= blocks:
            raise SplitError(f"windows.global_blocks: {self.global_blocks[-1]}; the model has blocks 0 to {blocks - 1}")
        if prefix:
            raise SplitError(
                f"windows: the model has {prefix} class or register token(s), which lie in no window. Create it without"
                f" (timm: class_token=False, global_pool='avg'; no registers), or leave windows out"
            )
        side = 1 << stages
        if self.size % side:
            fits = sorted({max(self.size // side, 1) * side, -(-self.size // side) * side})
            raise SplitError(
                f"windows.size={self.size} with stages={stages}: a coarse patch spans {side}x{side} fine ones and "
                f"would lie in two windows; size {' or '.join(map(str, fits))} would fit"
            )


def check_canvas(cells: tuple[int, int], window: int, patch: tuple[int, int]) -> None:
    """Refuse a canvas that does not divide into windows.

    Args:
        cells: rows and columns of fine cells.
        window: side of a window in fine cells.
        patch: height and width of a fine patch in pixels.
    """
    if all(n % window == 0 for n in cells):
        return
    unit = [window * side for side in patch]
    near = [-(-n // window) * step for n, step in zip(cells, unit, strict=True)]
    raise SplitError(
        f"windows of {window}x{window} patches do not divide a grid of {cells[0]}x{cells[1]} patches; images whose "
        f"height is a multiple of {unit[0]} px and width of {unit[1]} px fit: pad or resize to {near[0]}x{near[1]} px"
    )
