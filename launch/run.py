"""The command line: ``python launch/run.py [do=COMMAND] [recipe=NAME] [key=value ...]``; --help says the rest.

Everything is checked before torch is imported and before anything is written. What is the user's to mend gives
one line on stderr and exit code 2.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from split_core import resolve
from split_core.config import RunConfig
from split_core.errors import SplitError, nearest
from usage import plugin_table, usage

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPES = {"cls": "digits_cls"}
"""Task -> the recipe that a command without `recipe` starts from."""

ENGINES = {
    "train": "train",
    "eval": "evaluate",
    "bench": "bench",
    "draw": "draw",
    "report": "report",
    "export": "export",
}
"""Command -> module of split_core.engine, whose ``main(config)`` runs it."""


def configure(tree: dict[str, Any]) -> RunConfig:
    """The configuration of a command: what it builds on, then what was typed.

    Raises:
        SplitError: a wrong key, value, name or file.
    """
    typed = dict(tree)
    recipe, run_dir = typed.pop("recipe", None), typed.get("run_dir")
    command = str(typed.get("do", "train"))
    if command not in ENGINES:
        close = nearest(command, [*ENGINES, "plugins"])
        raise SplitError(f"do={command}: no such command." + (f" Did you mean do={close}?" if close else ""))
    written = Path(str(run_dir)) / resolve.CONFIG_FILE if run_dir else None
    if recipe is not None:
        base = resolve.read_recipe(resolve.find_recipe(str(recipe), RECIPES))
    elif written is not None and command != "train" and written.is_file():
        base = resolve.read_recipe(written)
    else:
        typed.setdefault("task", {"name": "cls"})
        task = typed["task"]
        name = DEFAULT_RECIPES.get(str(task.get("name", "cls") if isinstance(task, dict) else task))
        base = resolve.read_recipe(RECIPES / f"{name}.yaml") if name else {}
    base["do"] = command
    config = resolve.load(resolve.merge(base, typed))
    resolve.check_run_dir(config)
    return config


def execute(config: RunConfig) -> None:
    """Run a checked command here.

    Raises:
        SplitError: its engine needs a distribution that is not installed, or what it finds is the user's to mend.
    """
    try:
        engine = importlib.import_module(f"split_core.engine.{ENGINES[config.do]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "split_core":
            raise
        raise SplitError(f"do={config.do} needs {error.name}; pip install 'split-core[train]' brings it") from error
    engine.main(config)


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        if not arguments or {"-h", "--help"} & set(arguments):
            print(usage(RECIPES))
            return 0
        tree = resolve.parse_arguments(arguments)
        if tree.get("do") != "plugins":
            execute(configure(tree))
        elif len(tree) > 1:
            raise SplitError(f"do=plugins takes no settings, but got {', '.join(key for key in tree if key != 'do')}")
        else:
            print(plugin_table())
    except SplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough (| head); keep the shutdown's flush from complaining too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
