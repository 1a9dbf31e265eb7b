"""The texts of ``--help`` and ``do=plugins``, made from the schema and the registry so that they cannot lag behind."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from split_core import registry, resolve
from split_core.config import GROUPS, RunConfig
from split_core.plugins import KINDS

INTRODUCTION = """\
usage: python launch/run.py [do=COMMAND] [recipe=NAME|FILE] [key=value ...]

    python launch/run.py task=cls policy=xattn budget=0.5
    python launch/run.py do=draw image=photo.jpg policy=entropy run_dir=runs/photo

commands
  do=train     adapt the backbone, warm-start and train the policy, evaluate, report; resumes a killed run
  do=eval      evaluate beside other methods at the same token fraction
  do=bench     time the whole pipeline against the dense model; methods=[tome, entropy] or methods=all
  do=compare   every method at several budgets: accuracy, FLOPs and speed in one table; methods=all for short
  do=draw      draw where the tokens went; image=PATH for a picture of your own
  do=report    tables and pictures again from what a run has written
  do=export    a trained backbone as plain timm weights
  do=check     say everything that is wrong with the data's files, before training
  do=sweep     a run for each combination of values with commas (seed=0,1,2 policy=xattn,entropy), and one table
  do=status    how far the run or the sweep in run_dir is
  do=plugins   list everything installed that a setting can name

cluster=NAME (local, slurm, a100, h200, or a yaml file) submits train and sweep instead of running them here;
cluster.nodes=2 and the like override it (docs/slurm.md).

Commands other than train take the settings of the run in run_dir when there is one. Values are YAML: 0.5, true,
null, [a, b]. Naming another plugin (policy=entropy) drops the recipe's settings of the old one."""


def usage(folder: Path) -> str:
    """The whole help text; `folder` holds the recipes."""
    blocks = [INTRODUCTION, "\n".join(["recipes", *_columns(list(_recipes(folder)))])]
    blocks.append("\n".join(["settings", *_columns(list(_settings("", RunConfig)))]))
    for kind in GROUPS:
        rows: list[tuple[str, ...]] = []
        for name, registered in registry.entries(kind).items():
            rows.append((f"{kind}={name}", "", registered.entry.summary))
            rows.extend((f"  {key}", *rest) for key, *rest in _settings(f"{kind}.", registered.entry.config))
        blocks.append("\n".join([f"{kind}: installed, with their settings", *_columns(rows)]))
    rows = []
    for name, registered in registry.entries("reducer").items():
        rows.append((name, "", registered.entry.summary))
        rows.extend((f"  {key}", *rest) for key, *rest in _settings(f"reducers.{name}.", registered.entry.config))
    blocks.append("\n".join(["reducer: installed, with their settings", *_columns(rows)]))
    return "\n\n".join(blocks)


def plugin_table() -> str:
    """Kind, name, distribution, version and summary of everything installed."""
    rows = [("kind", "name", "distribution", "version", "summary")]
    for kind in KINDS:
        for name, registered in registry.entries(kind).items():
            rows.append((kind, name, registered.distribution, registered.version, registered.entry.summary))
    return "\n".join(_columns(rows, indent=""))


def _recipes(folder: Path) -> Iterator[tuple[str, ...]]:
    for name, path in resolve.recipes(folder).items():
        lines = path.read_text(encoding="utf-8").splitlines()
        said = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
        yield f"recipe={name}", shorten(re.split(r"; |\. (?=[A-Z][a-z])", said)[0], 120, placeholder=" ...")


def _settings(prefix: str, schema: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """(key, default, description) of every setting; a section's come in place of the section."""
    documented = _attributes(schema)
    for key, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _settings(f"{prefix}{key}.", field.annotation)
        else:
            yield prefix + key, _default(field), _described(field, documented.get(key, ""))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(needed)"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, dict) and set(value) == {"name"}:
        value = value["name"]
    return "= " + (value if isinstance(value, str) and value else json.dumps(value, default=str))


def _described(field: FieldInfo, documented: str) -> str:
    text = field.description or documented
    choices = "|".join(_choices(field.annotation))
    return f"{text} [{choices}]" if choices else text


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


def _attributes(schema: type[BaseModel]) -> dict[str, str]:
    """Descriptions from the "Attributes:" part of the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        _, _, part = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Attributes:\n")
        for item in re.split(r"\n(?= {4}\w)", "\n" + part):
            names, colon, text = item.partition(":")
            if colon:
                found.update({name.strip(): " ".join(text.split()) for name in names.split(",")})
    return found


def _columns(rows: Sequence[tuple[str, ...]], *, indent: str = "  ") -> list[str]:
    """Rows as lines with aligned columns; the last column runs free."""
    rows = rows or [("none",)]
    widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(max(map(len, rows)))]
    return [indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip() for row in rows]
