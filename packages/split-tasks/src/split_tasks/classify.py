"""Task `cls`: image classification (Sec. 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from split_core.errors import SplitError
from split_core.task import Target, Task, TaskContext
from split_core.types import Cover, Grid
from split_tasks.configs import ClassifyConfig
from split_tasks.objects import object_cells, object_tokens

if TYPE_CHECKING:
    from split_core.features import Features
    from split_core.model import SplitViT
    from split_core.reducer import Reducer


class Classify(Task):
    """Classification by the backbone's own head; the error is the cross-entropy of each image.

    Args:
        config: smoothing, the auxiliary loss, what counts as an object.
        context: classes and the width of the tokens.
    """

    metric_name = "accuracy"

    def __init__(self, config: ClassifyConfig, context: TaskContext) -> None:
        super().__init__()
        self.config = config
        self.classes = len(context.classes)
        # One class more than the images have: what lies under no object.
        self.token_head = nn.Linear(context.dim, self.classes + 1) if config.token_loss > 0 else None

    def output(
        self, model: SplitViT | Reducer, features: Features, target: Target | None = None
    ) -> Float[Tensor, "b k"]:
        """Logits of the classes."""
        return model.forward_head(features)

    def error(self, output: Float[Tensor, "b k"], target: Target) -> Float[Tensor, " b"]:
        """Cross-entropy of each image, in float32 whatever the autocast."""
        return F.cross_entropy(output.float(), self._labels(output, target), reduction="none")

    def distance(self, output: Float[Tensor, "b k"], reference: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
        """KL divergence from the reference's class probabilities."""
        wanted, got = reference.float().log_softmax(-1), output.float().log_softmax(-1)
        return F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)

    def loss(self, output: Float[Tensor, "b k"], target: Target, features: Features) -> Float[Tensor, ""]:
        """Mean cross-entropy with label smoothing, plus the auxiliary loss on tokens.

        Raises:
            ValueError: token_loss is on and the data has no masks.
        """
        smoothing = self.config.label_smoothing
        loss = F.cross_entropy(output.float(), self._labels(output, target), label_smoothing=smoothing)
        if self.token_head is None:
            return loss
        if target.get("mask") is None:
            raise SplitError("task.token_loss needs masks, and this data set has none: set task.token_loss=0")
        logits = self.token_head(features.patches)
        wanted = self._token_labels(target, features.layout)
        return loss + self.config.token_loss * F.cross_entropy(logits.float(), wanted)

    def score(self, output: Float[Tensor, "b k"], target: Target) -> Float[Tensor, " b"]:
        """1 where the best class is the right one, else 0."""
        return (output.argmax(-1) == target["label"]).float()

    def objects(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"] | None:
        """Fine cells on the labelled object; None when the data has no masks."""
        mask = target.get("mask")
        return None if mask is None else object_cells(mask, grid, patch_size, self.config.object_share)

    def _labels(self, output: Tensor, target: Mapping[str, Any]) -> Int[Tensor, " b"]:
        if output.shape[-1] != self.classes:
            raise SplitError(f"the head has {output.shape[-1]} outputs and the data {self.classes} classes")
        if "label" not in target:
            raise SplitError(
                "task=cls needs images with one class each, and this data set has none (boxes or masks alone)"
            )
        labels: Tensor = target["label"]
        return labels

    def _token_labels(self, target: Target, layout: Cover) -> Int[Tensor, " t"]:
        """The image's class for tokens on its object, the class after the last for the others."""
        mask: Tensor = target["mask"]
        rows, cols = layout.grid.cells
        # ceil(H / p) cells cover H pixels: the patch is the smallest that does.
        patch = (-(-mask.shape[-2] // rows), -(-mask.shape[-1] // cols))
        cells = object_cells(mask, layout.grid, patch, self.config.object_share)
        on = object_tokens(cells, layout)
        return torch.where(on, target["label"][layout.image], self.classes)
