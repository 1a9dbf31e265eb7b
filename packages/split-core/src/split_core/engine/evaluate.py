"""``do=eval``: every method on the same images, image by image, with paired errors; results.json.

A row's `accuracy` (or whatever the task's score is called) is the mean of per-image scores. `minus` holds, for
each other method, the mean difference over the same images and its standard error. What the task accumulates over the
data set (`Task.metric`: mIoU, AP) stands beside it; `further` names those numbers for tables.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from split_core.config import RunConfig
from split_core.engine import bench, report
from split_core.engine.assemble import chooser, describe
from split_core.engine.calibration import objects_of
from split_core.engine.deploy import deployed
from split_core.engine.loader import evaluation_batches, step_seed, to_device, valid_of
from split_core.engine.methods import WARM, Method, plan
from split_core.engine.opening import open_run
from split_core.engine.pairing import PER_IMAGE, paired, standard_error
from split_core.engine.results import RESULTS, write_json
from split_core.engine.session import Learner, Session, provenance
from split_core.engine.timing import Timing, own_clock, parts
from split_core.errors import SplitError
from split_core.files import write_whole
from split_core.flops import forward_flops, ideal_speedup
from split_core.task import Metric

Array = NDArray[Any]


@dataclass
class Tally:
    """Numbers of one method, each (images,) but `tokens`, `flops` and `filled`, which have one for each packed sequence
    (an image, or a window of one): means over the draws of a random policy. `filled` is the share of the canvas's cells
    that hold picture."""

    score: Array
    error: Array
    fraction: Array
    tokens: Array
    flops: Array
    filled: Array
    object_hits: Array
    object_cells: Array
    boundary_hits: Array
    boundary_cells: Array


def main(config: RunConfig) -> None:
    """Evaluate the weights that a training run left in run_dir."""
    with open_run(config) as session:
        run(session)


def run(session: Session) -> None:
    """Evaluate all methods of the plan, write results.json and the report."""
    methods = plan(session.config)
    learners = {m.name: deployed(session, m) for m in methods}
    tallies, metrics, written = tally(session, methods, learners)
    if not session.ranks.main:
        return
    speeds, parts = speed(session, learners)
    rows = [
        row(session, m, learners[m.name], tallies, speeds, metrics[m.name] | parts.get(m.name, {})) for m in methods
    ]
    per_class = {name: found["per_class"] for name, found in metrics.items() if "per_class" in found}
    results = provenance() | {"rows": rows} | ({"per_class": per_class} if per_class else {})
    write_json(session.run_dir / RESULTS, results)
    for name, files in written.items():
        for file, text in files.items():
            write_whole(session.run_dir / "report" / name / file, text)
    arrays = {f"{name}/{key}": value for name, t in tallies.items() for key, value in vars(t).items()}
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_whole(session.run_dir / PER_IMAGE, packed.getvalue())
    report.write(session, results, tallies, learners)


@torch.no_grad()
def tally(
    session: Session, methods: list[Method], learners: Mapping[str, Learner]
) -> tuple[dict[str, Tally], dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Run every method on every image of the evaluated split; one pass over the data serves all.

    Returns:
        Per-image numbers, what the task accumulates over the data set, and its files (of a random policy's first
        draw), by method.
    """
    config = session.config.eval
    data = session.data(config.split)
    total = -(-min(config.images, len(data)) // config.batch_size)
    rank, world = session.ranks.rank, session.ranks.world
    mine = range(rank, total, world)
    batches = evaluation_batches(
        data, config.batch_size, range(config.images), workers=session.config.workers, rank=rank, world=world,
        gaps=True,
    )  # fmt: skip
    collected: dict[int, dict[str, dict[str, Array]]] = {}
    metrics = {m.name: _metrics(session, learners[m.name]) for m in methods}
    for index, batch in zip(mine, session.log.track(batches, total=len(mine), title="evaluate"), strict=True):
        session.stop_if_asked()
        if not batch:
            continue
        batch = to_device(batch, session.device)
        collected[index] = {m.name: _batch(session, learners[m.name], batch, index, metrics[m.name]) for m in methods}
    if len(mine) < -(-total // world):  # the others have one batch more
        session.stop_if_asked()
    numbers = {index: batch for share in session.ranks.gather(collected) for index, batch in share.items()}
    if not numbers:
        raise SplitError(f"none of the {config.images} images of {config.split} can be read")
    tallies = {m.name: _joined([numbers[index][m.name] for index in sorted(numbers)]) for m in methods}
    found = {name: mean_of([metric.compute() for metric in own if metric]) for name, own in metrics.items()}
    writing = metrics if session.ranks.main else {}
    written = {name: own[0].files() for name, own in writing.items() if own[0] is not None and hasattr(own[0], "files")}
    return tallies, found, written


def _joined(batches: list[dict[str, Array]]) -> Tally:
    return Tally(**{key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]})


def _metrics(session: Session, learner: Learner) -> list[Metric | None]:
    """One accumulator for each draw of a random policy: a data set is counted whole, never twice in one."""
    draws = session.config.eval.random_draws if chooser(learner.model).stochastic else 1
    return [learner.task.metric() for _ in range(draws)]


def mean_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over draws of numbers by name, however nested; not-a-number where a draw has none."""
    first = found[0] if found else {}
    return {
        key: mean_of([each[key] for each in found]) if isinstance(value, Mapping)
        else float(np.mean([each[key] for each in found]))
        for key, value in first.items()
    }  # fmt: skip


def _batch(
    session: Session, learner: Learner, batch: Mapping[str, Any], index: int, metrics: Sequence[Metric | None]
) -> dict[str, Array]:
    """Per-image numbers of one batch, averaged over draws where the policy is random."""
    model, task = learner.model, learner.task
    images, target, valid = batch["image"], batch["target"], valid_of(model, batch)

    def counted(cells: torch.Tensor) -> torch.Tensor:
        return task.per_image(cells.flatten(1).sum(1).float(), target)

    sums: dict[str, torch.Tensor] = {}
    with session.accelerator.autocast():
        grid = model.embed.grid(images.shape[-2:])
        objects, edges = objects_of(learner, target, grid), task.boundaries(target, grid, model.embed.patch_size)
        for draw, metric in enumerate(metrics):
            generator = torch.Generator().manual_seed(step_seed(session.config.seed, f"eval/{draw}", index))
            features = model.forward_features(images, objects=objects, generator=generator, valid=valid)
            layout = features.layout
            output = task.output(model, features, target)
            error, score = task.error(output, target), task.score(output, target)
            if metric is not None:
                metric.update(output, target)
            cells = layout.valid_cells.float()
            fine, nothing = layout.fine(), torch.zeros_like(layout.owner, dtype=torch.bool)
            on, edge = (nothing if cells is None else cells for cells in (objects, edges))
            numbers = {
                "score": torch.full_like(error, float("nan")) if score is None else score,
                "error": error,
                "fraction": task.per_image(layout.token_fraction * cells, target) / task.per_image(cells, target),
                "tokens": layout.counts,
                "flops": torch.from_numpy(forward_flops(model, layout) + task.flops(layout.counts.cpu().numpy())),
                "filled": cells / (grid.cells[0] * grid.cells[1]),
                "object_hits": counted(fine & on),
                "object_cells": counted(on),
                "boundary_hits": counted(fine & edge),
                "boundary_cells": counted(edge),
            }
            for key, value in numbers.items():
                sums[key] = sums.get(key, 0) + value.double()
    return {key: (value / len(metrics)).cpu().numpy() for key, value in sums.items()}


def speed(session: Session, learners: Mapping[str, Learner]) -> tuple[dict[str, Timing], dict[str, dict[str, float]]]:
    """Whole-pipeline images/s of every method, interleaved, on one real batch; and its parts, where the task has some
    beyond its output."""
    config = session.config
    size, data = config.bench.batch_sizes[0], session.data(config.eval.split)
    batch = next(evaluation_batches(data, size, range(max(size, config.eval.images))))
    batch = to_device(batch, session.device)
    images = batch["image"]
    timed = {name: learner for name, learner in learners.items() if not chooser(learner.model).analysis}
    repeats, warmup, clock = config.bench.repeats, config.bench.warmup, own_clock(images.device)
    with session.accelerator.autocast():
        shown = (images, valid_of(next(iter(learners.values())).model, batch))
        whole = bench.measure(timed, shown, repeats=repeats, warmup=warmup, clock=clock)
        return whole, parts(timed, shown, repeats=repeats, warmup=warmup, clock=clock)


def row(
    session: Session, method: Method, learner: Learner, tallies: Mapping[str, Tally], speeds: Mapping[str, Timing],
    further: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One line of results.json; `further`: what the task accumulated and its parts' times."""
    own = tallies[method.name]
    count = len(own.error)
    metric = learner.task.metric_name or "score"
    rows, cols = learner.model.embed.grid(tuple(learner.model.vit.patch_embed.img_size)).cells
    further_flops = learner.task.flops(rows * cols)
    result = {
        "method": method.name, "rho": session.config.budget, "seed": session.config.seed, "images": count,
        "rule": "calibrated threshold" if method.calibrated and session.config.decision in (None, "threshold")
        else describe(learner.model),
        "backbone": method.source, "token_fraction": own.fraction.mean(), metric: own.score.mean(),
        f"{metric}_se": standard_error(own.score), "error": own.error.mean(),
        "object_recall": recall(own.object_hits, own.object_cells),
        "ideal_speedup": ideal_speedup(
            learner.model.vit, rows * cols, own.flops, learner.model.windows, further_flops
        ),
    }  # fmt: skip
    if "estimator" in learner.facts and not method.name.endswith(WARM) and chooser(learner.model).learned:
        result |= {key: learner.facts[key] for key in ("estimator", "learned_images", "learned_seconds")}
    further = {name: value for name, value in further.items() if not isinstance(value, Mapping)}
    if own.filled.min() < 1:  # slack: padding saves tokens whatever the policy does
        further["canvas_fraction"] = own.tokens.mean() / (rows * cols)
    if own.boundary_cells.sum():
        further["boundary_recall"] = recall(own.boundary_hits, own.boundary_cells)
    result |= further | ({"further": list(further)} if further else {})
    if method.name in speeds:
        timing = speeds[method.name]
        result |= {
            "images_per_s": timing.images_per_s,
            "speedup": timing.speedup,
            "speedup_spread": timing.speedup_spread,
        }
    result["minus"] = {name: paired(own.score, other.score) for name, other in tallies.items() if name != method.name}
    return {key: float(value) if isinstance(value, np.floating) else value for key, value in result.items()}


def recall(hits: Array, cells: Array) -> float | None:
    """Share of the cells that got a fine token (App. F); None where there are no such cells."""
    return float(hits.sum() / cells.sum()) if cells.sum() else None
