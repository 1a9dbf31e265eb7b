"""Finds plugins, names what they offer, and builds it.  Imports no torch until something is built.

Every entry point of the group "split" is loaded by itself: one that fails is skipped with a warning and quoted
wherever a name is not found, and it never takes the others with it. Two offers of one name are an error that
names both distributions, because a silent winner would change results.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

import pluggy

from split_core.errors import SplitError, unknown
from split_core.plugins import KINDS, PROJECT, Entry, Hooks, PluginConfig

logger = logging.getLogger(__name__)

BUILTIN = EntryPoint(name="core", value="split_core.builtin", group=PROJECT)


@dataclass(frozen=True)
class Registered:
    """An entry, and which installed distribution offers it."""

    entry: Entry
    distribution: str
    version: str


@dataclass(frozen=True)
class Choice:
    """A name of a kind with its settings, checked."""

    kind: str
    name: str
    settings: PluginConfig


@dataclass(frozen=True)
class Catalogue:
    """All that is installed.

    Args:
        tables: kind -> name -> entry, names sorted.
        broken: one line for each plugin that was skipped, saying why.
    """

    tables: Mapping[str, Mapping[str, Registered]]
    broken: tuple[str, ...]


@cache
def discover() -> Catalogue:
    """What is installed in this environment, read once per process; `discover.cache_clear()` forgets it."""
    found = list(entry_points(group=PROJECT))
    if BUILTIN.value not in {point.value for point in found}:  # run from source, without installed metadata
        found.append(BUILTIN)
    return collect(found)


def collect(points: Iterable[EntryPoint]) -> Catalogue:
    """Load entry points one by one into a catalogue.

    Raises:
        SplitError: two entries of one kind have the same name.
    """
    tables: dict[str, dict[str, Registered]] = {kind: {} for kind in KINDS}
    broken = []
    for point in points:
        distribution, version = (point.dist.name, point.dist.version) if point.dist else ("split-core", "source")
        try:
            offers = _offers(point)
        except Exception as error:  # whatever a third party's import raises
            broken.append(f"plugin {point.name!r} of {distribution} {version} is broken: {_one_line(error)}")
            logger.warning("%s; it is skipped", broken[-1])
            continue
        for kind, entry in offers:
            other = tables[kind].get(entry.name)
            if other is not None:
                raise SplitError(
                    f"{kind} {entry.name!r} is offered twice: by {other.distribution} {other.version}"
                    f" ({other.entry.target}) and by {distribution} {version} ({entry.target}); uninstall one"
                )
            tables[kind][entry.name] = Registered(entry, distribution, version)
    frozen = {kind: MappingProxyType(dict(sorted(table.items()))) for kind, table in tables.items()}
    return Catalogue(MappingProxyType(frozen), tuple(broken))


def _offers(point: EntryPoint) -> list[tuple[str, Entry]]:
    """Import one plugin and ask its hooks. A manager of its own ties every failure to this plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(point.load(), name=point.name)
    manager.check_pending()  # else a misspelt hook would pass silently
    offers: list[tuple[str, Entry]] = []
    for kind, hook in KINDS.items():
        for entries in getattr(manager.hook, hook)():
            if not isinstance(entries, list | tuple):
                raise TypeError(f"{hook} returned {type(entries).__name__}, expected a list of Entry")
            for entry in entries:
                _check(entry, hook)
                offers.append((kind, entry))
    return offers


def _check(entry: object, hook: str) -> None:
    """Refuse what later code could not use, naming the hook and the field."""
    if not isinstance(entry, Entry):
        raise TypeError(f"{hook} returned {entry!r} in its list, expected Entry")
    if not (isinstance(entry.name, str) and entry.name):
        raise TypeError(f"{hook}: Entry.name is {entry.name!r}, expected a name")
    if not (isinstance(entry.config, type) and issubclass(entry.config, PluginConfig)):
        raise TypeError(f"{hook}: config of {entry.name!r} is {entry.config!r}, expected a subclass of PluginConfig")
    if "name" in entry.config.model_fields:
        raise TypeError(f"{hook}: config of {entry.name!r} has a field 'name', the key that holds the entry's own name")
    module, colon, attribute = entry.target.partition(":") if isinstance(entry.target, str) else ("", "", "")
    if not (module and colon and attribute):
        raise TypeError(f"{hook}: target of {entry.name!r} is {entry.target!r}, expected 'module:attribute'")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def entries(kind: str) -> Mapping[str, Registered]:
    """All entries of a kind by name, sorted."""
    if kind not in KINDS:
        raise SplitError(unknown("kind of plugin", kind, KINDS))
    return discover().tables[kind]


def get(kind: str, name: str) -> Registered:
    """The entry of a kind with this name.

    Raises:
        SplitError: there is none; the line holds the nearest name, all names, and plugins that were skipped.
    """
    table = entries(kind)
    if name not in table:
        skipped = "".join(f" Skipped: {line}." for line in discover().broken)
        raise SplitError(unknown(kind, name, table) + skipped)
    return table[name]


def load(entry: Entry) -> Any:
    """Import what an entry points at.

    Raises:
        SplitError: the module or the attribute cannot be imported (an optional dependency is missing, say).
    """
    module, _, attribute = entry.target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SplitError(f"{entry.name!r} cannot be loaded from {entry.target}: {_one_line(error)}") from error


def choose(kind: str, spec: str | Mapping[str, Any] | Choice) -> Choice:
    """Check a choice: a name, or ``{"name": ..., setting: value, ...}``.

    Raises:
        SplitError: no such name, or no name given.
        pydantic.ValidationError: a setting is unknown or has a wrong value.
    """
    if isinstance(spec, Choice):
        return spec
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise SplitError(f"no name is given; write {kind}=NAME, one of {', '.join(entries(kind)) or 'none installed'}")
    return Choice(kind, name, get(kind, name).entry.config.model_validate(settings))


def build(kind: str, spec: str | Mapping[str, Any] | Choice, context: Any = None) -> Any:
    """Check a choice and build it: ``target(settings, context)``, with the context that the kind's hook describes."""
    choice = choose(kind, spec)
    return load(get(kind, choice.name).entry)(choice.settings, context)
