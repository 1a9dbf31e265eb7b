"""Official EVA-02 segmentation checkpoints (mmsegmentation's layout) to this project's weights.

    python -m split_tasks.models.eva02_seg CHECKPOINT.pth FOLDER

writes FOLDER/backbone.safetensors (for ``model=eva02 model.weights=``) and FOLDER/head.safetensors (for ``task=seg
task.head=upernet task.weights=``). Every key must have a place; rotary tables are made anew and are dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from split_core.errors import SplitError
from split_tasks.models.eva02_names import backbone_key, convert_file, is_rotary

HEADS = {"decode_head.": "decode.", "auxiliary_head.": "auxiliary.", "backbone.fpn": "fpn"}


def convert(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Backbone and head under this project's keys.

    Raises:
        SplitError: a key that has no place; all are named.
    """
    backbone: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    unknown = []
    for key, value in state.items():
        if is_rotary(key.removeprefix("backbone.")):
            continue
        prefix = next((prefix for prefix in HEADS if key.startswith(prefix)), None)
        if prefix is not None:
            head[head_key(HEADS[prefix] + key.removeprefix(prefix))] = value.contiguous()
        elif key.startswith("backbone."):
            backbone[backbone_key(key.removeprefix("backbone."))] = value.contiguous()
        else:
            unknown.append(key)
    if unknown or not backbone or not head:
        reason = f"no place for {', '.join(unknown)}" if unknown else "no backbone.* or no decode_head.* in it"
        raise SplitError(f"this is no EVA-02 segmentation checkpoint: {reason}")
    return backbone, head


def head_key(key: str) -> str:
    """A name of the original heads in transformers' words."""
    return key.replace(".bn.", ".batch_norm.").replace(".conv_seg.", ".classifier.")


def main(arguments: Sequence[str]) -> int:
    """Convert one file; returns the exit code."""

    def files(state: Mapping[str, Tensor], folder: Path) -> dict[Path, dict[str, Tensor]]:
        backbone, head = convert(state)
        return {folder / "backbone.safetensors": backbone, folder / "head.safetensors": head}

    return convert_file("models.eva02_seg", "FOLDER", arguments, files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
