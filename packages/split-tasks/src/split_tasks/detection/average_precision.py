"""Average precision as COCO counts it, on the sizes and identities that the annotations have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_iou

from split_core.engine.ranks import Ranks
from split_core.errors import SplitError
from split_core.task import Target
from split_tasks.detection import rle
from split_tasks.detection.softnms import Detections

Array = NDArray[Any]
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
"""In COCO's order: mean over overlaps .5 to .95, at .5, at .75, and by the objects' area (to 32^2, to 96^2, above)."""


@dataclass(frozen=True)
class Annotations:
    """The truth about one image in the words of its file.

    Args:
        image_id: in the file; None where there is no file, and images are numbered as they come.
        size: height and width in px.
        boxes: (n, 4) left, top, width, height in px.
        categories: (n,) identities of their classes.
        areas: (n,) of the objects, which may be less than their boxes'.
        crowd: (n,) boxes around many objects: they cost nobody anything.
        scale: px of the canvas for each px of the image, down and across.
        masks: run lengths of the objects, where they are known.
    """

    image_id: int | None
    size: tuple[int, int]
    boxes: Array
    categories: Array
    areas: Array
    crowd: Array
    scale: tuple[float, float] = (1.0, 1.0)
    masks: Sequence[rle.Code] | None = None


@dataclass(frozen=True)
class Found:
    """What was found in one image, best first, in px of its file.

    Args:
        boxes: (n, 4) left, top, width, height.
        scores, labels: (n,).
        masks: run lengths of the first of them.
    """

    boxes: Array
    scores: Array
    labels: Array
    masks: Sequence[rle.Code] = ()


class AveragePrecision:
    """Collects detections and truth, image by image, over the processes of a run (`split_core.task.Metric`).

    Rank 0 alone counts; all get the numbers.

    Args:
        classes: names.
        category_ids: identity of each class in the results.
        masks: count masks beside boxes: their numbers' names begin with "mask_".

    Raises:
        SplitError: faster-coco-eval is not installed.
    """

    def __init__(self, classes: Sequence[str], category_ids: Sequence[int], *, masks: bool = False) -> None:
        _library()
        self.classes, self.category_ids = tuple(classes), np.array(category_ids, dtype=np.int64)
        self.masks = masks
        self._images: list[tuple[Annotations, Found]] = []
        self._results: list[dict[str, Any]] = []
        self._device = torch.device("cpu")

    def update(self, output: Any, target: Target) -> None:
        """Note a batch."""
        found: list[Detections] = output.detections
        for one, truth in zip(found, truth_of(target, output.sizes, self.category_ids), strict=True):
            self._device = one.boxes.device
            scale = one.boxes.new_tensor(truth.scale[::-1], dtype=torch.float64).repeat(2)
            own = one.boxes.double() / scale
            masks = [] if one.masks is None else rle.encode(rle.paste(one.masks, own[: len(one.masks)], truth.size))
            boxes = own.cpu().numpy().clip(0, np.tile(truth.size[::-1], 2))
            boxes[:, 2:] -= boxes[:, :2]
            scores, labels = one.scores.double().cpu().numpy(), one.labels.cpu().numpy()
            self._images.append((truth, Found(boxes, scores, labels, masks)))

    def compute(self) -> dict[str, Any]:
        """The numbers of `NAMES` that there are, and {"per_class": {name: ap}}; not-a-number for an absent class."""
        ranks = Ranks.present(self._device)
        images = [image for share in ranks.gather(self._images) for image in share]
        return ranks.same(lambda: self._count(images))

    def _count(self, images: Sequence[tuple[Annotations, Found]]) -> dict[str, Any]:
        truth, self._results = _as_coco(images, self.classes, self.category_ids)
        boxes = _evaluated(truth, [{k: v for k, v in r.items() if k != "segmentation"} for r in self._results], "bbox")
        numbers = _numbers(boxes)
        if self.masks:  # without boxes: objects are small or large by their masks
            masks = [{k: v for k, v in r.items() if k != "bbox"} for r in self._results if "segmentation" in r]
            numbers |= {f"mask_{name}": value for name, value in _numbers(_evaluated(truth, masks, "segm")).items()}
        precision = boxes.eval["precision"][:, :, :, 0, -1]  # overlaps, recalls, classes; any area, most detections
        by_class = {
            name: _number(one[one > -1].mean() if (one > -1).any() else -1.0)
            for name, one in zip(self.classes, np.moveaxis(precision, 2, 0)[np.argsort(np.argsort(self.category_ids))],
                                 strict=True)
        }  # fmt: skip
        return numbers | {"per_class": by_class}

    def files(self) -> dict[str, str]:
        """After `compute`, on rank 0: all detections in COCO's result format."""
        rounded = [
            result | {"bbox": [round(v, 2) for v in result["bbox"]], "score": round(result["score"], 5)}
            for result in self._results
        ]
        return {"detections.json": json.dumps(rounded)}


