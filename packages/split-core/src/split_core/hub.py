"""A wrapped model as a folder to keep or share: weights, how to build it again, and a card with what was measured.

    model.safetensors   every tensor of backbone, pyramid and policy
    config.json         timm architecture and arguments, policy, stages, decision, options, transforms
    README.md           the model card

Reading it back is `split_core.load_pretrained`, which is strict: a key too few or too many is an error that names it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from timm.data.config import resolve_model_data_config
from torch import nn

from split_core.errors import SplitError
from split_core.files import write_whole
from split_core.weights import check_fit

if TYPE_CHECKING:
    from split_core.model import SplitViT

FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Spec:
    """What `wrap` was asked for, in plain values; a model keeps it so that it can be saved.

    Args:
        policy: its name and all of its settings.
        stages: S.
        budget: token fraction aimed at, or None.
        options: the options of `SplitViT` that were given.
    """

    policy: Mapping[str, Any]
    stages: int
    budget: float | None
    options: Mapping[str, Any] = field(default_factory=dict)


def save(
    model: SplitViT, folder: str | Path, *, measured: Rows = (), model_args: Mapping[str, Any] | None = None
) -> Path:
    """Write the folder.

    Args:
        measured: rows of the card's table, one mapping from column to value each.
        model_args: arguments of `timm.create_model` that the model does not record itself (older versions of timm).

    Raises:
        SplitError: the model cannot be built again from a configuration: says which part.
    """
    config = describe(model, model_args or {})
    folder = Path(folder)
    if folder.is_file():
        raise SplitError(f"{folder} is a file; a folder is needed")
    state = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    write_whole(folder / WEIGHTS, to_bytes(state, metadata={"format": "pt"}))
    write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_whole(folder / CARD, card(config, measured))
    return folder


def push(model: SplitViT, repo: str, *, private: bool = False, message: str = "Upload model", **options: Any) -> str:
    """Save to a temporary folder and upload it to the Hugging Face Hub; returns the address.

    Args:
        repo: "owner/name"; created if it does not exist.
        options: of `save`.

    Raises:
        SplitError: huggingface_hub is not installed, or the model cannot be saved.
    """
    api = _hub().HfApi()
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder, **options)
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=message))


def fetch(source: str | Path, *, revision: str | None = None) -> Path:
    """The folder itself, or a copy of a repository of the Hub.

    Raises:
        SplitError: neither a folder nor a repository that can be read.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if isinstance(source, Path) or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise SplitError(f"{source}: no such folder, and no name of a repository (owner/name)")
    try:
        return Path(_hub().snapshot_download(source, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SplitError(f"{source}: no such folder, and the Hub gives nothing: {reason}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a folder.

    Raises:
        SplitError: there is none, or it is none of ours.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SplitError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("split_core") != FORMAT:
        raise SplitError(f"{path} is no configuration of a wrapped model in format {FORMAT}")
    missing = {"backbone", "model_args", "transforms", "spec", "decision", "dtype"} - config.keys()
    if missing:
        raise SplitError(f"{path} lacks {', '.join(sorted(missing))}")
    return config


def build_backbone(config: Mapping[str, Any]) -> nn.Module:
    """The untrained timm model of a configuration.

    Raises:
        SplitError: timm cannot build it.
    """
    try:
        return timm.create_model(
            config["backbone"], pretrained=False, pretrained_cfg_overlay=dict(config["transforms"]),
            **config["model_args"],
        )  # fmt: skip
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SplitError(f"timm cannot build {config['backbone']} with {config['model_args']}: {reason}") from error


def load_state(model: nn.Module, folder: Path) -> None:
    """Copy the folder's weights into the model; every key must fit.

    Raises:
        SplitError: the file is damaged, or keys or shapes differ; names all of them.
    """
    path = folder / WEIGHTS
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SplitError(f"{path} cannot be read: {error}") from error
    check_fit(path, found, model.state_dict())
    model.load_state_dict(found)


def transforms(vit: Any) -> dict[str, Any]:
    """How images are prepared for the model: arguments of `timm.data.create_transform`."""
    channels = vit.patch_embed.proj.in_channels
    found = {**resolve_model_data_config(vit), "input_size": (channels, *vit.patch_embed.img_size)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def describe(model: SplitViT, model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that `load_pretrained` needs besides the weights.

    Raises:
        SplitError: some part has no name to build it by, or would not come back the same.
    """
    vit, spec = model.vit, model.spec
    if spec is None:
        raise SplitError(
            f"the policy is a {type(model.policy).__name__} without a name; wrap with a registered one to save a model"
        )
    cfg: dict[str, Any] = dict(getattr(vit, "pretrained_cfg", None) or {})
    if not cfg.get("architecture"):
        raise SplitError(
            f"the {type(vit).__name__} was not made by timm.create_model, so there is no name to save it by"
        )
    args = dict(getattr(vit, "_model_args", {}))
    args |= {"num_classes": vit.num_classes, "global_pool": vit.global_pool, "img_size": list(vit.patch_embed.img_size)}
    args |= {"in_chans": vit.patch_embed.proj.in_channels, **model_args}
    config = {
        "split_core": FORMAT, "backbone": cfg["architecture"], "model_args": args, "transforms": transforms(vit),
        "spec": asdict(spec), "decision": asdict(model.decision), "license": cfg.get("license") or "other",
        "dtype": str(vit.patch_embed.proj.weight.dtype).removeprefix("torch."),
    }  # fmt: skip
    for key, value in args.items():
        try:
            json.dumps(value)
        except TypeError:
            raise SplitError(f"model argument {key}={value!r} cannot be written to {CONFIG}") from None
    _check_rebuilt(config, vit)
    return json.loads(json.dumps(config))


def _check_rebuilt(config: Mapping[str, Any], vit: nn.Module) -> None:
    with torch.device("meta"):
        twin = build_backbone(config)
    again = f"timm's {config['backbone']}, built again with {config['model_args']},"
    check_fit(again, twin.state_dict(), vit.state_dict())
    if str(twin) != str(vit):
        raise SplitError(f"{again} has other layers than the model; give what is missing as model_args={{...}}")


def card(config: Mapping[str, Any], measured: Rows) -> str:
    """The model card: what it is, how to use it, what was measured."""
    policy, decision = config["spec"]["policy"], config["decision"]
    columns = list(dict.fromkeys(key for row in measured for key in row))
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_cell(row.get(key, "")) for key in columns) for row in measured]
    table = "\n".join(f"| {line} |" for line in lines) if columns else "Nothing was measured when this was saved."
    rule = ", ".join(f"{key} {value}" for key, value in decision.items() if value is not None)
    return f"""---
library_name: split-core
license: {config["license"]}
tags: [vision-transformer, adaptive-patches, timm]
---

# {config["backbone"]} with adaptive patches

A timm `{config["backbone"]}` that reads fine patches where the policy `{policy["name"]}` asks for them and coarse ones
elsewhere ({config["spec"]["stages"]} split stage(s); decision: {rule}).

```python
import split_core
from timm.data import create_transform

model = split_core.load_pretrained("PATH OR OWNER/NAME")
transform = create_transform(**model.transforms)
logits = model(transform(picture)[None])
```

## Measured

{table}
"""


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise SplitError("sharing models needs huggingface_hub: pip install 'split-core[hub]'") from error
    return huggingface_hub
