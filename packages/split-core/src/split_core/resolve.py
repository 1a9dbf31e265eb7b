"""From recipes and ``key=value`` arguments to a RunConfig, and from its errors to one line a person can act on.

Order: the schema's defaults, then the recipe (after the one its `defaults` names), then the command line. Naming
another plugin for a group, as in ``policy=entropy``, drops the settings that the layers below gave the old one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError, safe_dump

from split_core import registry
from split_core.config import GROUPS, RunConfig
from split_core.errors import SplitError, first_line, nearest, unknown
from split_core.files import write_whole

ALIASES = {"image": "draw.image", "question": "draw.question"}
"""Short keys of the command line."""

CONFIG_FILE = "config.yaml"
STATE = ("models", "checkpoints")
"""Folders of a run_dir that hold what was learned."""
FREE = frozenset({"do", "compare", "run_dir", "device", "threads", "workers", "log_every", "patience_s", "on_error"})
"""Settings that a command on an existing run may change: they say where and how it runs, not what comes out; nor
would a run that died of a damaged picture have another way to go on (`on_error`)."""


def parse_arguments(arguments: Sequence[str], *, groups: Sequence[str] = GROUPS) -> dict[str, Any]:
    """``["policy=entropy", "policy.tau=3"]`` -> ``{"policy": {"name": "entropy", "tau": 3}}``; values are YAML.

    Args:
        arguments: as typed.
        groups: keys whose bare value is a name.

    Raises:
        SplitError: an argument is not key=value, or a value is not YAML.
    """
    tree: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise SplitError(f"{argument!r} is not key=value; --help lists the keys")
        try:
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)["value"]  # type: ignore[index,call-overload]
        except (OmegaConfBaseException, YAMLError) as error:
            raise SplitError(f"{key}={text}: the value cannot be read, {first_line(error)}") from error
        *parents, last = ALIASES.get(key, key).split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise SplitError(f"{argument}: {parent} was given a value of its own")
        if not parents and last in groups and not isinstance(value, dict | None):
            node, last = tree.setdefault(last, {}), "name"
        node[last] = value
    return tree


def find_recipe(name: str, folder: Path) -> Path:
    """The file of a recipe: a path to a yaml file, or NAME of ``folder/NAME.yaml``.

    Raises:
        SplitError: there is no such recipe.
    """
    if name.endswith((".yaml", ".yml")):
        for path in (Path(name), folder / name):
            if path.is_file():
                return path
        raise SplitError(f"recipe={name}: there is no such file")
    path = folder / f"{name}.yaml"
    if not path.is_file():
        raise SplitError(unknown("recipe", name, recipes(folder)))
    return path


def recipes(folder: Path) -> dict[str, Path]:
    """Recipes of a folder by name, sorted."""
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_recipe(path: Path, *, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe as a tree, over the one that its `defaults` names (looked for beside it).

    Raises:
        SplitError: the file cannot be read, is no mapping, or its `defaults` come round in a circle.
    """
    path = path.resolve()
    if path in seen:
        raise SplitError(f"recipe {path}: its defaults lead back to itself")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, YAMLError) as error:
        raise SplitError(f"recipe {path} cannot be read: {first_line(error)}") from error
    if not isinstance(tree, dict):
        raise SplitError(f"recipe {path} should hold 'key: value' lines")
    layer = {str(key): value for key, value in tree.items()}
    parent = layer.pop("defaults", None)
    if parent is None:
        return merge({}, layer)
    return merge(read_recipe(find_recipe(str(parent), path.parent), seen=(*seen, path)), layer)


