"""A detection task of three classes on a tiny ViT, truth for it, and a run of seconds."""

from __future__ import annotations

import torch

from split_core import wrap
from split_core.task import TaskContext
from split_tasks.detect import Detect
from split_tasks.detection.configs import DetectConfig
from tiny import Bright, jitter, tiny_vit
from tinyseg import Described

CLASSES = ("cat", "dog", "cow")
SMALL = {
    "scales": (2.0, 1.0, 0.5), "channels": 8, "candidates": (20, 20), "proposals": 12, "anchor_samples": 16,
    "box_samples": 8, "hidden": 16, "thresholds": (0.5, 0.6),
}  # fmt: skip
RUN = [
    "task=det", "task.channels=8", "task.hidden=16", "task.proposals=8", "task.candidates=[16,16]",
    "task.anchor_samples=16", "task.box_samples=8", "model=digits_vit", "model.weights=none", "model.dim=16",
    "model.depth=1", "model.heads=2", "policy=xattn", "adapt.images=16", "adapt.batch_size=8", "estimator.images=8",
    "estimator.batch_size=8", "estimator.dual.init=0", "bench.batch_sizes=[2]", "bench.repeats=1", "bench.warmup=0",
    "draw.count=2", "eval.random_draws=2", "threads=1", "device=cpu",
]  # fmt: skip
"""A run of seconds, as words of the command line."""


def context(**more):
    return TaskContext((), 32, 2, Described(box_classes=CLASSES, has_masks=True, **more))


def task(seed=0, **settings):
    torch.manual_seed(seed)
    return jitter(Detect(DetectConfig(**{**SMALL, **settings}), context()), seed, 0.05).eval()


def model():
    return wrap(tiny_vit(), Bright(), rule="threshold").eval()


def target(*images):
    """Boxes and labels: each image a list of (left, top, right, bottom, label)."""
    rows = [torch.tensor(image, dtype=torch.float32).reshape(-1, 5) for image in images]
    return {"boxes": [row[:, :4] for row in rows], "labels": [row[:, 4].long() for row in rows]}
