"""A wrapped model as a folder to keep or share: weights, how to build it again, and a card with what was measured.

    model.safetensors   every tensor of backbone, pyramid and policy
    config.json         timm architecture and arguments, policy, stages, decision, options, transforms
    README.md           the model card

Reading it back is `split_core.load_pretrained`, which is strict: a key too few or too many is an error that names it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from timm.data.config import resolve_model_data_config
from torch import nn

from split_core import saved
from split_core.errors import SplitError, first_line, nearest
from split_core.files import write_whole
from split_core.saved import Options, Saved
from split_core.saved import Spec as Spec
from split_core.weights import check_fit

if TYPE_CHECKING:
    from split_core.model import SplitViT

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
Rows = Sequence[Mapping[str, object]]


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
    folder = named(folder)
    config = describe(model, model_args or {})
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
        SplitError: huggingface_hub is not installed, the model cannot be saved, or the Hub does not take it.
    """
    api = _hub().HfApi()
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder, **options)
        with _asking(f"{repo}: the Hub does not take the model"):
            name = api.create_repo(repo, private=private, exist_ok=True).repo_id
            return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=message))


def fetch(source: str | Path, *, revision: str | None = None) -> Path:
    """The folder itself, or a copy of a repository of the Hub.

    Raises:
        SplitError: neither a folder nor a repository that can be read.
    """
    folder = named(source)
    if folder.is_dir():
        return folder
    if isinstance(source, Path) or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise SplitError(f"{source}: no such folder, and no name of a repository (owner/name)")
    with _asking(f"{source}: no such folder, and the Hub gives nothing"):
        return Path(_hub().snapshot_download(source, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))


def named(folder: object) -> Path:
    """The path of a folder that somebody typed.

    Raises:
        SplitError: it is no name.
    """
    if not isinstance(folder, str | Path) or not str(folder).strip():
        raise SplitError(f"{folder!r} names no folder; one like 'models/mine' is needed")
    return Path(folder)


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """One line for whatever the Hub or the way to it raises: it has errors of several libraries."""
    try:
        yield
    except SplitError:
        raise
    except Exception as error:
        raise SplitError(f"{what}: {first_line(error)}") from error


def build_backbone(config: Saved) -> nn.Module:
    """The untrained timm model of a configuration.

    Raises:
        SplitError: timm cannot build it.
    """
    name = config.backbone
    if not timm.is_model(name):  # a name with a scheme would be looked for on a hub
        close = nearest(name, timm.list_models())
        raise SplitError(
            f"timm cannot build {name}: it has no such model" + (f"; did you mean {close}?" if close else "")
        )
    try:
        return timm.create_model(
            name, pretrained=False, pretrained_cfg_overlay=config.transforms.model_dump(), **config.model_args
        )
    except Exception as error:  # a model's constructor fails in its own way
        raise SplitError(f"timm cannot build {name} with {config.model_args}: {first_line(error)}") from error


def load_state(model: nn.Module, folder: Path) -> None:
    """Copy the folder's weights into the model; every key must fit.

    Raises:
        SplitError: the file is damaged, or keys, shapes or dtypes differ; names all of them.
    """
    path = folder / WEIGHTS
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SplitError(f"{path} cannot be read: {error}") from error
    wanted = model.state_dict()
    check_fit(path, found, wanted)
    cast = sorted(key for key, value in found.items() if value.dtype != wanted[key].dtype)
    if cast:
        raise SplitError(
            f"{path} holds other types than {CONFIG} says: {cast[0]} is {found[cast[0]].dtype}, wanted "
            f"{wanted[cast[0]].dtype}; in all {len(cast)} of {len(found)} tensors"
        )
    model.load_state_dict(found)


def transforms(vit: Any) -> dict[str, Any]:
    """How images are prepared for the model: arguments of `timm.data.create_transform`."""
    channels = vit.patch_embed.proj.in_channels
    found = {**resolve_model_data_config(vit), "input_size": (channels, *vit.patch_embed.img_size)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def options(model: SplitViT) -> Options:
    """The options of `SplitViT` as the model has them now."""
    return Options(
        attention=model.attention, down=model.embed.down, pooling=model.pooling, antialias=model.positions.antialias,
        rope=model.rope.place, compile_blocks=model.compile_blocks,
        windows=None if model.windows is None else asdict(model.windows),
    )  # fmt: skip


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
    dtype = vit.patch_embed.proj.weight.dtype
    for key, value in model.state_dict().items():
        if value.is_floating_point() and value.dtype != dtype:
            raise SplitError(f"{key} is {value.dtype} and the patch embedding {dtype}; model.to(one of them) first")
    for key, value in args.items():
        try:
            json.dumps(value)
        except TypeError:
            raise SplitError(f"model argument {key}={value!r} cannot be written to {CONFIG}") from None
    content = {
        "split_core": saved.FORMAT, "backbone": cfg["architecture"], "model_args": args, "transforms": transforms(vit),
        "spec": {**spec.model_dump(), "options": options(model).model_dump()}, "decision": asdict(model.decision),
        "license": cfg.get("license") or "other", "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    try:
        config = Saved.model_validate(content, strict=False)
    except ValidationError as error:
        raise saved.explained("the model", error) from error
    _check_rebuilt(config, vit)
    return config.model_dump(mode="json")


def _check_rebuilt(config: Saved, vit: nn.Module) -> None:
    with torch.device("meta"):
        twin = build_backbone(config)
    again = f"timm's {config.backbone}, built again with {config.model_args},"
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