def merge(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """`layer` over `base`. A group that names another plugin than below replaces the group there."""
    below, layer = _named(base), _named(layer)
    for key in GROUPS:
        new, old = layer.get(key), below.get(key)
        if isinstance(new, dict) and isinstance(old, dict) and new.get("name", old.get("name")) != old.get("name"):
            del below[key]
    merged = OmegaConf.to_container(OmegaConf.merge(below, layer))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _named(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which a group's bare name is spelt out."""
    return {key: {"name": value} if key in GROUPS and isinstance(value, str) else value for key, value in tree.items()}


def load(tree: Mapping[str, Any]) -> RunConfig:
    """Check a tree of settings.

    Raises:
        SplitError: one line on the first fault, with the nearest right key or name, and how many more there are.
    """
    defaults = {key: dict(RunConfig.model_fields[key].default) for key in ("attention", "estimator")}
    tree = merge(defaults, tree)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise SplitError(explain(error, tree)) from error


def to_yaml(config: RunConfig) -> str:
    """The whole configuration; `read_recipe` and `load` make the same RunConfig of it again."""
    return safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def check_run_dir(config: RunConfig) -> None:
    """Refuse a run_dir that holds a run with other settings. Training compares all settings but `FREE` ones, other
    commands only those that training depends on.

    Raises:
        SplitError: the settings differ, or run_dir cannot be one.
    """
    if config.do == "report" and config.report.runs:
        return  # reads other runs and writes to report.out
    folder = Path(config.run_dir)
    if folder.exists() and not folder.is_dir():
        raise SplitError(f"run_dir={folder} is not a folder")
    path = folder / CONFIG_FILE
    if not path.is_file():
        return
    difference = first_difference(settings_of(_written(path), config.do), settings_of(config, config.do))
    if difference is not None:
        raise SplitError(
            f"{folder} holds a run with other settings ({difference}); choose another run_dir, or delete that one"
        )


def _written(path: Path) -> RunConfig | Mapping[str, Any]:
    """The settings of a run, those that are newer than it at their defaults; as they stand if they are none of ours."""
    tree = read_recipe(path)
    try:
        return load(tree)
    except SplitError:
        return tree


def settings_of(config: RunConfig | Mapping[str, Any], command: str = "train") -> dict[str, Any]:
    """Dotted key -> value of the settings that `command` depends on, as JSON has them."""
    free = FREE if command == "train" else FREE | {"eval", "bench", "draw", "report", "export", "checkpoint"}
    tree = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    return {key: value for key, value in _flat(tree).items() if key.partition(".")[0] not in free}


def first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first setting that differs, with both values and how many more there are; None when all agree."""
    differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if not differing:
        return None
    key = differing[0]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{key}: {there.get(key)} there, {here.get(key)} here{more}"


def claim_run_dir(config: RunConfig) -> Path:
    """Make run_dir and write config.yaml into it, unless the same run already did; returns run_dir.

    Raises:
        SplitError: as `check_run_dir`.
    """
    check_run_dir(config)
    path = Path(config.run_dir) / CONFIG_FILE
    if not path.is_file():
        left = [name for name in STATE if (path.parent / name).is_dir()]
        if left and config.do == "train":
            raise SplitError(
                f"{path.parent} holds {left[0]}/ of a run but no {CONFIG_FILE} to say of which; choose another run_dir"
            )
        write_whole(path, to_yaml(config))
    return path.parent


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a nested mapping."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value})
    return flat


def explain(error: ValidationError, tree: Mapping[str, Any]) -> str:
    """One line for a ValidationError of RunConfig over `tree`."""
    faults = list(_faults(error))
    # an unknown key often explains the other faults, and something missing is the least telling
    faults.sort(key=lambda fault: {"extra_forbidden": 0, "missing": 2}.get(fault[1]["type"], 1))
    key, fault = faults[0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return " ".join(_sentence(key, fault, tree).split()) + more


def _faults(error: ValidationError, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every fault with its dotted key; those of a plugin's settings arrive as an error inside an error."""
    for fault in error.errors(include_url=False):
        key = ".".join(filter(None, [prefix, *map(str, fault["loc"])]))
        inner = fault.get("ctx", {}).get("error")
        if isinstance(inner, ValidationError):
            yield from _faults(inner, key)
        else:
            yield key, fault


def _sentence(key: str, fault: Any, tree: Mapping[str, Any]) -> str:
    inner = fault.get("ctx", {}).get("error")
    if isinstance(inner, SplitError):
        return f"{key}: {inner}" if key else str(inner)
    if fault["type"] == "extra_forbidden":
        value = fault["input"]
        while isinstance(value, dict) and value:  # train.lr_=3 came in as train={lr_: 3}
            word, value = next(iter(value.items()))
            key = f"{key}.{word}"
        close = _nearest_key(key, setting_keys(tree))
        return f"{key}: no such setting." + (f" Did you mean {close}?" if close else " --help lists the settings.")
    if fault["type"] == "missing":
        names = f", one of {', '.join(registry.entries(key))}" if key in GROUPS else ""
        return f"{key} is needed: write {key}={'NAME' if key in GROUPS else 'VALUE'}{names}"
    message = str(inner) if inner is not None else fault["msg"].removeprefix("Input ")
    close = None
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        close = nearest(fault["input"], re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
    whole = inner is not None and isinstance(fault["input"], Mapping)  # a section with what fits no other of its keys
    given = "" if whole else f"={fault['input']}"
    return f"{key}{given}: {message}" + (f". Did you mean {close}?" if close else "")


def _nearest_key(key: str, keys: Sequence[str]) -> str | None:
    """The most likely right spelling: the same last word elsewhere, a sibling like it, the key most like the whole."""
    parent, _, last = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in keys if other.rpartition(".")[0] == parent}
    elsewhere = {other.rpartition(".")[2]: other for other in reversed(keys)}
    if last in elsewhere:
        return elsewhere[last]
    close = nearest(last, siblings)
    return siblings[close] if close else nearest(key, keys)


def setting_keys(tree: Mapping[str, Any]) -> list[str]:
    """All dotted keys there are, with the settings of the plugins that `tree` chooses."""
    keys = []
    for key, field in RunConfig.model_fields.items():
        keys.append(key)
        schema: Any = field.annotation
        if key in GROUPS:
            chosen = tree.get(key) or field.get_default()
            name = chosen.get("name") if isinstance(chosen, dict) else chosen
            registered = registry.entries(key).get(name) if isinstance(name, str) else None
            schema = registered.entry.config if registered else None
        keys.extend(f"{key}.{inner}" for inner in fields(schema))
    return keys


def fields(schema: Any) -> Iterator[str]:
    """Dotted keys of a settings class, sections included; nothing for any other type."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        for key, field in schema.model_fields.items():
            yield key
            yield from (f"{key}.{inner}" for inner in fields(field.annotation))
