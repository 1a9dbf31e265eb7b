"""Task `seg`: semantic segmentation (Sec. 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Integer
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.features import Features
from split_core.task import Target, Task, TaskContext
from split_core.types import Grid
from split_tasks.configs import SegmentConfig
from split_tasks.heads.linear import LinearHead
from split_tasks.heads.upernet import UperNet, default_taps
from split_tasks.metrics import SegmentationMetric, image_iou
from split_tasks.models.weights import load_strict, read_weights
from split_tasks.objects import IGNORE, boundary_cells, majority_labels
from split_tasks.paint import overlay
from split_tasks.windows import Windows, merged, resized, sums

if TYPE_CHECKING:
    from split_core.model import SplitViT
    from split_core.reducer import Reducer

CHUNK = 1 << 27
"""Logits that are held at the labels' size at a time: half a GiB."""
BACKGROUND = "background"


@dataclass(frozen=True)
class Prediction:
    """Logits over the canvas.

    Args:
        logits: (n, k, h, w), at whatever resolution the head has.
        auxiliary: the same of the auxiliary head, in training.
        canvas: height and width in pixels that they cover: the images', padded to whole patches.
        valid: (n, r, c) fine cells of the padded grid that hold picture.
        patch_size: of fine patches.
    """

    logits: Float[Tensor, "n k h w"]
    auxiliary: Float[Tensor, "n k _ _"] | None
    canvas: tuple[int, int]
    valid: Bool[Tensor, "n r c"]
    patch_size: tuple[int, int]


