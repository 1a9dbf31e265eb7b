"""Seconds of whole pipelines, each taken between two runs of the dense model, and seconds of their stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from split_core.engine.session import Learner
from split_core.packing import pack

Clock = Callable[[], float]
Run = Callable[[int], object]
"""Called with the number of the repeat."""
STAGES = ("pyramid", "decide", "pack", "blocks", "head")


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats.

    Args:
        images_per_s: whole pipeline.
        images_per_s_spread: slowest and fastest repeat.
        speedup: against the dense timm model: the median of the repeats' ratios.
        speedup_spread: lowest and highest of those ratios.
    """

    images_per_s: float
    images_per_s_spread: tuple[float, float]
    speedup: float
    speedup_spread: tuple[float, float]


def interleave(
    reference: Run, runs: Mapping[str, Run], rounds: Iterable[int], *, batch: int, device: torch.device,
    clock: Clock = time.perf_counter,
) -> tuple[Timing, dict[str, Timing]]:  # fmt: skip
    """Time all runs in turn, round after round, with the reference before and after each.

    A run is compared with the mean of its two neighbours, so that a machine that slows down or speeds up meanwhile
    slows both alike.

    Args:
        reference: what the others are compared with.
        runs: by name.
        rounds: numbers of the repeats; negative ones warm up and do not count.
        batch: images that each run works on.
        device: waited for before the clock is read.
        clock: seconds.

    Returns:
        The reference's timing, and each run's.
    """
    own: list[float] = []
    took: dict[str, list[float]] = {name: [] for name in runs}
    ratio: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in rounds:
        before = _seconds(reference, repeat, device, clock)
        dense = [before]
        for name, run in runs.items():
            seconds = _seconds(run, repeat, device, clock)
            behind = _seconds(reference, repeat, device, clock)
            if repeat >= 0:
                took[name].append(seconds)
                ratio[name].append((before + behind) / 2 / seconds)
            before = behind
            dense.append(behind)
        if repeat >= 0:
            own += dense
    timings = {name: Timing(*_rates(batch, took[name]), *_median(ratio[name])) for name in runs}
    return Timing(*_rates(batch, own), 1.0, (1.0, 1.0)), timings


def own_clock(device: torch.device) -> Clock:
    """Seconds of this process alone where an idle machine's clock would say the same, with one thread on a CPU: other
    processes then only delay the measurement. The clock elsewhere."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


@torch.no_grad()
def stages(
    learner: Learner, images: Float[Tensor, "b ch H W"], valid: Bool[Tensor, "b r c"] | None = None, *, repeats: int,
    warmup: int, clock: Clock = time.perf_counter,
) -> dict[str, float]:  # fmt: skip
    """Median seconds of each stage of the whole pipeline on one batch; `head` is the task's.

    The stages are the calls that a forward makes, made one by one; `blocks` is what `encode` takes beyond `pack`.
    """
    model = learner.split
    watch = _Watch(images.device, clock)
    for _ in range(warmup + repeats):
        with watch("pyramid"):
            pyramid = model.pyramid(images, valid)
        with watch("decide"):
            layout = model.decide(pyramid, images)
        with watch("pack"):
            pack(pyramid, layout, model.positions.patches(pyramid.grid), model.positions.prefix())
        with watch("encode"):
            features = model.encode(pyramid, layout)
        with watch("head"):
            learner.task.output(model, features)
    seconds = {name: statistics.median(values[warmup:]) for name, values in watch.taken.items()}
    seconds["blocks"] = max(0.0, seconds.pop("encode") - seconds["pack"])
    return {name: seconds[name] for name in STAGES}


@torch.no_grad()
def parts(
    learners: Mapping[str, Learner], shown: tuple[Float[Tensor, "b ch H W"], Bool[Tensor, "b r c"] | None], *,
    repeats: int, warmup: int, clock: Clock,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Where the time of a whole answer goes, if the task has work beyond its output; else nothing.

    All methods take their turn on the same images, round after round.

    Returns:
        For each method the mean `patch_tokens` of an image, median seconds of a batch in the backbone (`vision_s`), the
        task's output and what is beyond it (NAME_s), `samples_per_s` of all together, and where `dense` is among the
        methods the output's speed-up over its own (median of the rounds' ratios) beside what the FLOPs promise
        (NAME_speedup, NAME_ideal).
    """
    images, valid = shown
    watches = {name: _Watch(images.device, clock) for name in learners}
    counts: dict[str, Tensor] = {}
    output = next(iter(learners.values())).task.output_name
    for _ in range(warmup + repeats):
        for name, learner in learners.items():
            watch = watches[name]
            with watch("vision"):
                features = learner.model.forward_features(images, valid=valid)
            with watch(output):
                learner.task.output(learner.model, features)
            beyond = learner.task.beyond(learner.model, features)
            if not beyond:
                return {}
            for part, work in beyond.items():
                with watch(part):
                    work()
            counts[name] = features.layout.counts.cpu()
    taken = {name: {part: s[warmup:] for part, s in watch.taken.items()} for name, watch in watches.items()}
    result = {}
    for name, own in taken.items():
        seconds = {part: statistics.median(values) for part, values in own.items()}
        row = {"patch_tokens": float(counts[name].double().mean()), **{f"{k}_s": s for k, s in seconds.items()}}
        row["samples_per_s"] = len(images) / sum(seconds.values())
        if "dense" in taken:
            ratios = [dense / mine for dense, mine in zip(taken["dense"][output], own[output], strict=True)]
            flops = [float(learners[name].task.flops(counts[who].double().numpy()).mean()) for who in ("dense", name)]
            row |= {f"{output}_speedup": statistics.median(ratios), f"{output}_ideal": flops[0] / flops[1]}
        result[name] = row
    return result


class _Watch:
    """Collects the seconds that named pieces of work take."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self.clock = device, clock
        self.taken: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        _wait(self.device)
        began = self.clock()
        yield
        _wait(self.device)
        self.taken.setdefault(name, []).append(self.clock() - began)


def _rates(batch: int, seconds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    return batch / statistics.median(seconds), (batch / max(seconds), batch / min(seconds))


def _median(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    return statistics.median(values), (min(values), max(values))


def _seconds(run: Run, repeat: int, device: torch.device, clock: Clock) -> float:
    _wait(device)
    began = clock()
    run(repeat)
    _wait(device)
    return clock() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
