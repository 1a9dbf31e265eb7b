"""Task det: the error beside plain loops, image by image and finite whatever the boxes; objects, score and pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision.ops import box_iou

from split_core.errors import SplitError
from split_core.task import TaskContext, repeat_target
from split_core.types import Grid
from split_tasks.detect import Detect, inside
from split_tasks.detection.average_precision import image_precision
from split_tasks.detection.configs import DetectConfig
from split_tasks.detection.convert import convert, main
from split_tasks.detection.detector import Reading
from split_tasks.detection.geometry import CASCADE_WEIGHTS, RPN_WEIGHTS, decode, encode
from split_tasks.detection.softnms import Detections
from tiny import images
from tinydet import CLASSES, SMALL, context, model, target, task
from tinyseg import Described

TWO = [(2, 3, 20, 30, 0), (25, 20, 60, 55, 2)]
HARD = {
    "no boxes": [],
    "all boxes": [(x, y, x + 8, y + 8, (x + y) // 8 % 3) for x in range(0, 64, 8) for y in range(0, 64, 8)],
    "one": [(10, 10, 40, 40, 1)],
    "one pixel": [(31, 7, 32, 8, 0), (63, 63, 64, 64, 2)],
    "border": [(0, 0, 64, 64, 0), (0, 20, 5, 64, 1), (50, 0, 64, 3, 2)],
    "1:8": [(0, 0, 64, 8, 0), (30, 0, 38, 64, 1)],
}


def read(detect: Detect, picture: torch.Tensor, truth: dict | None) -> Reading:
    backbone = model()
    return detect.output(backbone, backbone.forward_features(picture), truth)


def loop_error(reading: Reading, boxes: torch.Tensor, labels: torch.Tensor, image: int) -> float:
    """The expected detection loss of one image, one anchor and one proposal at a time."""
    detector = reading.detector
    scored, samples = reading.scored, detector.rpn.samples
    overlap = box_iou(boxes, scored.anchors)
    kinds = []
    for a in range(len(scored.anchors)):
        best = float(overlap[:, a].max())
        favourite = any(overlap[g, a] == overlap[g].max() for g in range(len(boxes)))
        kinds.append(1 if best >= 0.7 or (favourite and best > 0) else 0 if best < 0.3 else -1)
    size = reading.sizes[image].flip(0)
    for a, kind in enumerate(kinds):
        centre = (scored.anchors[a, :2] + scored.anchors[a, 2:]) / 2
        if kind == 0 and not (centre < size).all():
            kinds[a] = -1
    positive = min(kinds.count(1), samples // 2)
    chance = {1: positive / max(1, kinds.count(1)), 0: min(1, (samples - positive) / max(1, kinds.count(0))), -1: 0.0}
    total = 0.0
    for a, kind in enumerate(kinds):
        if kind < 0:
            continue
        logit = scored.objectness[image, a]
        off = float(F.softplus(-logit if kind else logit))
        if kind:
            wanted = encode(boxes[int(overlap[:, a].argmax())][None], scored.anchors[a][None], RPN_WEIGHTS)[0]
            off += float((scored.codes[image, a] - wanted).abs().sum())
        total += chance[kind] * off / samples
    cascade, read = detector.cascade, reading.maps
    found = reading.proposals.boxes[image][reading.proposals.live[image]]
    here = torch.cat([found, boxes])
    maps = [m[image : image + 1] for m in read]
    first = [float(box_iou(boxes, b[None]).max()) >= cascade.thresholds[0] for b in here]
    held = min(sum(first), int(cascade.samples * 0.25))
    part = {True: held / max(1, sum(first)), False: min(1, (cascade.samples - held) / max(1, len(first) - sum(first)))}
    weight = [part[f] for f in first]
    for stage, threshold in enumerate(cascade.thresholds):
        logits, codes = cascade._read(stage, maps, reading.strides, here[None])
        own, off = tuple(w * (stage + 1) for w in CASCADE_WEIGHTS), 0.0
        for n, box in enumerate(here):
            overlaps = box_iou(boxes, box[None])[:, 0]
            object_ = int(overlaps.argmax()) if float(overlaps.max()) >= threshold else None
            label = len(CLASSES) if object_ is None else int(labels[object_])
            each = -float(logits[0, n].log_softmax(0)[label])
            if object_ is not None:
                each += float((codes[0, n] - encode(boxes[object_][None], box[None], own)[0]).abs().sum())
            off += weight[n] * each
        total += off / sum(weight)
        here = decode(codes[0], here, own)
        here = torch.minimum(here.clamp_min(0), size.repeat(2))
        weight = [w * float((b[2:] > b[:2]).all()) for w, b in zip(weight, here, strict=True)]
    return total


@pytest.mark.parametrize("seed", [0, 1])
def test_the_error_is_the_loop(seed: int) -> None:
    detect, truth = task(seed), target(TWO, HARD["border"])
    with torch.no_grad():
        reading = read(detect, images(2, 64, seed=seed), truth)
        found = detect.error(reading, truth)
        for image in range(2):
            expected = loop_error(reading, truth["boxes"][image], truth["labels"][image], image)
            assert float(found[image]) == pytest.approx(expected, rel=1e-4)


def test_training_is_on_samples_whose_mean_is_the_error() -> None:
    detect, truth = task(), target(TWO, [])
    with torch.no_grad():
        reading = read(detect, images(2, 64), truth)
        torch.manual_seed(0)
        drawn = torch.stack([reading.error(list(zip(truth["boxes"], truth["labels"], strict=True)), sample=True)
                             for _ in range(150)])  # fmt: skip
        expected = detect.error(reading, truth)
    assert drawn.std(0).min() > 0
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - expected).abs() < 5 * error + 1e-3).all()


def test_every_image_is_on_its_own_and_rollouts_of_one_agree() -> None:
    detect, pictures = task(), images(3, 64)
    truth = target(TWO, [], HARD["all boxes"])
    with torch.no_grad():
        together = detect.error(read(detect, pictures, truth), truth)
        for image in range(3):
            alone = {key: value[image : image + 1] for key, value in truth.items()}
            found = detect.error(read(detect, pictures[image : image + 1], alone), alone)
            torch.testing.assert_close(found[0], together[image], atol=1e-5, rtol=1e-5)
        twice = repeat_target(truth, 2)
        copies = detect.error(read(detect, pictures.repeat(2, 1, 1, 1), twice), twice)
    torch.testing.assert_close(copies[:3], copies[3:], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(copies[:3], together, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(64, 64), (16, 128)])
def test_hard_batches_give_finite_numbers_and_gradients(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    truth = target(*HARD.values())
    for boxes in truth["boxes"]:  # into the canvas
        boxes[:, 2:] = boxes[:, 2:].minimum(torch.tensor([size[1], size[0]]))
        boxes[:, :2] = boxes[:, :2].minimum(boxes[:, 2:] - 1)
    detect = task().train()
    reading = read(detect, images(len(HARD), *size), truth)
    error = detect.error(reading, truth)
    assert torch.isfinite(error).all()
    (reading.error(list(zip(truth["boxes"], truth["labels"], strict=True)), sample=True).sum() + error.sum()).backward()
    for name, parameter in detect.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    detect.eval()
    with torch.no_grad():
        scores = detect.score(reading, truth)
    assert float(scores[0]) == 1.0
    assert ((scores >= 0) & (scores <= 1)).all()


def test_an_image_without_proposals_or_objects_costs_nothing_of_the_box_heads() -> None:
    detect = task()
    reading = read(detect, images(1, 64), target([]))
    reading.proposals.live.zero_()
    shares, _, _ = detect.detector.cascade.errors(
        reading.maps, reading.strides, reading.proposals, [(torch.zeros(0, 4), torch.zeros(0).long())], reading.sizes,
        sample=False,
    )  # fmt: skip
    assert shares.shape == (1, SMALL["proposals"])
    assert not shares.any()


def test_padding_holds_no_proposal_and_no_blame() -> None:
    detect, backbone, truth = task(), model(), target([(2, 2, 20, 12, 0)])
    valid = torch.zeros(1, 8, 8, dtype=torch.bool)
    valid[:, :2, :3] = True
    picture = images(1, 64)
    with torch.no_grad():
        features = backbone.forward_features(picture, valid=valid)
        reading = detect.output(backbone, features, truth)
        assert reading.sizes.tolist() == [[16, 24]]
        assert (reading.proposals.boxes <= torch.tensor([24, 16, 24, 16])).all()
        assert all((one.boxes <= torch.tensor([24, 16, 24, 16])).all() for one in reading.detections)
        expected = loop_error(reading, truth["boxes"][0], truth["labels"][0], 0)
        assert float(detect.error(reading, truth)) == pytest.approx(expected, rel=1e-4)


def test_the_error_lies_where_anchors_and_proposals_are() -> None:
    detect, backbone, truth = task(), model(), target([(2, 2, 20, 12, 0)], TWO)
    valid = torch.ones(2, 8, 8, dtype=torch.bool)
    valid[0, 2:], valid[0, :, 3:] = False, False
    with torch.no_grad():
        features = backbone.forward_features(images(2, 64), valid=valid)
        reading = detect.output(backbone, features, truth)
        found, error = detect.error_map(reading, truth), detect.error(reading, truth)
        shares, middles = reading.shares(list(zip(truth["boxes"], truth["labels"], strict=True)))
    assert not found[0][~valid[0]].any()
    torch.testing.assert_close(found.flatten(1).sum(1) / features.layout.valid_cells, error)
    expected = torch.zeros(8, 8)
    for share, (x, y) in zip(shares[1].tolist(), middles[1].tolist(), strict=True):
        expected[min(7, max(0, int(y // 8))), min(7, max(0, int(x // 8)))] += share * 64
    torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=1e-4)


def test_without_truth_the_whole_pipeline_runs() -> None:
    detect = task()
    with torch.no_grad():
        assert "detections" in vars(read(detect, images(1, 64), None))
        assert "detections" not in vars(read(detect, images(1, 64), target([])))


def test_objects_are_the_mask_s_or_the_boxes_cells() -> None:
    detect, grid = task(), Grid((4, 4), 1)
    truth = target([(0, 0, 9, 8, 0)], [])
    cells = detect.objects(truth, grid, (8, 8))
    assert cells[0].nonzero().tolist() == [[0, 0], [0, 1]]
    assert not cells[1].any()
    mask = torch.zeros(2, 32, 32, dtype=torch.bool)
    mask[1, 30:, 24:] = True
    assert detect.objects({**truth, "mask": mask}, grid, (8, 8)).nonzero().tolist() == [[1, 3, 3]]
    assert inside(torch.tensor([[3.2, 4.0, 3.4, 4.1]]), (8, 8)).nonzero().tolist() == [[4, 3]]


def test_score_of_one_image() -> None:
    boxes, labels = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]]), torch.tensor([0, 1])
    guesses = torch.tensor([[0.0, 0, 10, 9], [0, 0, 10, 10], [20, 20, 30, 29], [50, 50, 60, 60]])

    def score(order: list[int], kinds: list[int]) -> float:
        found = Detections(guesses[order], torch.linspace(0.9, 0.1, len(order)), torch.tensor(kinds))
        return image_precision(found, boxes, labels)

    assert score([0, 2], [0, 1]) == 1.0
    assert score([0, 2], [1, 1]) == pytest.approx(0.25), "a wrong class is a miss: one of two found, at precision 1/2"
    assert score([0, 1, 2], [0, 0, 1]) == pytest.approx((1 + 2 / 3) / 2), "a second box of one object is wrong"
    assert score([3], [0]) == 0.0
    assert image_precision(Detections(guesses[:0], labels[:0].float(), labels[:0]), boxes, labels) == 0.0


def test_pictures_show_truth_and_guesses() -> None:
    detect, truth = task(), target(TWO)
    plain = [Image.new("RGB", (128, 128), "grey")]
    painted = detect.paint(plain, (64, 64), target=truth)
    assert painted is not None
    changed = np.asarray(painted[0]) != np.asarray(plain[0])
    assert changed.any()
    assert changed[2 * 55 - 1, 2 * 30].any(), "the lower edge of the second box"
    assert not changed[100, 30].any()
    with torch.no_grad():
        reading = read(detect, images(1, 64), None)
    assert detect.paint(plain, (64, 64), output=reading) is not None
    assert detect.paint(plain, (64, 64)) is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SplitError, match="task=det needs boxes"):
        Detect(DetectConfig(), TaskContext((), 32, 2, Described()))
    for wrong, line in (
        ({"scales": (3.0,)}, "should be some of 4, 2, 1"), ({"scales": (1.0, 2.0)}, "should be falling"),
        ({"scales": (1.0, 0.25)}, "made from 0.5"), ({"thresholds": ()}, "at least one stage"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=line):
            DetectConfig(**wrong)
    detect = task()
    with pytest.raises(SplitError, match="defines no distance"):
        detect.distance(None, None)


def test_an_official_checkpoint_loads_whole(tmp_path, capsys) -> None:
    settings = {
        **SMALL,
        "scales": (4.0, 2.0, 1.0, 0.5, 0.25),
        "rpn_convs": 2,
        "convs": 4,
        "thresholds": (0.5, 0.6, 0.7),
    }
    detect = Detect(DetectConfig(**settings), context())
    state = official(dim=32, channels=8, hidden=16, classes=3)
    torch.save({"model": state}, tmp_path / "eva.pth")
    out = tmp_path / "detector.safetensors"
    assert main([str(tmp_path / "eva.pth"), str(out)]) == 0
    capsys.readouterr()
    loaded = Detect(DetectConfig(**settings, weights=out), context())
    own = loaded.detector.state_dict()
    assert own.keys() == detect.detector.state_dict().keys()
    for theirs, ours in {
        "backbone.simfp_2.3.weight": "neck.levels.0.3.weight",
        "backbone.simfp_5.2.norm.bias": "neck.levels.3.2.norm.bias",
        "proposal_generator.rpn_head.conv.conv1.weight": "rpn.head.conv.1.0.weight",
        "proposal_generator.rpn_head.anchor_deltas.bias": "rpn.head.bbox_pred.bias",
        "roi_heads.box_head.1.conv3.norm.weight": "cascade.heads.1.features.2.1.weight",
        "roi_heads.box_head.2.fc1.weight": "cascade.heads.2.features.5.weight",
        "roi_heads.box_predictor.0.cls_score.weight": "cascade.heads.0.classifier.weight",
    }.items():
        assert torch.equal(state[theirs], own[ours])
    assert not any(key.startswith("masks.") for key in own)
    masked = Detect(DetectConfig(**settings, masks=True, mask_convs=4, weights=out), context()).detector.state_dict()
    for theirs, ours in {
        "mask_fcn1.weight": "convs.0.0.weight", "mask_fcn4.norm.bias": "convs.3.1.bias",
        "deconv.weight": "predictor.conv5_mask.weight", "predictor.bias": "predictor.mask_fcn_logits.bias",
    }.items():  # fmt: skip
        assert torch.equal(state[f"roi_heads.mask_head.{theirs}"], masked[f"masks.{ours}"])
    with pytest.raises(SplitError, match=r"missing: masks\.convs\.4"):
        Detect(DetectConfig(**settings, masks=True, mask_convs=5, weights=out), context())
    with pytest.raises(SplitError, match=r"no place for roi_heads\.keypoint\.weight"):
        convert({**state, "roi_heads.keypoint.weight": torch.zeros(1)})
    assert main([str(tmp_path / "none.pth"), str(out)]) == 2
    assert main([]) == 2


def official(*, dim: int, channels: int, hidden: int, classes: int) -> dict[str, torch.Tensor]:
    """Random tensors under the official names."""
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.net.pos_embed": (1, 197, dim), "backbone.net.blocks.0.norm1.weight": (dim,),
        "backbone.simfp_2.0.weight": (dim, dim // 2, 2, 2), "backbone.simfp_2.0.bias": (dim // 2,),
        "backbone.simfp_2.1.weight": (dim // 2,), "backbone.simfp_2.1.bias": (dim // 2,),
        "backbone.simfp_2.3.weight": (dim // 2, dim // 4, 2, 2), "backbone.simfp_2.3.bias": (dim // 4,),
        "backbone.simfp_3.0.weight": (dim, dim // 2, 2, 2), "backbone.simfp_3.0.bias": (dim // 2,),
        "proposal_generator.anchor_generator.cell_anchors.0": (3, 4), "pixel_mean": (3, 1, 1),
        "roi_heads.mask_head.deconv.weight": (channels, channels, 2, 2), "roi_heads.mask_head.deconv.bias": (channels,),
        "roi_heads.mask_head.predictor.weight": (classes, channels, 1, 1),
        "roi_heads.mask_head.predictor.bias": (classes,),
        "proposal_generator.rpn_head.objectness_logits.weight": (3, channels, 1, 1),
        "proposal_generator.rpn_head.objectness_logits.bias": (3,),
        "proposal_generator.rpn_head.anchor_deltas.weight": (12, channels, 1, 1),
        "proposal_generator.rpn_head.anchor_deltas.bias": (12,),
    }  # fmt: skip
    for level, (first, width) in {2: (4, dim // 4), 3: (1, dim // 2), 4: (0, dim), 5: (1, dim)}.items():
        for index, (inputs, kernel) in enumerate(((width, 1), (channels, 3)), start=first):
            key = f"backbone.simfp_{level}.{index}"
            shapes |= {f"{key}.weight": (channels, inputs, kernel, kernel)}
            shapes |= {f"{key}.norm.{part}": (channels,) for part in ("weight", "bias")}
    for n in range(2):
        key = f"proposal_generator.rpn_head.conv.conv{n}"
        shapes |= {f"{key}.weight": (channels, channels, 3, 3), f"{key}.bias": (channels,)}
    for n in range(1, 5):
        key = f"roi_heads.mask_head.mask_fcn{n}"
        shapes |= {f"{key}.weight": (channels, channels, 3, 3)}
        shapes |= {f"{key}.norm.{part}": (channels,) for part in ("weight", "bias")}
    for stage in range(3):
        for n in range(1, 5):
            key = f"roi_heads.box_head.{stage}.conv{n}"
            shapes |= {f"{key}.weight": (channels, channels, 3, 3)}
            shapes |= {f"{key}.norm.{part}": (channels,) for part in ("weight", "bias")}
        shapes |= {
            f"roi_heads.box_head.{stage}.fc1.weight": (hidden, channels * 49),
            f"roi_heads.box_head.{stage}.fc1.bias": (hidden,),
        }
        for name, width in (("cls_score", classes + 1), ("bbox_pred", 4)):
            key = f"roi_heads.box_predictor.{stage}.{name}"
            shapes |= {f"{key}.weight": (width, hidden), f"{key}.bias": (width,)}
    generator = torch.Generator().manual_seed(0)
    return {key: torch.rand(shape, generator=generator) for key, shape in shapes.items()}
