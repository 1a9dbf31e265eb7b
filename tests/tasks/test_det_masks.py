"""Masks of objects: run lengths, pasting, the head's error by hand and beside a loop, average precision, whole runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision.ops import box_iou, roi_align
from torchvision.tv_tensors import Image as Pixels
from torchvision.tv_tensors import Mask

import run
from split_core.engine.ranks import Ranks
from split_core.errors import SplitError
from split_core.task import DataContext, TaskContext, repeat_target
from split_tasks.data.coco import Coco
from split_tasks.data.detaugment import Objects, ScaleJitter, marked
from split_tasks.detect import Detect
from split_tasks.detection import rle
from split_tasks.detection.average_precision import Annotations, AveragePrecision
from split_tasks.detection.cascade import pool
from split_tasks.detection.configs import CocoConfig, DetectConfig
from split_tasks.detection.masks import MaskHead, cropped
from split_tasks.detection.softnms import Detections
from tiny import images
from tinycoco import BOX, annotation, entry, write
from tinydet import RUN, model, target, task
from tinyseg import Described

TWO = [(2, 3, 20, 30, 0), (25, 20, 60, 55, 2)]


def filled(boxes: torch.Tensor, size: tuple[int, int] = (64, 64)) -> torch.Tensor:
    """Masks that fill their boxes."""
    result = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(result, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    return result


def masked(*rows: Any) -> dict[str, Any]:
    truth = target(*rows)
    return {**truth, "masks": [filled(boxes) for boxes in truth["boxes"]]}


def test_run_lengths_there_and_back() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(3, 7, 11, generator=generator) > 0.5
    masks[1] = False
    codes = rle.encode(masks)
    assert json.loads(json.dumps(codes)) == codes
    assert torch.equal(rle.decode(codes, (7, 11)), masks)
    assert rle.encode(masks[:0]) == []
    assert rle.decode([], (7, 11)).shape == (0, 7, 11)


def test_polygons_and_run_lengths_of_a_file_are_the_same_mask() -> None:
    wanted = torch.zeros(1, 10, 12, dtype=torch.bool)
    wanted[0, 2:6, 3:8] = True
    flat = wanted[0].T.flatten().tolist()  # column by column
    counts, last = [0], False
    for pixel in flat:
        counts[-1] += pixel == last
        if pixel != last:
            counts.append(1)
        last = pixel
    for segmentation in (
        [[3, 2, 8, 2, 8, 6, 3, 6]], [[3, 2, 5, 2, 5, 6, 3, 6], [5, 2, 8, 2, 8, 6, 5, 6]],
        {"size": [10, 12], "counts": counts}, rle.encode(wanted)[0],
    ):  # fmt: skip
        assert torch.equal(rle.decode([rle.from_annotation(segmentation, (10, 12))], (10, 12)), wanted)
    for wrong in ({"size": [9, 12], "counts": rle.encode(wanted)[0]["counts"]}, {"size": [10, 12]}, 7):
        with pytest.raises(ValueError, match=r"a segmentation is neither|for an image of"):
            rle.from_annotation(wrong, (10, 12))


def test_pasting_stretches_a_mask_over_its_box_and_no_further() -> None:
    full = torch.ones(3, 28, 28)
    boxes = torch.tensor([[4.0, 6, 20, 10], [-5, -5, 5, 5], [30, 30, 30, 40]])
    found = rle.paste(full, boxes, (32, 40))
    assert torch.equal(found, filled(boxes.clamp_min(0), (32, 40)))
    half = full[:1].clone()
    half[:, :, 14:] = 0
    assert torch.equal(rle.paste(half, boxes[:1], (32, 40)), filled(torch.tensor([[4.0, 6, 12, 10]]), (32, 40)))
    assert rle.paste(full[:0], boxes[:0], (3, 4)).shape == (0, 3, 4)


def test_the_head_s_shapes_and_its_own_class() -> None:
    torch.manual_seed(0)
    head = MaskHead(8, classes=3, convs=2, threshold=0.5)
    pooled = torch.randn(4, 8, 14, 14)
    labels = torch.tensor([0, 2, 1, 2])
    found = head(pooled, labels)
    assert found.shape == (4, 28, 28)
    every = head.predictor(head.convs(pooled))
    torch.testing.assert_close(found, torch.stack([every[i, k] for i, k in enumerate(labels.tolist())]))
    assert head(pooled[:0], labels[:0]).shape == (0, 28, 28)


def test_error_by_hand() -> None:
    """A head that says 2 everywhere, and a box half on its object: log(1 + e^-2), and 2 more on the other half."""
    head = MaskHead(4, classes=2, convs=0, threshold=0.5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.predictor.mask_fcn_logits.bias.copy_(torch.tensor([2.0, 50.0]))
    boxes = torch.tensor([[[8.0, 8, 36, 36], [0, 0, 4, 4]], [[0.0, 0, 9, 9], [0, 0, 4, 4]]])
    weight = torch.tensor([[0.3, 1.0], [1.0, 1.0]])
    half = torch.zeros(1, 40, 40, dtype=torch.bool)
    half[0, 8:36, 8:22] = True
    truth = [(boxes[0, :1], torch.tensor([0])), (torch.zeros(0, 4), torch.zeros(0).long())]
    found = head.errors([torch.randn(2, 4, 10, 10)], [4.0], boxes, weight, truth, [half, half[:0]])
    expected = math.log1p(math.exp(-2)) + 2 / 2
    torch.testing.assert_close(found.detach(), torch.tensor([[expected, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("sample", [False, True])
def test_error_is_the_loop(sample: bool) -> None:
    detect, truth = task(masks=True), masked(TWO, [], [(0, 0, 64, 3, 1)])
    plain = task()
    plain.detector.load_state_dict(
        {k: v for k, v in detect.detector.state_dict().items() if not k.startswith("masks.")}
    )
    backbone = model()
    with torch.no_grad():
        features = backbone.forward_features(images(3, 64))
        reading, bare = (one.output(backbone, features, truth) for one in (detect, plain))
        pairs = list(zip(truth["boxes"], truth["labels"], strict=True))
        errors = []
        for one, masks in ((reading, truth["masks"]), (bare, None)):
            torch.manual_seed(7)
            errors.append(one.error(pairs, masks, sample=sample))
        torch.manual_seed(7)
        detect.detector.rpn.errors(reading.scored, truth["boxes"], reading.sizes, sample=sample)  # spends its draws
        _, boxes, weight = detect.detector.cascade.errors(
            reading.maps, reading.strides, reading.proposals, pairs, reading.sizes, sample=sample
        )  # fmt: skip
        for image, (own, kinds) in enumerate(pairs):
            total, counted = 0.0, 0.0
            for box, weigh in zip(boxes[image], weight[image].tolist(), strict=True):
                overlap = box_iou(own, box[None])[:, 0] if len(own) else torch.zeros(1)
                if float(overlap.max()) < 0.5 or weigh == 0:
                    continue
                at = int(overlap.argmax())
                region = torch.cat([torch.zeros(1), box])[None]
                wanted = roi_align(truth["masks"][image][at][None, None].float(), region, 28, 1.0, -1, aligned=True)[
                    0, 0
                ]
                maps = [level[image : image + 1] for level in reading.maps]
                logits = detect.detector.masks(pool(maps, reading.strides, box[None, None], 14), kinds[at : at + 1])[0]
                total += weigh * float(F.binary_cross_entropy_with_logits(logits, (wanted >= 0.5).float()))
                counted += weigh
            expected = total / counted if counted else 0.0
            assert float(errors[0][image] - errors[1][image]) == pytest.approx(expected, abs=1e-4)
    assert float(errors[0][0]) > float(errors[1][0])


def test_rollouts_train_and_maps_take_masks_along() -> None:
    detect, truth, backbone = task(masks=True).train(), masked(TWO, []), model()
    twice = repeat_target(truth, 2)
    features = backbone.forward_features(images(2, 64).repeat(2, 1, 1, 1))
    output = detect.output(backbone, features, twice)
    error = detect.error(output, twice)
    torch.testing.assert_close(error[:2], error[2:])
    torch.testing.assert_close(detect.error_map(output, twice).flatten(1).mean(1), error)
    detect.loss(output, twice, features).backward()
    for name, parameter in detect.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert cropped(truth["masks"][1], torch.zeros(0, 4), torch.zeros(0).long()).shape == (0, 28, 28)


@dataclass
class Output:
    detections: list[Detections]
    sizes: torch.Tensor


def perfect(truth: dict[str, Any], q: int = 28) -> Output:
    """The truth as detections."""
    found = [
        Detections(boxes, torch.linspace(0.9, 0.8, len(boxes)), labels, torch.ones(len(boxes), q, q))
        for boxes, labels in zip(truth["boxes"], truth["labels"], strict=True)
    ]
    return Output(found, torch.full((len(found), 2), 64))


def test_perfect_masks_have_precision_one_and_empty_ones_none() -> None:
    truth = masked(TWO, [], [(5, 5, 50, 20, 1)])
    for value, expected in ((1.0, 1.0), (0.0, 0.0)):
        metric = AveragePrecision(("cat", "dog", "cow"), (1, 2, 90), masks=True)
        output = perfect(truth)
        for one in output.detections:
            one.masks.fill_(value)
        metric.update(output, truth)
        found = metric.compute()
        assert found["ap"] == found["ap50"] == 1.0
        assert found["mask_ap"] == found["mask_ap50"] == expected
        results = json.loads(metric.files()["detections.json"])
        assert len(results) == 3
        masks = [rle.decode([result["segmentation"]], (64, 64))[0] for result in results]
        assert {result["category_id"] for result in results} == {1, 2, 90}
        assert all(bool(mask.any()) == bool(value) for mask in masks)


def test_masks_are_counted_on_the_size_of_the_file() -> None:
    """A canvas twice as fine across and four times down; only detections with a mask count as such."""
    own = rle.encode(filled(torch.tensor([[20.0, 10, 40, 30]]), (100, 80)))
    box, category, area = np.array([[20.0, 10, 20, 20]]), np.array([90]), np.array([400.0])
    truth = Annotations(139, (100, 80), box, category, area, np.array([False]), (4.0, 2.0), own)
    metric = AveragePrecision(("cat", "dog"), (1, 90), masks=True)
    guesses = torch.tensor([[40.0, 40, 80, 120], [0, 0, 10, 10]])
    found = Detections(guesses, torch.tensor([0.9, 0.1]), torch.tensor([1, 1]), torch.ones(1, 28, 28))
    metric.update(Output([found], torch.tensor([[400, 160]])), {"annotations": [truth]})
    numbers = metric.compute()
    assert numbers["mask_ap"] == numbers["mask_ap_small"] == 1.0
    first, second = json.loads(metric.files()["detections.json"])
    assert first["segmentation"] == own[0]
    assert "segmentation" not in second


def test_rank_0_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = masked(TWO, [])
    metrics = [AveragePrecision(("cat", "dog", "cow"), (1, 2, 3)) for _ in range(2)]
    for rank, metric in enumerate(metrics):
        part = {key: value[rank : rank + 1] for key, value in truth.items()}
        metric.update(perfect(part), part)
    counted: list[int] = []

    class Pair(Ranks):
        told: Any = None

        def gather(self, value: Any) -> list[Any]:
            return [metric._images for metric in metrics]

        def same(self, make: Any) -> Any:
            if self.main:
                counted.append(self.rank)
                Pair.told = make()
            return Pair.told

    found = []
    for rank, metric in enumerate(metrics):
        monkeypatch.setattr(Ranks, "present", lambda device, rank=rank: Pair(rank, 2, device))
        found.append(metric.compute())
    assert counted == [0]
    assert found[0] == found[1]
    assert found[0]["ap"] == 1.0
    assert Ranks().same(lambda: 1) == 1


def test_masks_follow_their_boxes_through_the_augmentation() -> None:
    torch.manual_seed(0)
    jitter, seen = ScaleJitter((96, 64), scale=(0.5, 2.0), flip=0.5), 0
    mask = filled(torch.tensor([[20.0, 10, 50, 50], [0, 0, 5, 5]]), (60, 100))
    for _ in range(20):
        objects = Objects(
            marked(torch.tensor([[20.0, 10, 50, 50], [0, 0, 5, 5]]), (60, 100)), torch.arange(2), Mask(mask)
        )
        image, found = jitter(Pixels(torch.zeros(3, 60, 100, dtype=torch.uint8)), objects)
        assert found.masks is not None
        assert found.masks.shape == (len(found.labels), *image.shape[1:])
        for box, own in zip(found.boxes, found.masks, strict=True):
            if own.sum() > 20:
                places, seen = own.nonzero(), seen + 1
                tight = torch.cat([places.amin(0).flip(0), places.amax(0).flip(0) + 1]).float()
                torch.testing.assert_close(box.as_subclass(torch.Tensor), tight, atol=1.5, rtol=0)
    assert seen > 10


def polygon(left: float, top: float, width: float, height: float) -> list[list[float]]:
    return [[left, top, left + width, top, left + width, top + height, left, top + height]]


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    sizes = [(100, 60), (64, 64), (60, 100), (160, 64), (80, 60), (90, 70), (70, 90), (100, 100)]
    pictures = [entry(10 * k + 7, *size) for k, size in enumerate(sizes)]
    objects = [annotation(k, one["id"], BOX, segmentation=polygon(*BOX)) for k, one in enumerate(pictures[:-1])]
    crowd = {"size": [60, 100], "counts": [0, 600, 5400]}
    objects.append(annotation(99, 7, (0, 0, 10, 60), 1, iscrowd=1, segmentation=crowd))
    return write(folder, images=pictures, annotations=objects)


def test_a_file_s_masks_come_with_its_boxes(coco: Path) -> None:
    context = DataContext("val", image_size=(40, 40), mean=(0.5,) * 3, std=(0.5,) * 3)
    data = Coco(CocoConfig(root=coco, masks=True), context)
    samples = {s["target"]["annotations"].image_id: s for s in (data[i] for i in range(8))}
    first = samples[7]
    assert first["target"]["masks"].dtype == torch.bool
    assert first["target"]["masks"].shape == (1, *first["image"].shape[1:])
    white = first["image"][0] > 0
    assert (first["target"]["masks"][0] ^ white).float().mean() < 0.03
    assert len(first["target"]["annotations"].masks) == 2, "the crowd's too"
    assert samples[77]["target"]["masks"].shape[0] == 0
    batch = data.collate([samples[7], samples[77]])
    assert [len(masks) for masks in batch["target"]["masks"]] == [1, 0]
    assert "masks" not in Coco(CocoConfig(root=coco), context)[0]["target"]


def test_absent_masks_are_one_line(tmp_path: Path) -> None:
    root = write(tmp_path, images=[entry(12)], annotations=[annotation(8, 12, BOX), annotation(9, 12, BOX)])
    context = DataContext("val", image_size=(40, 40), mean=(0.5,) * 3, std=(0.5,) * 3)
    assert len(Coco(CocoConfig(root=root), context)) == 1
    with pytest.raises(SplitError, match=r"of the annotations 2 have no mask \(ids 8, 9\)") as caught:
        Coco(CocoConfig(root=root, masks=True), context)
    assert "\n" not in str(caught.value)
    with pytest.raises(SplitError, match=r"task\.masks=true needs the objects' masks: data\.masks=true"):
        Detect(DetectConfig(masks=True), TaskContext((), 32, 2, Described(box_classes=("a",))))
    wrong = write(tmp_path, images=[entry(12)], annotations=[annotation(8, 12, BOX, segmentation={"size": [1, 1]})])
    with pytest.raises(SplitError, match="a segmentation is neither polygons nor run lengths"):
        Coco(CocoConfig(root=wrong, masks=True), context)


def test_a_run_with_masks_counts_writes_and_draws_them(coco: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    own = ["task.masks=true", "task.mask_convs=1", "data=coco", "data.masks=true", "policy=entropy", "methods=[]"]
    words = [word for word in RUN if not word.startswith(("policy", "estimator"))]
    where = [f"data.root={coco}", f"run_dir={run_dir}", "eval.images=8", "eval.batch_size=4"]
    assert run.main([*words, *own, *where]) == 0
    row = json.loads((run_dir / "results.json").read_text())["rows"][0]
    assert {"mask_ap", "mask_ap50", "mask_ap75"} <= set(row["further"])
    assert 0 <= row["mask_ap"] <= row["mask_ap50"] <= 1
    results = json.loads((run_dir / "report" / "entropy" / "detections.json").read_text())
    assert results
    sizes = {7: [60, 100], 17: [64, 64], 27: [100, 60], 37: [64, 160], 47: [60, 80], 57: [70, 90], 67: [90, 70]}
    assert all(result["segmentation"]["size"] == sizes.get(result["image_id"], [100, 100]) for result in results)
    assert (run_dir / "report" / "patchmaps.png").is_file()


def test_pictures_show_masks() -> None:
    detect, truth = task(masks=True), masked(TWO)
    plain = [Image.new("RGB", (128, 128), "grey")]
    painted = detect.paint(plain, (64, 64), target=truth)
    assert painted is not None
    changed = (np.asarray(painted[0]) != np.asarray(plain[0])).any(2)
    assert changed[2 * 40, 2 * 40]
    assert changed[2 * 15, 2 * 10]
    assert not changed[2 * 60, 2 * 10]
    backbone = model()
    with torch.no_grad():
        reading = detect.output(backbone, backbone.forward_features(images(1, 64)), None)
        assert all(len(one.masks) == min(100, len(one.boxes)) for one in reading.detections)
        assert detect.paint(plain, (64, 64), output=reading) is not None
