"""``do=compare``: every method at every budget, trained and evaluated on the same images, timed together.

Each budget and seed is an ordinary run under run_dir/BUDGET-sSEED, so a killed comparison goes on where it stopped.
Budgets are token fractions of splitting; a reducer is set to compute no more FLOPs than that (`Reducer.spend`). Speed
is measured last, for all methods and budgets in one interleaved run at each batch size. The result is one JSON file
with all rows, one table and one picture: run_dir/compare.*, or report.out.*.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from split_core.config import RunConfig
from split_core.engine import bench, merge, report, train
from split_core.engine.adapt import own_settings
from split_core.engine.assemble import is_reducer
from split_core.engine.methods import named, plan
from split_core.engine.results import write_json
from split_core.engine.session import Session
from split_core.errors import SplitError
from split_core.reducer import Reducer


def main(config: RunConfig) -> None:
    """Run what is not finished yet, time, write and show."""
    plan(config)
    left_out: list[str] = []
    runs = points(config, left_out)
    for run in runs:
        train.main(run)
    timed = config.model_copy(
        update={
            "bench": config.bench.model_copy(
                update={"methods": methods_of(runs), "budgets": tuple(dict.fromkeys(run.budget for run in runs))}
            )
        }
    )
    out = Path(config.report.out or Path(config.run_dir) / "compare")
    with Session(timed) as session:
        speeds = bench.run(session)
        content = merge.merge([run.run_dir for run in runs], out.name)
        content |= {"bench": speeds, "left_out": list(dict.fromkeys([*left_out, *speeds["left_out"]]))}
        write_json(out.with_name(f"{out.name}.json"), content)
        report.merged(content, out, session.log.console)


def points(config: RunConfig, left_out: list[str]) -> list[RunConfig]:
    """One training run for each seed and budget, with the methods that can meet that budget."""
    session = Session(config)
    names = named(config, "eval")
    reducers: dict[str, Reducer] = {}
    for name in [name for name in names if is_reducer(name)]:
        try:
            model = session.learner(own_settings(config, name)).model
        except SplitError as error:
            bench.note(left_out, name, error)
            continue
        assert isinstance(model, Reducer)
        reducers[name] = model
    runs = []
    for seed in config.compare.seeds or (config.seed,):
        for budget in config.compare.budgets or (config.budget,):
            able = tuple(n for n in names if not is_reducer(n) or _meets(reducers.get(n), n, budget, left_out))
            where = {"run_dir": str(Path(config.run_dir) / f"{budget:g}-s{seed}"), "budget": budget, "seed": seed}
            evaluated = {"eval": config.eval.model_copy(update={"methods": able})}
            runs.append(config.model_copy(update={"do": "train", **where, **evaluated}))
    return runs


def methods_of(runs: list[RunConfig]) -> tuple[str, ...]:
    """Methods of any run, in order."""
    return tuple(dict.fromkeys(name for run in runs for name in run.eval.methods if not name.endswith("_warmstart")))


def _meets(model: Any, name: str, budget: float, left_out: list[str]) -> bool:
    if model is None:
        return False
    try:
        model.settings_for(budget)
    except SplitError as error:
        bench.note(left_out, name, error)
        return False
    return True
