"""The parts of a detector beside plain loops, and where they differ from torchvision's on purpose."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from split_core.quadtree import build_layout, picture_cells, uniform_splits
from split_core.types import Grid
from split_tasks.detection import cascade
from split_tasks.detection.anchors import anchors
from split_tasks.detection.cascade import Cascade, level_of, pool
from split_tasks.detection.geometry import (
    CASCADE_WEIGHTS,
    RPN_WEIGHTS,
    clip,
    decode,
    encode,
    has_area,
    overlaps,
    picture_sizes,
)
from split_tasks.detection.matching import NOTHING, UNCLEAR, match, weights
from split_tasks.detection.proposals import ProposalNetwork, Proposals
from split_tasks.detection.pyramid import SimplePyramid
from split_tasks.detection.softnms import soft_nms

CPU = torch.device("cpu")


def boxes_of(count: int, seed: int, side: float = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * side
    return torch.cat([corner, corner + 1 + torch.rand(count, 2, generator=generator) * side / 2], 1)


def test_anchors_are_the_loop_and_not_rounded() -> None:
    shapes, strides = [(3, 5), (2, 2)], [3.5, 7.0]
    found = anchors(shapes, strides, CPU)
    for level, (rows, cols), stride in zip(found, shapes, strides, strict=True):
        expected = []
        for row in range(rows):
            for col in range(cols):
                for ratio in (0.5, 1.0, 2.0):
                    width = math.sqrt((8 * stride) ** 2 / ratio)
                    height = width * ratio
                    y, x = row * stride, col * stride
                    expected.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
        torch.testing.assert_close(level, torch.tensor(expected))
    rounded = AnchorGenerator(((32,),), ((0.5, 1.0, 2.0),))
    theirs = rounded(ImageList(torch.zeros(1, 3, 64, 64), [(64, 64)]), [torch.zeros(1, 1, 16, 16)])[0]
    ours = anchors([(16, 16)], [4.0], CPU)[0]
    assert 0.1 < float((theirs - ours).abs().max()) <= 0.5, "the same up to the rounding"


@given(st.integers(0, 10_000))
def test_codes_move_boxes_onto_what_was_wanted(seed: int) -> None:
    wanted, start = boxes_of(5, seed), boxes_of(5, seed + 1)
    torch.testing.assert_close(
        decode(encode(wanted, start, CASCADE_WEIGHTS), start, CASCADE_WEIGHTS), wanted, atol=1e-3, rtol=1e-4
    )  # fmt: skip
    grown = decode(torch.full((5, 4), 1e4) * torch.tensor([0, 0, 1, 1]), start, RPN_WEIGHTS)
    assert torch.isfinite(grown).all()


def test_overlaps_clipping_and_areas() -> None:
    a, b = boxes_of(6, 1), boxes_of(4, 2)
    torch.testing.assert_close(overlaps(a[None], b[None])[0], box_iou(a, b))
    nothing = torch.zeros(1, 1, 4)
    assert float(overlaps(nothing, nothing)) == 0.0
    clipped = clip(torch.tensor([[[-3.0, 2, 50, 90]], [[60.0, 60, 70, 70]]]), torch.tensor([[30, 40], [50, 50]]))
    assert clipped[0, 0].tolist() == [0, 2, 40, 30]
    assert has_area(clipped).tolist() == [[True], [False]]


def test_pictures_reach_as_far_as_their_cells() -> None:
    grid = Grid((5, 7), 1)
    valid = picture_cells(torch.tensor([[40, 56], [9, 40], [8, 1]]), grid, (8, 8))
    layout = build_layout(uniform_splits(grid, 3, split=False), valid)
    assert picture_sizes(layout, (8, 8)).tolist() == [[40, 56], [16, 40], [8, 8]]
    assert layout.valid_cells.tolist() == [35, 10, 1]
    whole = build_layout(uniform_splits(grid, 1, split=True))
    assert picture_sizes(whole, (8, 8)).tolist() == [[40, 56]]


@pytest.mark.parametrize("grid", [(4, 6), (5, 3), (1, 1)])
def test_the_pyramid_covers_any_grid(grid: tuple[int, int]) -> None:
    neck = SimplePyramid(16, channels=6, scales=(4.0, 2.0, 1.0, 0.5, 0.25))
    rows, cols = grid
    sizes = [(4 * rows, 4 * cols), (2 * rows, 2 * cols), grid]
    for _ in range(2):
        sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
    assert [tuple(m.shape) for m in neck(torch.randn(2, 16, rows, cols))] == [(2, 6, *size) for size in sizes]


@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_soft_nms_is_the_loop(seed: int, iou: float) -> None:
    batch, count, classes = 2, 7, 3
    boxes = torch.stack([boxes_of(count, seed + image, 12) for image in range(batch)])
    boxes[0, 3, 2:] = boxes[0, 3, :2]  # no area
    scores = torch.rand(batch, count, classes, generator=torch.Generator().manual_seed(seed))
    found = soft_nms(boxes, scores, iou=iou, least=0.05, limit=5)
    for image in range(batch):
        expected = []
        for label in range(classes):
            left = {i: float(scores[image, i, label]) for i in range(count) if (image, i) != (0, 3)}
            taken = 0
            while left and taken < 5:
                best = max(left, key=lambda i: left[i])
                score = left.pop(best)
                if score <= 0.05:
                    break
                expected.append((score, label, best))
                taken += 1
                for other in left:
                    over = float(box_iou(boxes[image, best][None], boxes[image, other][None]))
                    if over > iou:
                        left[other] *= 1 - over
        expected.sort(reverse=True)
        one = found[image]
        torch.testing.assert_close(one.scores, torch.tensor([e[0] for e in expected]), atol=1e-5, rtol=1e-5)
        assert one.labels.tolist() == [e[1] for e in expected]
        torch.testing.assert_close(one.boxes, boxes[image, [e[2] for e in expected]])


def test_soft_nms_of_nothing_is_nothing() -> None:
    found = soft_nms(torch.zeros(2, 3, 4), torch.ones(2, 3, 2), iou=0.6, least=1e-3, limit=9)
    assert [(len(one.boxes), len(one.scores), len(one.labels)) for one in found] == [(0, 0, 0)] * 2


def test_matching_at_its_thresholds() -> None:
    truth = torch.tensor([[0.0, 0, 10, 10]])
    half = torch.tensor([[0.0, 0, 10, 5], [0, 0, 10, 4.9], [0, 0, 10, 2], [50, 50, 60, 60]])
    assert match(truth, half, high=0.5, low=0.5).tolist() == [0, NOTHING, NOTHING, NOTHING]
    assert match(truth, half, high=0.5, low=0.3).tolist() == [0, UNCLEAR, NOTHING, NOTHING]
    assert match(truth, half[1:], high=0.5, low=0.3, best=True).tolist() == [0, NOTHING, NOTHING]
    assert match(truth[:0], half, high=0.5, low=0.3).tolist() == [NOTHING] * 4
    far = torch.tensor([[90.0, 90, 91, 91]])
    flat = torch.cat([half[:1, :2], half[:1, :2] + torch.tensor([[0.0, 5]])], 1)
    both = torch.cat([flat, truth[:1]])
    boxes = torch.cat([half, flat])
    assert match(both, boxes, high=0.5, low=0.3, best=True).tolist()[0] == 1, "an object without area takes nothing"
    assert match(both, boxes, high=0.5, low=0.3, best=True).tolist()[-1] == NOTHING, "not even itself, 0 / 0"
    assert match(flat, boxes, high=0.5, low=0.3, best=True).tolist() == [NOTHING] * 5
    assert match(far, half, high=0.7, low=0.3, best=True).tolist() == [NOTHING] * 4, "nobody touches it"


@pytest.mark.parametrize(("positives", "negatives"), [(0, 20), (3, 20), (20, 3), (12, 12), (2, 2), (0, 0)])
def test_weights_are_the_mean_over_samples(positives: int, negatives: int) -> None:
    kind = torch.zeros(1, 30)
    kind[0, 5 : 5 + positives], kind[0, 29 - negatives : 29] = 1, 2
    kind = kind.masked_fill(torch.arange(30) == 4, 0)
    positive, negative = kind == 1, kind == 2
    expected = weights(positive, negative, size=10, share=0.5, sample=False)
    torch.manual_seed(0)
    drawn = torch.stack([weights(positive, negative, size=10, share=0.5, sample=True) for _ in range(800)])
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    found = min(5, int(positive.sum()))
    total = found + min(10 - found, int(negative.sum()))
    assert (drawn.sum(2) == total).all()
    assert float(expected.sum()) == pytest.approx(total)
    assert float((drawn.mean(0) - expected).abs().max()) < 0.1
    assert not expected[~(positive | negative)].any()


def test_levels_are_those_of_the_formula() -> None:
    strides = [4.0, 8.0, 16.0, 32.0]
    sides = torch.tensor([0.0, 1, 100, 111.9, 112, 223, 224, 300, 448, 4000])
    boxes = torch.stack([torch.zeros_like(sides), torch.zeros_like(sides), sides * 2, sides / 2], 1)
    expected = [min(5, max(2, math.floor(4 + math.log2(max(float(s), 1e-3) / 224 + 1e-8)))) - 2 for s in sides]
    assert level_of(boxes[None], strides)[0].tolist() == expected


def test_pooling_reads_exact_positions() -> None:
    ramp = torch.arange(16.0).expand(1, 1, 16, 16)  # the value at a point's middle is its column
    box = torch.tensor([[[8.0, 8, 36, 36]]])
    pooled = pool([ramp], [4.0], box)[0, 0]
    middles = 8 + (torch.arange(7) + 0.5) * 28 / 7
    torch.testing.assert_close(pooled[0], middles / 4 - 0.5)  # without half-pixel centres it would be middles / 4
    by_level = pool(
        [ramp, torch.full((1, 1, 8, 8), -1.0)], [4.0, 8.0], torch.tensor([[[0.0, 0, 9, 9], [0, 0, 112, 112]]])
    )
    assert (by_level[1] == -1).sum() > 0
    assert (by_level[0] >= 0).all()


def test_all_stages_share_the_maps_gradient_in_training_alone() -> None:
    def gradient(thresholds: tuple[float, ...], *, train: bool = True) -> torch.Tensor:
        torch.manual_seed(0)
        heads = Cascade(4, classes=2, convs=1, hidden=8, thresholds=thresholds, samples=4)
        heads.train(train)
        for head in heads.heads[1:]:
            head.load_state_dict(heads.heads[0].state_dict())
        with torch.no_grad():
            for head in heads.heads:
                head.mover.weight.zero_()  # boxes stay, so that every stage reads the same
        maps = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        proposals = Proposals(torch.tensor([[[0.0, 0, 20, 20]]]), torch.tensor([[True]]))
        nothing = [(torch.zeros(0, 4), torch.zeros(0).long())]
        shares, _, _ = heads.errors([maps], [4.0], proposals, nothing, torch.tensor([[32, 32]]), sample=False)
        shares.sum().backward()
        assert maps.grad is not None
        return maps.grad

    one = gradient((0.5,))
    torch.testing.assert_close(gradient((0.5, 0.6, 0.7)), one, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(gradient((0.5, 0.6, 0.7), train=False), 3 * one, atol=1e-6, rtol=1e-4)


def test_code_weights_and_thresholds_grow_with_the_stage() -> None:
    heads = Cascade(4, classes=2, convs=0, hidden=8, thresholds=(0.5, 0.6, 0.7), samples=4)
    assert [heads._weights(k)[0] for k in range(3)] == [10, 20, 30]
    assert [heads._weights(k)[2] for k in range(3)] == [5, 10, 15]
    truth = [(torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([1]))]
    box = torch.tensor([[[0.0, 0, 10, 6.5]]])
    assert [int(heads._wanted(k, box, truth)[0]) for k in range(3)] == [1, 1, 2], "2 is the background"


def test_proposals_stay_inside_the_picture_and_carry_no_gradient() -> None:
    torch.manual_seed(0)
    network = ProposalNetwork(4, convs=2, candidates=(30, 20), proposals=10, samples=8)
    with torch.no_grad():
        network.head.bbox_pred.bias.copy_(torch.randn(12))
    scored = network([torch.randn(2, 4, 6, 6), torch.randn(2, 4, 3, 3)], [4.0, 8.0])
    sizes = torch.tensor([[24, 24], [8, 16]])
    proposals = network.propose(scored, sizes)
    assert proposals.boxes.shape == (2, 10, 4)
    assert not proposals.boxes.requires_grad
    assert (proposals.boxes[1] <= torch.tensor([16, 8, 16, 8])).all()
    assert has_area(proposals.boxes)[proposals.live].all()
    assert not proposals.boxes[~proposals.live].any()


def test_module_sizes_are_the_protocol_s() -> None:
    assert cascade.SIDE == 7
    assert cascade.SHARE == 0.25
    heads = Cascade(256, classes=80, convs=4, hidden=1024, thresholds=(0.5,), samples=512)
    shapes = {key: tuple(value.shape) for key, value in heads.heads[0].state_dict().items()}
    assert shapes["classifier.weight"] == (81, 1024)
    assert shapes["mover.weight"] == (4, 1024)
    assert shapes["features.5.weight"] == (1024, 256 * 49)
    assert "features.0.0.bias" not in shapes
