"""``do=sweep policy=xattn,entropy seed=0,1,2``: one run for each combination, and one table of what came out."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from split_core.errors import SplitError
from split_core.files import write_whole
from state import state_of

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Combination:
    """One run of a sweep: its own folder, what is special about it, and its command line."""

    run_dir: Path
    values: dict[str, str]
    arguments: list[str]


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
    """Write down which runs belong to the sweep."""
    rows = [{"run_dir": str(run.run_dir), "values": run.values} for run in runs]
    write_whole(run_dir / SWEEP_FILE, json.dumps({"runs": rows}, indent=1) + "\n")


def run_here(runs: Sequence[Combination], launcher: Path) -> list[int]:
    """One after another in processes of their own, so that one that fails stops no other; their exit codes."""
    return [subprocess.run([sys.executable, str(launcher), *run.arguments], check=False).returncode for run in runs]


def table(run_dir: Path) -> str:
    """Every run of the sweep with its values, state and result, as Markdown; also written to run_dir/sweep.md.

    Raises:
        SplitError: there is no sweep.
    """
    from split_core.engine.results import RESULTS, metric_of, read_results
    from split_core.engine.tables import Table, number, plus_minus

    try:
        rows = json.loads((run_dir / SWEEP_FILE).read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError) as error:
        raise SplitError(f"{run_dir / SWEEP_FILE} cannot be read: {error}") from error
    keys = list(rows[0]["values"])
    cells, metrics = [], []
    for row in rows:
        folder = Path(row["run_dir"])
        result: dict[str, Any] = {}
        if (folder / RESULTS).is_file():
            result = read_results(folder / RESULTS, hint="finish the run first")["rows"][-1]
        metric = metric_of(result) or "score"
        metrics += [metric] if result else []
        cells.append([
            *row["values"].values(), state_of(folder), result.get("method", "-"),
            number(result.get("token_fraction")),
            plus_minus(result.get(metric), result.get(f"{metric}_se"), signed=False), number(result.get("error")),
        ])  # fmt: skip
    name = metrics[0] if len(set(metrics)) == 1 else "score"
    made = Table("Runs of the sweep", [*keys, "state", "method", "token fraction", f"{name} ± SE", "error"], cells)
    text = made.markdown()
    write_whole(run_dir / "sweep.md", f"# {made.title}\n\n{text}\n")
    return text
