"""State that survives a kill: written beside its place, checked by hash, renamed, the last good ones kept."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from split_core.errors import SplitError

logger = logging.getLogger(__name__)


class Checkpoints:
    """Checkpoints of one phase of a run, under run_dir/checkpoints/PHASE.

    Args:
        folder: of this phase.
        keep_last: how many to keep.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state after `step` steps. A kill at any moment leaves either the old files or the new."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        content = buffer.getvalue()
        draft = self.folder / f".{step:08d}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(draft / "state.pt", content)
        _write(draft / "sha256", hashlib.sha256(content).hexdigest().encode())
        final = self.folder / f"{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        for old in self._all()[: -self.keep_last]:
            shutil.rmtree(old, ignore_errors=True)

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """The newest state that reads back whole, with its step; damaged ones are named and passed over."""
        for folder in reversed(self._all()):
            try:
                content = (folder / "state.pt").read_bytes()
                if hashlib.sha256(content).hexdigest() != (folder / "sha256").read_text():
                    raise ValueError("its checksum is wrong, it was cut short or changed")
                return int(folder.name), torch.load(io.BytesIO(content), weights_only=True)
            except (OSError, ValueError) as error:
                logger.warning("checkpoint %s cannot be used (%s); trying the one before", folder, error)
        return None

    def clear(self) -> None:
        """Forget the phase's checkpoints (it is finished, and its weights are saved)."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("[0-9]*") if p.is_dir()) if self.folder.is_dir() else []


def save_weights(path: Path, modules: Mapping[str, nn.Module], facts: Mapping[str, Any]) -> None:
    """The modules' state as safetensors under "NAME.key", with JSON facts in the header."""
    tensors = {
        f"{name}.{key}": value.contiguous().cpu()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, draft, metadata={"facts": json.dumps(dict(facts), sort_keys=True)})
    draft.replace(path)


def load_weights(path: Path, modules: Mapping[str, nn.Module], *, without: str | None = None) -> dict[str, Any]:
    """Inverse of `save_weights`; returns the facts.

    Args:
        without: beginning of keys to leave out on both sides (a policy that is not wanted, say).

    Raises:
        SplitError: the file is damaged, or its keys or shapes are not those of the modules; names all of them.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
    except (OSError, SafetensorError) as error:
        raise SplitError(f"{path} cannot be read: {error}") from error
    wanted = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    if without is not None:
        found, wanted = ({k: v for k, v in side.items() if not k.startswith(without)} for side in (found, wanted))
    faults = [f"missing {key}" for key in wanted.keys() - found.keys()]
    faults += [f"unexpected {key}" for key in found.keys() - wanted.keys()]
    faults += [
        f"{key} is {tuple(found[key].shape)}, wanted {tuple(wanted[key].shape)}"
        for key in wanted.keys() & found.keys()
        if found[key].shape != wanted[key].shape
    ]
    if faults:
        raise SplitError(f"{path} does not fit the model: {'; '.join(sorted(faults))}")
    with torch.no_grad():
        for key, value in wanted.items():
            value.copy_(found[key])  # state_dict shares memory with the modules
    return facts


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