def _evaluated(truth: dict[str, Any], results: list[dict[str, Any]], kind: str) -> Any:
    """COCO's evaluation of boxes or masks."""
    coco, evaluator = _library()
    annotated = coco(truth)
    evaluation = evaluator(annotated, annotated.loadRes(results), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation


def _numbers(evaluation: Any) -> dict[str, float]:
    return {
        name: _number(value)
        for name, value in zip(NAMES, evaluation.stats[: len(NAMES)], strict=True)
        if value >= 0 or name == "ap"  # a data set may have no object of some size
    }


def truth_of(target: Target, sizes: Tensor, category_ids: Array) -> list[Annotations]:
    """The annotations of a batch: those of a file where the data have one, else its boxes as they are."""
    if "annotations" in target:
        return list(target["annotations"])
    pixels = target.get("masks", [None] * len(target["boxes"]))
    result = []
    for boxes, labels, size, masks in zip(target["boxes"], target["labels"], sizes.tolist(), pixels, strict=True):
        own = boxes.double().cpu().numpy()
        sides = own[:, 2:] - own[:, :2]
        area, codes = sides.prod(1), None
        if masks is not None:
            area = masks.flatten(1).sum(1).cpu().numpy().astype(float)
            codes = rle.encode(F.pad(masks, (0, size[1] - masks.shape[2], 0, size[0] - masks.shape[1])))
        result.append(
            Annotations(
                None, (size[0], size[1]), np.concatenate([own[:, :2], sides], 1), category_ids[labels.cpu().numpy()],
                area, np.zeros(len(own), dtype=bool), masks=codes,
            )
        )  # fmt: skip
    return result


def _as_coco(
    images: Sequence[tuple[Annotations, Found]], classes: Sequence[str], category_ids: Array
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Annotations file and results, in COCO's layout."""
    described: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, (truth, found) in enumerate(images, start=1):
        identity = number if truth.image_id is None else truth.image_id
        described.append({"id": identity, "height": truth.size[0], "width": truth.size[1]})
        masks = [{}] * len(truth.boxes) if truth.masks is None else [{"segmentation": code} for code in truth.masks]
        for box, category, area, crowd, mask in zip(
            truth.boxes, truth.categories, truth.areas, truth.crowd, masks, strict=True
        ):
            annotations.append(
                {
                    "id": len(annotations) + 1, "image_id": identity, "category_id": int(category),
                    "bbox": [float(v) for v in box], "area": float(area), "iscrowd": int(crowd), **mask,
                }
            )  # fmt: skip
        masks = [{"segmentation": code} for code in found.masks]
        rows = zip(found.boxes.tolist(), found.scores.tolist(), found.labels, strict=True)
        for (box, score, label), mask in zip_longest(rows, masks, fillvalue={}):
            category = int(category_ids[label])
            results.append({"image_id": identity, "category_id": category, "bbox": box, "score": score, **mask})
    categories = [{"id": int(i), "name": name} for i, name in zip(category_ids, classes, strict=True)]
    return {"images": described, "annotations": annotations, "categories": categories}, results


def image_precision(found: Detections, boxes: Tensor, labels: Tensor, *, overlap: float = 0.5) -> float:
    """Average precision within one image at one overlap, all classes in one ranking; 1 without objects.

    To pair methods by: it is defined for single images, which average precision over a data set is not.
    """
    if not len(boxes):
        return 1.0
    ious = box_iou(found.boxes[:100], boxes).masked_fill(found.labels[:100, None] != labels, 0).cpu().numpy()
    hits = np.zeros(len(ious))
    for rank, row in enumerate(ious):
        best = int(row.argmax())
        if row[best] >= overlap:
            hits[rank], ious[:, best] = 1, 0
    precision = hits.cumsum() / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float((envelope * hits).sum() / len(boxes))


def _number(value: float) -> float:
    return float("nan") if value < 0 else float(value)


def _library() -> tuple[Any, Any]:
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ModuleNotFoundError as error:
        raise SplitError(f"task=det needs {error.name}: pip install 'split-tasks[det]'") from error
    return COCO, COCOeval_faster
