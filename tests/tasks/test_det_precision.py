"""Average precision: by hand on small cases, and beside a plain implementation of COCO's rules on random ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from split_tasks.detection.average_precision import Annotations, AveragePrecision
from split_tasks.detection.softnms import Detections

THRESHOLDS = np.linspace(0.5, 0.95, 10)


@dataclass
class Output:
    """As much of a task's output as the metric reads."""

    detections: list[Detections]
    sizes: torch.Tensor


def detections(*rows: tuple[float, float, float, float, float, int]) -> Detections:
    """(left, top, right, bottom, score, label) of one image."""
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4], table[:, 5].long())


def truth(image_id: int, *rows: tuple[float, ...], size: tuple[int, int] = (200, 200), **more: Any) -> Annotations:
    """(left, top, width, height, category, crowd) of one image."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 6)
    return Annotations(
        image_id, size, table[:, :4], table[:, 4].astype(int), table[:, 2] * table[:, 3], table[:, 5] > 0, **more
    )


def numbers(found: list[Detections], true: list[Annotations], ids: tuple[int, ...] = (1, 90)) -> dict[str, Any]:
    metric = AveragePrecision([f"class {i}" for i in ids], ids)
    for one, own in zip(found, true, strict=True):
        metric.update(Output([one], torch.tensor([own.size])), {"annotations": [own]})
    return metric.compute()


def test_one_box_that_overlaps_by_little_more_than_six_tenths() -> None:
    found = numbers([detections((0, 0, 100, 62, 0.9, 0))], [truth(7, (0, 0, 100, 100, 1, 0))])
    assert found["ap"] == pytest.approx(0.3), "right at .5, .55 and .6 of ten overlaps"
    assert found["ap50"] == 1.0
    assert found["ap75"] == 0.0
    assert found["ap_large"] == pytest.approx(0.3)
    assert "ap_small" not in found, "there is none"
    assert found["per_class"]["class 1"] == pytest.approx(0.3)
    assert np.isnan(found["per_class"]["class 90"])


def test_crowds_cost_nobody_anything() -> None:
    plain = numbers(
        [detections((0, 0, 50, 50, 0.5, 0), (100, 100, 150, 150, 0.9, 0))], [truth(1, (0, 0, 50, 50, 1, 0))]
    )
    crowded = numbers(
        [detections((0, 0, 50, 50, 0.5, 0), (100, 100, 150, 150, 0.9, 0))],
        [truth(1, (0, 0, 50, 50, 1, 0), (90, 90, 100, 100, 1, 1))],
    )
    assert plain["ap"] == pytest.approx(0.5)
    assert crowded["ap"] == 1.0


def test_images_without_objects_count_their_false_boxes() -> None:
    one = [detections((0, 0, 50, 50, 0.5, 1)), detections((0, 0, 9, 9, 0.9, 1))]
    assert numbers(one, [truth(1, (0, 0, 50, 50, 90, 0)), truth(2)])["ap"] == pytest.approx(0.5)
    assert numbers([detections()], [truth(1, (0, 0, 50, 50, 90, 0))])["ap"] == 0.0
    assert np.isnan(numbers([detections()], [truth(1)])["ap"])


def test_boxes_come_back_on_the_sizes_and_identities_of_the_file() -> None:
    metric = AveragePrecision(("cat", "dog"), (1, 90))
    own = truth(139, (10, 20, 30, 40, 90, 0), size=(100, 80), scale=(2.0, 4.0))
    metric.update(
        Output([detections((40, 40, 160, 120, 0.8, 1), (300, 190, 400, 300, 0.3, 0))], torch.tensor([[200, 320]])),
        {"annotations": [own]},
    )
    assert metric.compute()["ap"] == 1.0
    first, second = json.loads(metric.files()["detections.json"])
    assert first == {"image_id": 139, "category_id": 90, "bbox": [10.0, 20.0, 30.0, 40.0], "score": 0.8}
    assert second["bbox"] == [75.0, 95.0, 5.0, 5.0], "cut at the border of the image"
    assert second["category_id"] == 1


def test_data_without_a_file_are_counted_by_their_boxes() -> None:
    metric = AveragePrecision(("cat", "dog"), (1, 2))
    target = {
        "boxes": [torch.tensor([[0.0, 0, 20, 20]]), torch.zeros(0, 4)],
        "labels": [torch.tensor([1]), torch.tensor([])],
    }
    target["labels"][1] = target["labels"][1].long()
    metric.update(Output([detections((0, 0, 20, 20, 0.9, 1)), detections()], torch.full((2, 2), 64)), target)
    found = metric.compute()
    assert found["ap"] == found["ap_small"] == found["per_class"]["dog"] == 1.0
    assert json.loads(metric.files()["detections.json"])[0]["image_id"] == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_cases_are_the_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, found, true = (1, 90), [], []
    for image in range(6):
        objects = int(rng.integers(0, 5))
        corner = rng.uniform(0, 80, (objects, 2))
        sides = rng.uniform(10, 120, (objects, 2))
        kinds = rng.choice(ids, objects)
        crowd = rng.random(objects) < 0.2
        true.append(truth(image + 1, *np.column_stack([corner, sides, kinds, crowd]).tolist()))
        rows = [
            (*(box + rng.normal(0, 4, 4)), float(rng.random()), ids.index(kind) if rng.random() < 0.8 else 0)
            for box, kind in zip(np.column_stack([corner, corner + sides]), kinds, strict=True)
            for _ in range(int(rng.integers(0, 3)))
        ]
        rows += [(5.0, 5.0, 40.0, 50.0, float(rng.random()), int(rng.integers(0, 2)))]
        found.append(detections(*[(max(0, a), max(0, b), min(200, c), min(200, d), s, k) for a, b, c, d, s, k in rows]))
    got = numbers(found, true)
    expected = [loop(found, true, label, category) for label, category in enumerate(ids)]
    present = [e for e in expected if e is not None]
    assert got["ap"] == pytest.approx(np.mean([np.mean(e) for e in present]), abs=1e-6)
    assert got["ap50"] == pytest.approx(np.mean([e[0] for e in present]), abs=1e-6)
    assert got["ap75"] == pytest.approx(np.mean([e[5] for e in present]), abs=1e-6)


def loop(found: list[Detections], true: list[Annotations], label: int, category: int) -> list[float] | None:
    """Average precision of one class at each overlap, as COCO's paper code defines it."""
    count = sum(int(((t.categories == category) & ~t.crowd).sum()) for t in true)
    if not count:
        return None
    result = []
    for threshold in THRESHOLDS:
        marks = []  # score, right or wrong
        for one, own in zip(found, true, strict=True):
            mine = [(b, bool(c)) for b, k, c in zip(own.boxes, own.categories, own.crowd, strict=True) if k == category]
            mine.sort(key=lambda m: m[1])  # crowds last
            taken: set[int] = set()
            ranked = sorted(
                (i for i in range(len(one.scores)) if int(one.labels[i]) == label), key=lambda i: -float(one.scores[i])
            )  # fmt: skip
            for i in ranked:
                best, at = min(threshold, 1 - 1e-10), None
                for j, (box, crowd) in enumerate(mine):
                    if j in taken and not crowd:
                        continue
                    if at is not None and not mine[at][1] and crowd:
                        break
                    over = iou(one.boxes[i].double().numpy(), box, crowd)
                    if over >= best:
                        best, at = over, j
                if at is None:
                    marks.append((float(one.scores[i]), False))
                elif not mine[at][1]:
                    taken.add(at)
                    marks.append((float(one.scores[i]), True))
        marks.sort(key=lambda m: -m[0])
        right = np.cumsum([m[1] for m in marks])
        precision = right / np.arange(1, len(marks) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        points = np.searchsorted(right / count, np.linspace(0, 1, 101), side="left")
        result.append(float(np.mean([precision[p] if p < len(marks) else 0.0 for p in points])))
    return result


def iou(box: np.ndarray, true: np.ndarray, crowd: bool) -> float:
    left, top = max(box[0], true[0]), max(box[1], true[1])
    right, bottom = min(box[2], true[0] + true[2]), min(box[3], true[1] + true[3])
    both = max(0.0, right - left) * max(0.0, bottom - top)
    own = (box[2] - box[0]) * (box[3] - box[1])
    return both / (own if crowd else own + true[2] * true[3] - both)
