"""``do=sweep policy=xattn,entropy seed=0,1,2``: one run for each combination, and one table of what came out."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from split_core.engine.interrupt import Interrupt
from split_core.engine.results import metric_of
from split_core.errors import SplitError, Stopped
from split_core.files import unreadable, write_whole
from state import state_of

SWEEP_FILE = "sweep.json"
LOOK_S = 0.2
"""How often a sweep looks whether it was told to stop."""


@dataclass(frozen=True)
class Combination:
    """One run of a sweep: its own folder, what is special about it, and its command line."""

    run_dir: Path
    values: dict[str, str]
    arguments: list[str]


class NotedRun(BaseModel):
    """A run as sweep.json names it."""

    run_dir: str
    values: dict[str, str]


class Noted(BaseModel):
    """What sweep.json holds."""

    runs: list[NotedRun]


def combinations(arguments: Sequence[str], run_dir: Path) -> list[Combination]:
    """Every combination of the values that commas separate; commas within brackets or quotes do not.

    Raises:
        SplitError: nothing has several values, or a value is given twice.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = split_values(text)
        if not equals or len(values) == 1:
            fixed.append(argument)
            continue
        if "" in values or len(set(values)) < len(values):
            raise SplitError(f"{argument}: a sweep's values should differ, and none be empty")
        swept[key] = values
    if not swept:
        raise SplitError("do=sweep needs a setting with several values, such as seed=0,1,2")
    found = []
    for point in itertools.product(*swept.values()):
        pairs = [f"{key}={value}" for key, value in zip(swept, point, strict=True)]
        place = run_dir / re.sub(r"[^\w.,=+-]", "_", ",".join(pairs))
        chosen = dict(zip(swept, point, strict=True))
        found.append(Combination(place, chosen, [*fixed, *pairs, "do=train", f"run_dir={place}"]))
    return found


def split_values(text: str) -> list[str]:
    """``"0,1,2"`` -> ["0", "1", "2"]; ``"[0,1],2"`` -> ["[0,1]", "2"]."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{(") - (letter in "]})") if not quote else 0
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def note(run_dir: Path, runs: Sequence[Combination]) -> None:
    """Write down which runs belong to the sweep; those of an earlier one over the same settings stay in its table.

    Raises:
        SplitError: the sweep in run_dir is over other settings, or its file cannot be read.
    """
    rows = {str(run.run_dir): run.values for run in runs}
    if (run_dir / SWEEP_FILE).is_file():
        earlier = dict(_runs_of(run_dir))
        there, here = (list(next(iter(values.values()))) for values in (earlier, rows))
        if set(there) != set(here):
            raise SplitError(
                f"run_dir={run_dir} holds a sweep over other settings ({', '.join(there)} there, {', '.join(here)}"
                " here); choose another run_dir"
            )
        rows = {**earlier, **rows}
    content = {"runs": [{"run_dir": place, "values": values} for place, values in rows.items()]}
    write_whole(run_dir / SWEEP_FILE, json.dumps(content, indent=1) + "\n")


def run_here(runs: Sequence[Combination], launcher: Path) -> int:
    """One after another in processes of their own, so that one that fails stops no other.

    Told to stop, it tells the run of the moment, waits until that has saved, and starts no further one.

    Returns: the exit code of the run that was told to stop, or else the first that is not 0.

    Raises:
        Stopped: it was told to, and not by way of a run's own exit code.
    """
    codes: list[int] = []
    interrupt = Interrupt()
    interrupt.watch()
    try:
        for run in runs:
            codes.append(_run(run, launcher, interrupt))
            if interrupt.asked:
                break
    finally:
        interrupt.restore()
    if not interrupt.asked:
        return next((code for code in codes if code), 0)
    if codes[-1] < 0 or (codes[-1] == 0 and len(codes) < len(runs)):  # before it could listen, or at its very end
        raise Stopped(f"the sweep stopped as asked in run {len(codes)} of {len(runs)}", again=interrupt.again)
    return codes[-1] or next((code for code in codes if code), 0)


def _run(run: Combination, launcher: Path, interrupt: Interrupt) -> int:
    """One run in its own process, which never outlives this one's interest in it; its exit code."""
    child = subprocess.Popen([sys.executable, str(launcher), *run.arguments])
    try:
        told = False
        while True:
            if interrupt.asked and not told:
                child.send_signal(signal.SIGUSR2 if interrupt.again else signal.SIGTERM)
                told = True
            try:
                return child.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if child.poll() is None:  # Ctrl-C: a terminal tells both, kill -INT this process alone
            child.terminate()
            child.wait()


def table(run_dir: Path) -> str:
    """Every run of the sweep with its values, state and result, as Markdown; also written to run_dir/sweep.md.

    Raises:
        SplitError: there is no sweep.
    """
    from split_core.engine.tables import NONE, Table, number, plus_minus

    runs = _runs_of(run_dir)
    keys = list(runs[0][1])
    cells, metrics = [], []
    for folder, values in runs:
        state, result = state_of(Path(folder))
        metric = metric_of(result) or "score"
        metrics += [metric] if result else []
        cells.append([
            *(values[key] for key in keys), state, result.get("method", NONE), number(result.get("token_fraction")),
            plus_minus(result.get(metric), result.get(f"{metric}_se"), signed=False), number(result.get("error")),
        ])  # fmt: skip
    name = metrics[0] if len(set(metrics)) == 1 else "score"
    made = Table("Runs of the sweep", [*keys, "state", "method", "token fraction", f"{name} ± SE", "error"], cells)
    text = made.markdown()
    write_whole(run_dir / "sweep.md", f"# {made.title}\n\n{text}\n")
    return text


def _runs_of(run_dir: Path) -> list[tuple[str, dict[str, str]]]:
    """(run_dir, values) of every run that sweep.json names, each with the same keys.

    Raises:
        SplitError: it cannot be read, or says no such thing.
    """
    path = run_dir / SWEEP_FILE
    try:
        runs = Noted.model_validate_json(path.read_bytes()).runs
    except OSError as error:
        raise unreadable(path, error) from error
    except ValidationError:
        runs = []
    if len({frozenset(run.values) for run in runs}) != 1 or not runs[0].values:
        raise SplitError(f"{path} is damaged: it names no runs of a sweep; choose another run_dir for a new one")
    return [(run.run_dir, run.values) for run in runs]
