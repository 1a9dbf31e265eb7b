"""What the converters of official EVA-02 checkpoints share: names inside the backbone, and files in and out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from split_core.errors import SplitError
from split_tasks.data.cache import whole_file
from split_tasks.models.weights import read_weights

Convert = Callable[[Mapping[str, Tensor], Path], Mapping[Path, dict[str, Tensor]]]
"""Tensors of a checkpoint, and the target -> what each file is to hold."""
ROTARY = re.compile(r"(blocks\.\d+\.attn\.)?rope(_win|_glb)?\.")
BLOCK = {
    "attn.q_bias": "attn.q_proj.bias", "attn.v_bias": "attn.v_proj.bias", "mlp.w1.": "mlp.fc1_g.",
    "mlp.w2.": "mlp.fc1_x.", "mlp.ffn_ln.": "mlp.norm.", "mlp.w3.": "mlp.fc2.",
}  # fmt: skip
"""Names inside a block that differ from timm's."""


def is_rotary(key: str) -> bool:
    """Whether a name of the original backbone is that of a rotary table, which is made anew."""
    return ROTARY.match(key) is not None


def backbone_key(key: str) -> str:
    """A name of the original backbone in timm's words."""
    for theirs, ours in BLOCK.items():
        if key.startswith("blocks.") and theirs in key:
            return key.replace(theirs, ours)
    return key


def convert_file(module: str, target: str, arguments: Sequence[str], convert: Convert) -> int:
    """The command line of a converter: one file in, .safetensors files out.

    Args:
        module: its own, below split_tasks.
        target: what its second argument is called.
        arguments: checkpoint and target.
        convert: what it does.

    Returns: the exit code.
    """
    if len(arguments) != 2:
        print(f"usage: python -m split_tasks.{module} CHECKPOINT.pth {target}", file=sys.stderr)
        return 2
    try:
        files = convert(read_weights(Path(arguments[0])), Path(arguments[1]))
    except SplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, tensors in files.items():
        with whole_file(path) as work:
            save_file(tensors, work)
        print(f"{path}  {len(tensors)} tensors")
    return 0
