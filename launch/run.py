"""The command line: ``python launch/run.py [do=COMMAND] [recipe=NAME] [key=value ...]``; --help says the rest.

Everything is checked before torch is imported and before anything is written. What is the user's to mend gives
one line on stderr and exit code 2.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sweep
from clusters import ClusterConfig, read_cluster
from jobs import submit
from split_core import resolve
from split_core.config import GROUPS, RunConfig
from split_core.errors import SplitError, Stopped, nearest
from status import status
from usage import plugin_table, usage

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPES = {"cls": "digits_cls", "seg": "digits_seg", "det": "digits_det", "vqa": "easy_vqa"}
"""Task -> the recipe that a command without `recipe` starts from."""

STOPPED = 75
"""Exit code of a run that was asked to save because its time is up (EX_TEMPFAIL: it should be started again)."""
ENDED = 143
"""Exit code of a run that was asked to end by SIGTERM, and saved before it did."""
OTHERS = ("plugins", "status", "sweep")
"""Commands that are the launcher's own."""

ENGINES = {
    "train": "train",
    "eval": "evaluate",
    "bench": "bench",
    "compare": "compare",
    "draw": "draw",
    "report": "report",
    "export": "export",
    "check": "check",
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
    if "methods" in typed:  # short for the command's own section
        section = "bench" if command == "bench" else "eval"
        typed[section] = {**typed.get(section, {}), "methods": typed.pop("methods")}
    if command not in ENGINES:
        close = nearest(command, [*ENGINES, *OTHERS])
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


def command(arguments: Sequence[str]) -> int:
    """Do what one command line says; returns the exit code.

    Raises:
        SplitError: a mistake in it, or what the command finds is the user's to mend.
    """
    tree = resolve.parse_arguments(arguments, groups=(*GROUPS, "cluster"))
    chosen, do = tree.pop("cluster", None), tree.get("do", "train")
    if do == "plugins":
        _only(tree, {"do"})
        print(plugin_table())
        return 0
    if do == "status":
        _only(tree, {"do", "run_dir"})
        if "run_dir" not in tree:
            raise SplitError("do=status needs run_dir=FOLDER")
        print(status(Path(str(tree["run_dir"]))))
        return 0
    cluster = None if chosen is None else read_cluster(chosen)
    if do == "sweep":
        return sweep_all(arguments, Path(str(tree.get("run_dir", "runs/sweep"))), cluster)
    config = configure(tree)
    if cluster is None:
        execute(config)
        return 0
    typed = [argument for argument in arguments if not re.match(r"(cluster|run_dir)\b", argument)]
    run_dir = Path(config.run_dir)
    for record in submit({run_dir: [*typed, f"run_dir={run_dir.absolute()}"]}, run_dir, cluster):
        print(f"{resolve.to_yaml(config)}job {record['id']}  log {record['log']}  state: do=status run_dir={run_dir}")
    return 0


def sweep_all(arguments: Sequence[str], run_dir: Path, cluster: ClusterConfig | None) -> int:
    """Check every combination, then run or submit them all."""
    kept = [argument for argument in arguments if not re.match(r"(cluster|run_dir|do)\b", argument)]
    runs = sweep.combinations(kept, run_dir.absolute())
    for run in runs:
        configure(resolve.parse_arguments(run.arguments))
    sweep.note(run_dir, runs)
    if cluster is not None:
        for record in submit({run.run_dir: run.arguments for run in runs}, run_dir, cluster):
            print(f"job {record['id']}  {Path(record['run_dir']).name}  log {record['log']}")
        print(f"state and table: do=status run_dir={run_dir}")
        return 0
    try:
        return sweep.run_here(runs, Path(__file__))
    finally:
        print(sweep.table(run_dir), flush=True)


def _only(tree: dict[str, Any], known: set[str]) -> None:
    if unknown := [key for key in tree if key not in known]:
        which = "no settings" if known == {"do"} else "run_dir alone"
        raise SplitError(f"do={tree['do']} takes {which}, but got {', '.join(unknown)}")


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        if not arguments or {"-h", "--help"} & set(arguments):
            print(usage(RECIPES))
            return 0
        return command(arguments)
    except SplitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"{stop}; the same command goes on from there", file=sys.stderr)
        return STOPPED if stop.again else ENDED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough (| head); keep the shutdown's flush from complaining too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