class Segment(Task):
    """Every pixel gets a class; the error of an image is the mean cross-entropy over its labelled pixels.

    Targets: "segments", label maps (b, H, W) with IGNORE where nothing counts. Or, for images read in windows: a list
    of b maps of the images' own sizes, with "windows" (`split_tasks.windows.Windows`) and "crops" (n, H, W), the labels
    in each window at the model's resolution.

    Args:
        config: head, losses, what counts as an object.
        context: its data has `segment_classes`, the names of the values of "segments".

    Raises:
        SplitError: the data has no label maps, or a tap or class is not there.
    """

    metric_name = "image_miou"
    model_head = False
    maps_error = True

    def __init__(self, config: SegmentConfig, context: TaskContext) -> None:
        super().__init__()
        self.config = config
        self.classes = tuple(getattr(context.data, "segment_classes", ()))
        if not self.classes:
            raise SplitError("task=seg needs label maps, and this data set has none; composites and segfolder do")
        self.stuff = _stuff(config, self.classes)
        wanted = config.taps or (default_taps(context.depth) if config.head == "upernet" else (context.depth - 1,))
        if max(wanted) >= context.depth:
            raise SplitError(f"task.taps: there is no block {max(wanted)}, the last one is {context.depth - 1}")
        self.taps = tuple(sorted(set(wanted)))
        self.head: LinearHead | UperNet
        if config.head == "linear":
            self.head = LinearHead(
                context.dim, taps=len(self.taps), classes=len(self.classes), detail=config.detail,
                dropout=config.dropout,
            )  # fmt: skip
        else:
            self.head = UperNet(
                context.dim, taps=[self.taps.index(tap) for tap in wanted], classes=len(self.classes),
                channels=config.channels, auxiliary_channels=config.auxiliary_channels, dropout=config.dropout,
            )  # fmt: skip
        if config.weights is not None:
            path = config.weights.expanduser()
            load_strict(self.head, read_weights(path), source=str(path), head=None)

    def output(self, model: SplitViT | Reducer, features: Features, target: Target | None = None) -> Prediction:
        """Logits over the canvas of every row; they depend on no target."""
        result = self.head(features)
        logits, auxiliary = result if isinstance(result, tuple) else (result, None)
        patch, cells = model.embed.patch_size, features.layout.grid.cells
        canvas = (cells[0] * patch[0], cells[1] * patch[1])
        return Prediction(logits, auxiliary, canvas, features.layout.owner >= 0, patch)

    def error(self, output: Prediction, target: Target) -> Float[Tensor, " b"]:
        """Mean cross-entropy over the labelled pixels of each image, 0 where none is; float32 whatever the autocast."""
        parts = [_mean(*pixel_error(*reading)) for reading in self.readings(output, target)]
        return torch.cat(parts) if parts else output.logits.new_zeros(0)

    def error_map(self, output: Prediction, target: Target) -> Float[Tensor, "b r c"]:
        """Each fine cell's share of its image's error: an image's mean over its valid cells is `error`.

        Not for images read in windows.
        """
        assert "windows" not in target
        height, width = (n * p for n, p in zip(output.valid.shape[1:], output.patch_size, strict=True))
        parts = []
        for logits, labels in self.readings(output, target):
            error, counts = pixel_error(logits, labels)
            share = error / counts.flatten(1).sum(1).clamp_min(1)[:, None, None]
            padded = F.pad(share, (0, width - share.shape[2], 0, height - share.shape[1]))
            parts.append(F.avg_pool2d(padded[:, None], output.patch_size)[:, 0])
        sum_of = output.patch_size[0] * output.patch_size[1]
        cells = output.valid.flatten(1).sum(1)[:, None, None]
        return torch.cat(parts) * sum_of * cells

    def distance(self, output: Prediction, reference: Prediction) -> Float[Tensor, " n"]:
        """KL divergence from the reference's class probabilities, mean over the canvas at the head's resolution."""
        wanted, got = (each.logits.float().log_softmax(1) for each in (reference, output))
        return F.kl_div(got, wanted, reduction="none", log_target=True).sum(1).mean((1, 2))

    def loss(self, output: Prediction, target: Target, features: Features) -> Float[Tensor, ""]:
        """Mean error, plus the auxiliary head's."""
        loss = self.error(output, target).mean()
        if output.auxiliary is None or not self.config.auxiliary_weight:
            return loss
        return loss + self.config.auxiliary_weight * self._error_of(output.auxiliary, output, target).mean()

    def score(self, output: Prediction, target: Target) -> Float[Tensor, " b"]:
        """mIoU of each image over the classes that occur in its truth or prediction: to pair methods by."""
        return torch.cat([
            image_iou(logits.argmax(1), labels, len(self.classes)) for logits, labels in self.readings(output, target)
        ])  # fmt: skip

    def metric(self) -> SegmentationMetric:
        """mIoU, pixel accuracy and IoU by class, from one matrix over the data set."""
        return SegmentationMetric(self.classes, self.readings)

    def per_image(self, values: Float[Tensor, " n"], target: Target) -> Float[Tensor, " b"]:
        """Sums over an image's windows."""
        return sums(values, target["windows"]) if "windows" in target else values

    def objects(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"] | None:
        """Fine cells whose majority label is an object's (App. F); None where all classes are stuff or none is."""
        if not self.stuff:
            return None
        label = self._majority(target, grid, patch_size)
        table = torch.ones(IGNORE + 1, dtype=torch.bool, device=label.device)
        table[[*self.stuff, IGNORE]] = False
        return table[label]

    def boundaries(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"]:
        """Fine cells whose majority label differs from a neighbour's (App. F)."""
        return boundary_cells(self._majority(target, grid, patch_size))

    def paint(
        self, pictures: Sequence[Image.Image], size: tuple[int, int], *, output: Prediction | None = None,
        target: Target | None = None,
    ) -> list[Image.Image] | None:  # fmt: skip
        """Classes as colours over the pictures; the class called background stays clear."""
        if output is not None:
            maps = resized(output.logits, output.canvas).argmax(1)
        elif target is not None:
            maps = _labels(target)
        else:
            return None
        clear = {IGNORE, *(index for index, name in enumerate(self.classes) if name == BACKGROUND)}
        maps = maps[:, : size[0], : size[1]]
        return [overlay(p, m.cpu().numpy(), clear=clear) for p, m in zip(pictures, maps, strict=True)]

    def readings(self, output: Prediction, target: Target) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of logits (m, k, H, W) and labels (m, H, W) at the labels' own size, every image once, in order.

        They come in chunks because logits at that size are the largest thing in a run.
        """
        return self._readings(output.logits, output, target)

    def _readings(self, logits: Tensor, output: Prediction, target: Target) -> Iterator[tuple[Tensor, Tensor]]:
        segments = target["segments"]
        if "windows" in target:
            windows: Windows = target["windows"]
            size = tuple(target["crops"].shape[-2:])
            whole = resized(logits, output.canvas)[..., : size[0], : size[1]]
            for joined, labels in zip(merged(whole, windows), segments, strict=True):
                yield resized(joined, tuple(labels.shape)), labels[None]
            return
        height, width = segments.shape[-2:]
        step = max(1, CHUNK // (logits.shape[1] * output.canvas[0] * output.canvas[1]))
        for some, labels in zip(logits.split(step), segments.split(step), strict=True):
            yield resized(some, output.canvas)[..., :height, :width], labels

    def _error_of(self, logits: Tensor, output: Prediction, target: Target) -> Float[Tensor, " b"]:
        return torch.cat([_mean(*pixel_error(*reading)) for reading in self._readings(logits, output, target)])

    def _majority(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Integer[Tensor, "b r c"]:
        return majority_labels(_labels(target), grid, patch_size, len(self.classes))


def pixel_error(
    logits: Float[Tensor, "m k H W"], labels: Integer[Tensor, "m H W"]
) -> tuple[Float[Tensor, "m H W"], Bool[Tensor, "m H W"]]:
    """Cross-entropy of each pixel, zero where its label is IGNORE, and where it counts."""
    return F.cross_entropy(logits, labels.long(), ignore_index=IGNORE, reduction="none"), labels != IGNORE


def _mean(error: Float[Tensor, "m H W"], counts: Bool[Tensor, "m H W"]) -> Float[Tensor, " m"]:
    return error.flatten(1).sum(1) / counts.flatten(1).sum(1).clamp_min(1)


def _labels(target: Target) -> Integer[Tensor, "n H W"]:
    """Labels row by row, at the model's resolution."""
    labels: Tensor = target["crops"] if "windows" in target else target["segments"]
    return labels


def _stuff(config: SegmentConfig, classes: tuple[str, ...]) -> tuple[int, ...]:
    if config.stuff is None:
        return tuple(index for index, name in enumerate(classes) if name == BACKGROUND)
    wrong = [index for index in config.stuff if index >= len(classes)]
    if wrong:
        raise SplitError(f"task.stuff: there is no class {wrong[0]}; the last one is {len(classes) - 1}")
    return config.stuff
