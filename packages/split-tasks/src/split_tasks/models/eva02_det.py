"""Official EVA-02 detection checkpoints (detectron2's layout) to this project's weights.

    python -m split_tasks.models.eva02_det CHECKPOINT.pth FOLDER

writes FOLDER/backbone.safetensors (for ``model=eva02_det model.weights=``). Every key must have a place; rotary tables
are made anew and are dropped, and so is the position of the class token, which the detector does not have.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from torch import Tensor

from split_core.errors import SplitError
from split_tasks.models.eva02_names import backbone_key, convert_file, is_rotary

BACKBONE = "backbone.net."
HEADS = ("backbone.simfp_", "proposal_generator.", "roi_heads.")
"""Beginnings of names of what reads the backbone."""


def convert(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Backbone under this project's keys, and what belongs to pyramid and heads under its own.

    Raises:
        SplitError: a key that has no place; all are named.
    """
    backbone: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    unknown = []
    for key, value in state.items():
        if key.startswith(BACKBONE):
            inner = key.removeprefix(BACKBONE)
            if not is_rotary(inner):
                backbone[backbone_key(inner)] = value.contiguous()
        elif key.startswith(HEADS):
            heads[key] = value
        else:
            unknown.append(key)
    if unknown or not backbone:
        reason = f"no place for {', '.join(unknown)}" if unknown else f"no {BACKBONE}* in it"
        raise SplitError(f"this is no EVA-02 detection checkpoint: {reason}")
    if "pos_embed" in backbone:
        backbone["pos_embed"] = patch_rows(backbone["pos_embed"])
    return backbone, heads


def patch_rows(table: Tensor) -> Tensor:
    """A position table (1, n, d) without the row of the class token, which pretraining had.

    Raises:
        SplitError: neither with nor without that row do the others make a square grid.
    """
    rows = table.shape[1]
    extra = next((extra for extra in (0, 1) if math.isqrt(rows - extra) ** 2 == rows - extra), None)
    if extra is None:
        raise SplitError(f"this is no EVA-02 detection checkpoint: its position table has {rows} rows, no square grid")
    return table[:, extra:].contiguous()


def main(arguments: Sequence[str]) -> int:
    """Convert one file; returns the exit code."""
    return convert_file(
        "models.eva02_det", "FOLDER", arguments,
        lambda state, folder: {folder / "backbone.safetensors": convert(state)[0]},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
