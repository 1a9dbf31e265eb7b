"""``do=bench``: images per second of the whole pipeline, every method interleaved with the dense timm model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from split_core.engine.session import Learner


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats.

    Args:
        images_per_s: whole pipeline.
        speedup: against the dense timm model, repeat by repeat.
        speedup_spread: lowest and highest of those ratios.
    """

    images_per_s: float
    speedup: float
    speedup_spread: tuple[float, float]


@torch.no_grad()
def measure(learners: Mapping[str, Learner], images: Tensor, *, repeats: int, warmup: int) -> dict[str, Timing]:
    """Time each learner on one batch in turn with the dense timm model, `repeats` times after `warmup`."""
    dense = next(iter(learners.values())).model.vit
    runs: dict[str, Callable[[], object]] = {name: (lambda m=learner.model: m(images)) for name, learner in learners.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    reference: list[float] = []
    for round_ in range(warmup + repeats):
        base = _seconds(lambda: dense(images), images.device)
        if round_ >= warmup:
            reference.append(base)
        for name, run in runs.items():
            took = _seconds(run, images.device)
            if round_ >= warmup:
                seconds[name].append(took)
    result = {}
    for name, took in seconds.items():
        ratios = [b / t for b, t in zip(reference, took, strict=True)]
        rate = images.shape[0] / statistics.median(took)
        result[name] = Timing(rate, statistics.median(ratios), (min(ratios), max(ratios)))
    return result


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
