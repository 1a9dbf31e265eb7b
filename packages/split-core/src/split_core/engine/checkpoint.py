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
from safetensors.torch import save
from torch import Tensor, nn

from split_core.errors import SplitError
from split_core.files import sync_folder, unwritable, write_whole
from split_core.resolve import first_difference
from split_core.weights import check_fit

logger = logging.getLogger(__name__)


class Checkpoints:
    """Checkpoints of one phase of a run, under run_dir/checkpoints/PHASE.

    Args:
        folder: of this phase.
        keep_last: how many to keep.
        settings: what the run depends on, by dotted key; a checkpoint of other settings is refused.
    """

    def __init__(self, folder: Path, keep_last: int, settings: Mapping[str, Any] | None = None) -> None:
        self.folder, self.keep_last, self.settings = folder, keep_last, dict(settings or {})

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state after `step` steps. A kill at any moment leaves either the old files or the new.

        Raises:
            SplitError: the disk is full or read-only; the older checkpoints stand.
        """
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        content = buffer.getvalue()
        facts = {"step": step, "sha256": hashlib.sha256(content).hexdigest(), "settings": self.settings}
        self._drop_drafts()
        draft, final = self.folder / f".{step:08d}.{os.getpid()}", self.folder / f"{step:08d}"
        try:
            write_whole(draft / "state.pt", content)
            write_whole(draft / "facts.json", json.dumps(facts))
            shutil.rmtree(final, ignore_errors=True)
            draft.rename(final)
            sync_folder(self.folder)
        except OSError as error:
            raise unwritable(final, error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        kept = [folder for folder in self._all() if int(folder.name) <= step]
        # Later ones are damaged, or the run would have gone on from there; counted, they would push out this one.
        for old in {*self._all()} - {*kept[-self.keep_last :]}:
            shutil.rmtree(old, ignore_errors=True)

    def newest(self) -> int | None:
        """Step of the newest checkpoint that reads back whole; damaged ones are named and passed over.

        Raises:
            SplitError: it was made under other settings.
        """
        for folder in reversed(self._all()):
            try:
                facts = json.loads((folder / "facts.json").read_text())
                self._read(folder)
                there = facts["settings"]
                # A setting that is newer than the checkpoint had its default then, as it has in the run's config.yaml.
                difference = first_difference(there, {k: v for k, v in self.settings.items() if k in there})
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("checkpoint %s cannot be used (%s); trying the one before", folder, error)
                continue
            if difference is not None:
                raise SplitError(f"{folder} was made with other settings ({difference}); choose another run_dir")
            return int(folder.name)
        return None

    def load(self, step: int) -> dict[str, Any]:
        """The state after `step` steps, tensors on the CPU. Nothing but tensors and plain values is unpickled.

        Raises:
            ValueError: it is damaged.
        """
        return torch.load(io.BytesIO(self._read(self.folder / f"{step:08d}")), weights_only=True, map_location="cpu")

    def _read(self, folder: Path) -> bytes:
        content = (folder / "state.pt").read_bytes()
        if hashlib.sha256(content).hexdigest() != json.loads((folder / "facts.json").read_text())["sha256"]:
            raise ValueError("its checksum is wrong, it was cut short or changed")
        return content

    def clear(self) -> None:
        """Forget the phase's checkpoints (it is finished, and its weights are saved)."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("[0-9]*") if p.is_dir()) if self.folder.is_dir() else []

    def _drop_drafts(self) -> None:
        """What kills during earlier saves left behind; nobody else writes here, the run holds its lock."""
        for draft in self.folder.glob(".[0-9]*"):
            shutil.rmtree(draft, ignore_errors=True)


def save_weights(path: Path, modules: Mapping[str, nn.Module], facts: Mapping[str, Any]) -> None:
    """The modules' state as safetensors under "NAME.key", with JSON facts in the header."""
    tensors = {
        f"{name}.{key}": value.contiguous().cpu()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }
    facts = {**facts, "sha256": checksum(tensors)}
    write_whole(path, save(tensors, metadata={"facts": json.dumps(facts, sort_keys=True)}))


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names and bytes; safetensors itself does not notice a flipped bit."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_weights(
    path: Path, modules: Mapping[str, nn.Module], *, without: str | tuple[str, ...] | None = None, only: str = ""
) -> dict[str, Any]:
    """Inverse of `save_weights`; returns the facts.

    Args:
        without: beginning (or beginnings) of keys to leave out on both sides (a policy that is not wanted, say).
        only: beginning of the keys of the file that are wanted.

    Raises:
        SplitError: the file is damaged, or its keys or shapes are not those of the modules; names all of them.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise SplitError(
            f"{path} cannot be read: {error}. Delete it, and the run that made it makes it again"
        ) from error
    if facts.pop("sha256", None) not in (None, checksum(found)):
        raise SplitError(
            f"{path} is damaged: its checksum is wrong. Delete it, and the run that made it makes it again"
        )
    found = {key: value for key, value in found.items() if key.startswith(only)}
    wanted = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    if without is not None:
        found, wanted = ({k: v for k, v in side.items() if not k.startswith(without)} for side in (found, wanted))
    check_fit(path, found, wanted)
    with torch.no_grad():
        for key, value in wanted.items():
            value.copy_(found[key])  # state_dict shares memory with the modules
    return facts
