"""A whole run of seconds: a classifier of digits with one block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from split_core import resolve
from split_core.config import RunConfig

SETTINGS: dict[str, Any] = {
    "task": "cls",
    "data": {"name": "digits", "val": 32},
    "model": {"name": "digits_vit", "weights": "none", "dim": 16, "depth": 1, "heads": 2},
    "policy": "xattn",
    "budget": 0.5,
    "adapt": {"images": 64, "batch_size": 16, "dense_fraction": 0.25, "backbone_lr": 1e-3},
    "estimator": {
        "name": "ppo",
        "images": 80,
        "batch_size": 16,
        "lr": 1e-3,
        "dual": {"init": None, "price_batches": 2},
    },
    "eval": {"images": 20, "batch_size": 8, "random_draws": 2, "methods": ["dense", "random", "cosine", "oracle"]},
    "bench": {"batch_sizes": [4], "repeats": 1, "warmup": 0},
    "draw": {"count": 1},
    "checkpoint": {"every_steps": 2},
    "device": "cpu",
    "threads": 1,
    "log_every": 1,
}


def configure(run_dir: Path, **changes: Any) -> RunConfig:
    return resolve.load(resolve.merge(SETTINGS, {"run_dir": str(run_dir), **changes}))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
