"""Task `det`: object detection (Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from split_core.errors import SplitError
from split_core.features import Features
from split_core.task import Target, Task, TaskContext
from split_core.types import Grid
from split_tasks.detection.average_precision import AveragePrecision, image_precision
from split_tasks.detection.cascade import Truth
from split_tasks.detection.configs import DetectConfig
from split_tasks.detection.detector import Detector, Reading
from split_tasks.detection.geometry import picture_sizes
from split_tasks.detection.rle import paste
from split_tasks.detection.softnms import Detections
from split_tasks.models.weights import load_strict, read_weights
from split_tasks.objects import object_cells
from split_tasks.paint import boxed, shaded

if TYPE_CHECKING:
    from split_core.model import SplitViT
    from split_core.reducer import Reducer

SHOWN = 0.3
"""Detections in pictures have at least this score."""


class Detect(Task):
    """Boxes with classes; the error of an image is that of its region proposals and of its box heads, summed.

    It is the loss that detectors train on, image by image, with the mean over the samples that training draws in place
    of one sample (`detection.matching`): nothing in it is random, and no other image has a part in it.

    Targets: "boxes", a list of b tensors (n, 4) in px of the canvas, and "labels", as many class indices; "mask"
    (b, H, W) where the data know the objects' pixels; "masks", a list of b (n, h, w), each object's own on the picture,
    with `masks`; "annotations", where they come from a file (`detection.average_precision.Annotations`).

    Args:
        config: neck, heads, suppression.
        context: its data has `box_classes`, and `category_ids` where its file numbers classes in its own way.

    Raises:
        SplitError: the data has no boxes, or no masks and they are wanted, or the patches are not square.
    """

    metric_name = "image_ap50"
    model_head = False
    maps_error = True

    def __init__(self, config: DetectConfig, context: TaskContext) -> None:
        super().__init__()
        self.config = config
        self.classes = tuple(getattr(context.data, "box_classes", ()))
        if not self.classes:
            raise SplitError("task=det needs boxes, and this data set has none; digits, composites and coco do")
        if config.masks and not getattr(context.data, "has_masks", False):
            raise SplitError("task.masks=true needs the objects' masks: data.masks=true, with composites or coco")
        self.category_ids = tuple(getattr(context.data, "category_ids", range(1, len(self.classes) + 1)))
        self.detector = Detector(config, dim=context.dim, classes=len(self.classes))
        if config.weights is not None:
            path = config.weights.expanduser()
            state = read_weights(path)
            if not config.masks:  # official checkpoints have them
                state = {key: value for key, value in state.items() if not key.startswith("masks.")}
            load_strict(self.detector, state, source=str(path), head=None)

    def output(self, model: SplitViT | Reducer, features: Features, target: Target | None = None) -> Reading:
        """Proposals of every image; its detections too where no truth is at hand that could be asked for an error.

        Raises:
            SplitError: patches are not square.
        """
        patch = model.embed.patch_size
        if patch[0] != patch[1]:
            raise SplitError(f"task=det: boxes are read from square patches; the model's are {patch[0]}x{patch[1]}")
        sizes = picture_sizes(features.layout, patch)
        reading: Reading = self.detector(features.dense(), grid=features.layout.grid, patch=patch[0], sizes=sizes)
        if target is None:
            _ = reading.detections  # the whole pipeline, as it is timed and deployed
        return reading

    def error(self, output: Reading, target: Target) -> Float[Tensor, " b"]:
        """Mean over samples of the detection loss of each image, in float32 whatever the autocast."""
        return output.error(_truth(target), target.get("masks"))

    def error_map(self, output: Reading, target: Target) -> Float[Tensor, "b r c"]:
        """The error of each anchor and each proposal, in the cell that it is centred on."""
        share, middle = output.shares(_truth(target), target.get("masks"))
        cells = (output.sizes // output.patch).flip(1)[:, None]
        at = (middle / output.patch).long().clamp_min(0).minimum(cells - 1)
        grid = output.grid
        flat = share.new_zeros(len(share), grid.size(0))
        flat = flat.scatter_add(1, at[..., 1] * grid.shape(0)[1] + at[..., 0], share)
        return flat.view(-1, *grid.shape(0)) * cells.prod(2, keepdim=True)

    def loss(self, output: Reading, target: Target, features: Features) -> Float[Tensor, ""]:
        """The same on a random sample of anchors and proposals, as detectors train; mean over the images."""
        return output.error(_truth(target), target.get("masks"), sample=True).mean()

    def score(self, output: Reading, target: Target) -> Float[Tensor, " b"]:
        """Average precision at overlap .5 within each image: to pair methods by."""
        truth = zip(output.detections, target["boxes"], target["labels"], strict=True)
        return torch.tensor([image_precision(*image) for image in truth], device=output.sizes.device)

    def metric(self) -> AveragePrecision:
        """COCO's average precisions, of boxes and, where there are any, of masks."""
        return AveragePrecision(self.classes, self.category_ids, masks=self.config.masks)

    def objects(self, target: Target, grid: Grid, patch_size: tuple[int, int]) -> Bool[Tensor, "b r c"]:
        """Fine cells on objects: on their pixels where the data know them, else in their boxes."""
        mask = target.get("mask")
        if mask is None:
            size = (grid.cells[0] * patch_size[0], grid.cells[1] * patch_size[1])
            mask = torch.stack([inside(boxes, size) for boxes in target["boxes"]])
        return object_cells(mask, grid, patch_size, self.config.object_share)

    def paint(
        self, pictures: Sequence[Image.Image], size: tuple[int, int], *, output: Reading | None = None,
        target: Target | None = None,
    ) -> list[Image.Image] | None:  # fmt: skip
        """Boxes with their classes, scores where they are guesses, and masks where there are any."""
        shown: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
        if output is not None:
            shown = [_drawn(one, size) for one in output.detections]
        elif target is not None:
            masks = target.get("masks", [None] * len(pictures))
            shown = [(*boxes, None, own) for boxes, own in zip(_truth(target), masks, strict=True)]
        else:
            return None
        return [
            boxed(
                picture if masks is None else shaded(picture, masks.cpu().numpy(), labels.tolist(), size=size),
                boxes.tolist(), labels.tolist(), [self.classes[label] for label in labels.tolist()],
                scores=None if scores is None else scores.tolist(), size=size,
            )
            for picture, (boxes, labels, scores, masks) in zip(pictures, shown, strict=True)
        ]  # fmt: skip


def _drawn(found: Detections, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Boxes, labels, scores and masks of the detections that are shown."""
    count = int((found.scores >= SHOWN).sum())  # best first
    masks = None if found.masks is None else paste(found.masks[:count], found.boxes[: len(found.masks)][:count], size)
    return found.boxes[:count], found.labels[:count], found.scores[:count], masks


def inside(boxes: Float[Tensor, "n 4"], size: tuple[int, int]) -> Bool[Tensor, "H W"]:
    """Pixels in any of the boxes; each box has at least the pixel of its top left."""
    mask = torch.zeros(size, dtype=torch.bool, device=boxes.device)
    for left, top, right, bottom in boxes.tolist():
        mask[int(top) : max(int(top) + 1, round(bottom)), int(left) : max(int(left) + 1, round(right))] = True
    return mask


def _truth(target: Target) -> Truth:
    return list(zip(target["boxes"], target["labels"], strict=True))
