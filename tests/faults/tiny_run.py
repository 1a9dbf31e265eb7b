"""A whole training run of about a second, with a checkpoint after every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

import tinyrun
from split_core import resolve
from split_core.config import RunConfig
from tinyrun import metrics

SETTINGS: dict[str, Any] = resolve.merge(
    tinyrun.SETTINGS,
    {
        "adapt": {"images": 96},
        "warmstart": {"tau": 0.03},
        "estimator": {"images": 128, "normalize_advantage": True, "dual": {"init": 0.0}},
        "eval": {"methods": ["random"]},
        "checkpoint": {"every_steps": 1},
    },
)


def configure(run_dir: Path, **changes: Any) -> RunConfig:
    return resolve.load(resolve.merge(SETTINGS, {"run_dir": str(run_dir), **changes}))


def arguments(run_dir: Path, **changes: Any) -> list[str]:
    """The same run as a command line; its recipe is written beside run_dir."""
    recipe = run_dir.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(resolve.merge(SETTINGS, changes)))
    return [f"recipe={recipe}", f"run_dir={run_dir}"]


def differences(run_dir: Path, straight: Path) -> list[str]:
    """What of losses, weights and evaluation differs between two runs; empty when all is equal to the last bit."""
    found = [] if metrics(run_dir) == metrics(straight) else ["metrics.jsonl"]
    for weights in sorted((straight / "models").iterdir()):
        mine, theirs = load_file(run_dir / "models" / weights.name), load_file(weights)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[key], theirs[key]) for key in mine):
            found.append(weights.name)
    ours, other = (json.loads((folder / "results.json").read_text())["rows"] for folder in (run_dir, straight))
    same = ("method", "accuracy", "error", "token_fraction", "object_recall", "minus")
    if [[row[key] for key in same] for row in ours] != [[row[key] for key in same] for row in other]:
        found.append("results.json")
    return found
