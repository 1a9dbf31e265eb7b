"""A task says what features become and what an output costs, image by image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from split_core.packing import area_mean
from split_core.task import Target, Task, TaskContext
from split_example.configs import QuadrantConfig

if TYPE_CHECKING:
    from split_core.features import Features
    from split_core.model import SplitViT
    from split_core.reducer import Reducer


class Quadrant(Task):
    """Classification with a head of its own over the area-weighted mean of the patch tokens."""

    metric_name = "accuracy"

    def __init__(self, config: QuadrantConfig, context: TaskContext) -> None:
        super().__init__()
        self.head = nn.Linear(context.dim, len(context.classes))

    def output(self, model: SplitViT | Reducer, features: Features, target: Target | None = None) -> Tensor:
        return self.head(area_mean(features.patches, features.layout))

    def error(self, output: Tensor, target: Target) -> Tensor:
        return F.cross_entropy(output, target["label"], reduction="none")

    def score(self, output: Tensor, target: Target) -> Tensor:
        return (output.argmax(1) == target["label"]).float()
