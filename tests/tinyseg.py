"""A segmentation task of three classes, and outputs and labels for it drawn from seeds."""

from __future__ import annotations

import torch

from split_core.quadtree import build_layout, uniform_splits
from split_core.task import TaskContext
from split_tasks.configs import SegmentConfig
from split_tasks.objects import IGNORE
from split_tasks.segment import Prediction, Segment

CLASSES = ("background", "cat", "dog")


class Described:
    """As much of a data set as a task reads."""

    classes = ()

    def __init__(self, **more):
        vars(self).update(more)

    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError

    def collate(self, samples):
        return {}


def context(classes=CLASSES, dim=32, depth=2):
    return TaskContext((), dim, depth, Described(segment_classes=classes))


def task(**settings):
    return Segment(SegmentConfig(**settings), context()).eval()


def labels(batch, height, width, seed, ignored=0.2):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, len(CLASSES), (batch, height, width), generator=generator).to(torch.uint8)
    found[torch.rand(found.shape, generator=generator) < ignored] = IGNORE
    return found


def prediction(batch, grid, patch, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, cols = grid.cells
    logits = torch.randn(batch, len(CLASSES), rows * patch[0], cols * patch[1], generator=generator)
    layout = build_layout(uniform_splits(grid, batch, split=False))
    return Prediction(logits, None, (rows * patch[0], cols * patch[1]), layout.owner >= 0, patch)
