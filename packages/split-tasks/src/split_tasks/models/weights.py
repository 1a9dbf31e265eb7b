"""Weights from files: safe formats only, strict, every key that does not fit is named."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from split_core.errors import SplitError, first_line


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors, .pth, .pt or .bin file; no code in it is run.

    A checkpoint that holds its weights under "model" or "state_dict" is opened, and the prefix "module." that
    data-parallel training leaves is dropped.

    Raises:
        ValueError: no such file, an unknown ending, or no weights in it.
    """
    if not path.is_file():
        raise SplitError(f"weights: no file {path}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise SplitError(f"weights: {path} is no safetensors file: {error}") from None
    if path.suffix not in {".pth", ".pt", ".bin"}:
        raise SplitError(f"weights: {path} ends neither in .safetensors nor in .pth, .pt or .bin")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or an unsafe file
        raise SplitError(f"weights: {path} cannot be read as plain weights: {first_line(error)}") from None
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise SplitError(f"weights: {path} holds no table of tensors")
    return {key.removeprefix("module."): value for key, value in state.items()}


def load_strict(model: nn.Module, state: dict[str, Tensor], *, source: str, head: str | None = "head") -> bool:
    """Copy `state` into `model`; everything must fit, the head alone may be for other classes.

    Args:
        model: changed in place.
        state: its keys are the model's.
        source: named in messages.
        head: prefix of the head's keys; when absent from `state` or of other shapes, the model keeps its own. With None
            no part may differ.

    Returns: whether the head was loaded.

    Raises:
        ValueError: a missing key, an unexpected key or a shape that differs; all are named.
    """
    own = model.state_dict()
    heads = [key for key in own if key.startswith(f"{head}.")]
    fits = bool(heads) and all(key in state and state[key].shape == own[key].shape for key in heads)
    skipped = set() if fits or head is None else {key for key in {*own, *state} if key.startswith(f"{head}.")}
    missing = [key for key in own if key not in state and key not in skipped]
    unexpected = [key for key in state if key not in own and key not in skipped]
    shapes = [
        f"{key} {tuple(state[key].shape)} for {tuple(own[key].shape)}"
        for key in own
        if key in state and key not in skipped and state[key].shape != own[key].shape
    ]
    faults = [
        f"{what}: {', '.join(keys)}"
        for what, keys in (("missing", missing), ("unexpected", unexpected), ("other shape", shapes))
        if keys
    ]
    if faults:
        raise SplitError(f"weights: {source} does not fit {type(model).__name__}; {'; '.join(faults)}")
    kept = {key: state[key] if key in state and key not in skipped else own[key] for key in own}
    model.load_state_dict(kept, strict=True)
    return fits
