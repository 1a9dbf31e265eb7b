"""What one confusion matrix says: of a data set (mIoU, accuracy of all pixels, by class) and of single images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.functional.classification import multiclass_confusion_matrix

from split_core.task import Target
from split_tasks.objects import IGNORE

Readings = Callable[[Any, Target], Iterable[tuple[Tensor, Tensor]]]
"""(output, target) -> pairs of logits (n, k, H, W) and labels (n, H, W), every image once."""


class SegmentationMetric:
    """mIoU (over the classes that occur in truth or prediction), accuracy of all pixels, IoU by class, from one matrix
    that is summed over the processes of a run.

    Args:
        classes: names.
        readings: how the task reads its output at the labels' size.
    """

    def __init__(self, classes: Sequence[str], readings: Readings) -> None:
        self.classes, self.readings = tuple(classes), readings
        self.matrix = MulticlassConfusionMatrix(len(self.classes), ignore_index=IGNORE, validate_args=False)

    def update(self, output: Any, target: Target) -> None:
        """Count every labelled pixel of a batch."""
        for logits, labels in self.readings(output, target):
            self.matrix.to(logits.device).update(logits.argmax(1), labels.long())

    def compute(self) -> dict[str, Any]:
        """{"miou", "aacc", "per_class": {name: IoU, not-a-number for a class that does not occur}}."""
        matrix = self.matrix.compute().double()
        iou = class_iou(matrix[None])[0]
        accuracy = matrix.diag().sum() / matrix.sum()
        by_class = dict(zip(self.classes, iou.tolist(), strict=True))
        return {"miou": float(iou.nanmean()), "aacc": float(accuracy), "per_class": by_class}


def image_iou(
    predicted: Integer[Tensor, "n H W"], labels: Integer[Tensor, "n H W"], classes: int
) -> Float[Tensor, " n"]:
    """mIoU of each image over the classes that occur in it; 1 for an image without a labelled pixel."""
    matrices = [
        multiclass_confusion_matrix(guess, truth, classes, ignore_index=IGNORE, validate_args=False)
        for guess, truth in zip(predicted, labels.long(), strict=True)
    ]
    return class_iou(torch.stack(matrices).double()).nanmean(1).nan_to_num(1.0).float()


def class_iou(matrices: Float[Tensor, "n k k"]) -> Float[Tensor, "n k"]:
    """Intersection over union of each class, rows truth and columns prediction; not-a-number where it is absent."""
    both = matrices.diagonal(dim1=1, dim2=2)
    return both / (matrices.sum(1) + matrices.sum(2) - both)
