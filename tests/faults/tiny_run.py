"""A whole training run of about a second: digits, a one-block model, warm start, PPO and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from split_core import resolve
from split_core.config import RunConfig

SETTINGS: dict[str, Any] = {
    "task": "cls",
    "data": {"name": "digits", "val": 32},
    "model": {"name": "digits_vit", "weights": "none", "dim": 16, "depth": 1, "heads": 2},
    "policy": "xattn",
    "budget": 0.5,
    "adapt": {"images": 96, "batch_size": 16, "dense_fraction": 0.25, "backbone_lr": 1e-3},
    "warmstart": {"tau": 0.03},
    "estimator": {"name": "ppo", "images": 128, "batch_size": 16, "lr": 1e-3, "normalize_advantage": True},
    "eval": {"images": 20, "batch_size": 8, "random_draws": 2, "methods": ["random"]},
    "bench": {"batch_sizes": [4], "repeats": 1, "warmup": 0},
    "draw": {"count": 1},
    "checkpoint": {"every_steps": 1},
    "device": "cpu",
    "threads": 1,
    "log_every": 1,
}


def configure(run_dir: Path, **changes: Any) -> RunConfig:
    return resolve.load(resolve.merge(SETTINGS, {"run_dir": str(run_dir), **changes}))


def arguments(run_dir: Path, **changes: Any) -> list[str]:
    """The same run as a command line; its recipe is written beside run_dir."""
    recipe = run_dir.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(resolve.merge(SETTINGS, changes)))
    return [f"recipe={recipe}", f"run_dir={run_dir}"]


def losses(run_dir: Path) -> list[dict[str, Any]]:
    """Every logged step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def differences(run_dir: Path, straight: Path) -> list[str]:
    """What of losses, weights and evaluation differs between two runs; empty when all is equal to the last bit."""
    found = [] if losses(run_dir) == losses(straight) else ["metrics.jsonl"]
    for weights in sorted((straight / "models").iterdir()):
        mine, theirs = load_file(run_dir / "models" / weights.name), load_file(weights)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[key], theirs[key]) for key in mine):
            found.append(weights.name)
    ours, other = (json.loads((folder / "results.json").read_text())["rows"] for folder in (run_dir, straight))
    same = ("method", "accuracy", "error", "token_fraction", "object_recall", "minus")
    if [[row[key] for key in same] for row in ours] != [[row[key] for key in same] for row in other]:
        found.append("results.json")
    return found
