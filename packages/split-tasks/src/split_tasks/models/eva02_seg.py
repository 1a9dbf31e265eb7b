"""Official EVA-02 segmentation checkpoints (mmsegmentation's layout) to this project's weights.

    python -m split_tasks.models.eva02_seg CHECKPOINT.pth FOLDER

writes FOLDER/backbone.safetensors (for ``model=eva02 model.weights=``) and FOLDER/head.safetensors (for ``task=seg
task.head=upernet task.weights=``). Every key must have a place; rotary tables are made anew and are dropped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from split_core.errors import SplitError
from split_tasks.data.cache import whole_file
from split_tasks.models.weights import read_weights

DROPPED = re.compile(r"backbone\.(blocks\.\d+\.attn\.)?rope\.")
BLOCK = {
    "attn.q_bias": "attn.q_proj.bias", "attn.v_bias": "attn.v_proj.bias", "mlp.w1.": "mlp.fc1_g.",
    "mlp.w2.": "mlp.fc1_x.", "mlp.ffn_ln.": "mlp.norm.", "mlp.w3.": "mlp.fc2.",
}  # fmt: skip
"""Names inside a block that differ from timm's."""
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
        if DROPPED.match(key):
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


def backbone_key(key: str) -> str:
    """A name of the original backbone in timm's words."""
    for theirs, ours in BLOCK.items():
        if key.startswith("blocks.") and theirs in key:
            return key.replace(theirs, ours)
    return key


def head_key(key: str) -> str:
    """A name of the original heads in transformers' words."""
    return key.replace(".bn.", ".batch_norm.").replace(".conv_seg.", ".classifier.")


def main(arguments: Sequence[str]) -> int:
    """Convert one file; returns the exit code."""
    if len(arguments) != 2:
        print("usage: python -m split_tasks.models.eva02_seg CHECKPOINT.pth FOLDER", file=sys.stderr)
        return 2
    try:
        backbone, head = convert(read_weights(Path(arguments[0])))
    except SplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, tensors in (("backbone", backbone), ("head", head)):
        path = Path(arguments[1]) / f"{name}.safetensors"
        with whole_file(path) as work:
            save_file(tensors, work)
        print(f"{path}  {len(tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
