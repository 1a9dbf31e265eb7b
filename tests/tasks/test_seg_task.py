"""The segmentation task against plain loops over pixels: error, its map, mIoU, recall cells, the whole head."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from split_core import wrap
from split_core.engine.reference import dense_reference
from split_core.engine.session import Learner
from split_core.errors import SplitError
from split_core.learn.union import encode_union
from split_core.packing import dense_map, detail_map
from split_core.quadtree import build_layout, uniform_splits
from split_core.task import TaskContext, repeat_target
from split_core.types import Grid, Splits
from split_tasks.configs import SegmentConfig
from split_tasks.heads.upernet import default_taps
from split_tasks.objects import IGNORE, boundary_cells, majority_labels
from split_tasks.segment import Segment
from tiny import Logits, images, tiny_vit
from tinyseg import CLASSES, Described, context, labels, prediction, task


def naive_errors(logits, segments, patch, shape):
    """Mean cross-entropy of each image, and the sum of it over the pixels of each cell, by loops."""
    means, sums = [], np.zeros((len(segments), *shape))
    for b, (scores, truth) in enumerate(zip(logits.tolist(), segments.tolist(), strict=True)):
        total, count = 0.0, 0
        for y, line in enumerate(truth):
            for x, label in enumerate(line):
                if label == IGNORE:
                    continue
                exps = [math.exp(scores[k][y][x]) for k in range(len(CLASSES))]
                error = -math.log(exps[label] / sum(exps))
                total, count = total + error, count + 1
                sums[b, y // patch[0], x // patch[1]] += error
        means.append(total / count if count else 0.0)
        sums[b] /= max(count, 1)
    return np.array(means), sums


@given(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from([(2, 2), (3, 2)]), st.integers(1, 2), st.integers(0, 999),
    st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_error_and_its_map_equal_the_naive_loop(height, width, patch, stages, seed, ignored):
    grid = Grid((-(-height // patch[0]), -(-width // patch[1])), stages)
    output, target = prediction(2, grid, patch, seed), {"segments": labels(2, height, width, seed, ignored)}
    means, sums = naive_errors(output.logits, target["segments"], patch, grid.shape(0))
    own = task()
    np.testing.assert_allclose(own.error(output, target).numpy(), means, rtol=1e-4, atol=1e-6)
    where = own.error_map(output, target)
    cells = output.valid.flatten(1).sum(1)
    np.testing.assert_allclose(where.numpy(), sums * cells[:, None, None].numpy(), rtol=1e-4, atol=1e-5)
    assert not where[~output.valid].any()
    torch.testing.assert_close(where.flatten(1).sum(1) / cells, own.error(output, target), rtol=1e-4, atol=1e-6)


def naive_iou(predicted, truth):
    """IoU of each class by sets of pixels; None where it occurs in neither."""
    values = []
    for k in range(len(CLASSES)):
        counts = truth != IGNORE
        a, b = (predicted == k) & counts, (truth == k) & counts
        values.append((a & b).sum() / (a | b).sum() if (a | b).any() else None)
    return values


@given(st.integers(0, 999), st.sampled_from([0.0, 0.5, 1.0]))
def test_miou_of_images_and_of_the_data_set_equal_sets_of_pixels(seed, ignored):
    grid, own = Grid((3, 2), 1), task()
    metric, predicted, truth, scores = own.metric(), [], [], []
    for batch in range(2):
        output, target = prediction(2, grid, (2, 2), seed + batch), {"segments": labels(2, 5, 4, seed + batch, ignored)}
        if batch:
            target["segments"][target["segments"] == 2] = 1  # a class may be absent from a batch
        metric.update(output, target)
        scores += own.score(output, target).tolist()
        predicted.append(output.logits.argmax(1)[:, :5, :4].numpy())
        truth.append(target["segments"].numpy())
    predicted, truth = np.concatenate(predicted), np.concatenate(truth)
    expected = []
    for p, t in zip(predicted, truth, strict=True):
        present = [v for v in naive_iou(p, t) if v is not None]
        expected.append(np.mean(present) if present else 1.0)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    found, whole = metric.compute(), naive_iou(predicted, truth)
    present = [v for v in whole if v is not None]
    if not present:
        assert math.isnan(found["miou"])
        return
    assert found["miou"] == pytest.approx(np.mean(present))
    counts = truth != IGNORE
    assert found["aacc"] == pytest.approx((predicted == truth)[counts].mean())
    for name, value in zip(CLASSES, whole, strict=True):
        assert found["per_class"][name] == pytest.approx(math.nan if value is None else value, nan_ok=True)


@given(st.integers(1, 11), st.integers(1, 11), st.integers(1, 2), st.integers(0, 999))
def test_majority_and_boundaries_equal_the_naive_loop(height, width, stages, seed):
    patch = (3, 2)
    grid = Grid((-(-height // 3), -(-width // 2)), stages)
    truth = labels(1, height, width, seed, 0.4)
    label = majority_labels(truth, grid, patch, len(CLASSES))[0]
    rows, cols = grid.shape(0)
    for r in range(rows):
        for c in range(cols):
            pixels = truth[0, 3 * r : 3 * r + 3, 2 * c : 2 * c + 2].flatten().tolist()
            votes = [pixels.count(k) for k in range(len(CLASSES))]
            assert label[r, c] == (votes.index(max(votes)) if any(votes) else IGNORE)
    edge = boundary_cells(label[None])[0]
    for r in range(rows):
        for c in range(cols):
            near = [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
            others = {int(label[y, x]) for y, x in near if 0 <= y < rows and 0 <= x < cols} - {IGNORE}
            assert bool(edge[r, c]) == (int(label[r, c]) != IGNORE and bool(others - {int(label[r, c])}))


def test_objects_are_the_cells_of_classes_that_are_no_stuff():
    target = {"segments": torch.tensor([[[0, 0, 1, 1], [0, 0, 1, 0], [2, 2, 255, 255], [2, 0, 255, 255]]]).byte()}
    grid = Grid((2, 2), 1)
    assert task().objects(target, grid, (2, 2)).tolist() == [[[False, True], [True, False]]]
    assert task(stuff=(0, 2)).objects(target, grid, (2, 2)).tolist() == [[[False, True], [False, False]]]
    nameless = Segment(SegmentConfig(), context(("cat", "dog", "sky")))
    assert nameless.objects(target, grid, (2, 2)) is None


def random_layout(grid, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [grid.shape(s) for s in range(1, grid.stages + 1)]
    return build_layout(Splits(tuple(torch.rand(batch, *s, generator=generator) < 0.5 for s in shapes), grid))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_detail_map_equals_the_naive_loop(rows, cols, stages, q, seed):
    layout = random_layout(Grid((rows, cols), stages), 2, seed)
    values = torch.arange(layout.total * q * q * 2.0).view(layout.total, q, q, 2)
    found = detail_map(values, layout)
    assert found.shape == (2, 2, rows * q, cols * q)
    for b in range(2):
        for y in range(rows * q):
            for x in range(cols * q):
                token = int(layout.owner[b, y // q, x // q])
                side = 2 ** int(layout.scale[token])
                at = (y - int(layout.row[token]) * q) // side, (x - int(layout.col[token]) * q) // side
                assert torch.equal(found[b, :, y, x], values[token, at[0], at[1]])
    if q == 1:
        assert torch.equal(found, dense_map(values[:, 0, 0], layout))


@pytest.mark.parametrize("head", ["linear", "upernet"])
def test_all_fine_equals_the_dense_model_through_the_whole_head(head):
    vit = tiny_vit(num_classes=0, depth=4, reg_tokens=2)
    model = wrap(vit, policy=Logits(), stages=2).eval()
    own = Segment(SegmentConfig(head=head, channels=16, auxiliary_channels=8), context(depth=4)).eval()
    model.taps = own.taps
    pictures = images(2)
    layout = build_layout(uniform_splits(model.embed.grid((32, 32)), 2, split=True))
    with torch.no_grad():
        mixed = own.output(model, model.forward_features(pictures, layout=layout))
        dense = dense_reference(Learner(model, own))(pictures)
    torch.testing.assert_close(mixed.logits, dense.logits, rtol=1e-4, atol=1e-5)
    assert mixed.auxiliary is None
    coarse = own.output(model, model.forward_features(pictures, layout=build_layout(
        uniform_splits(model.embed.grid((32, 32)), 2, split=False)))).logits  # fmt: skip
    assert not torch.allclose(coarse, dense.logits, atol=1e-3)


def test_a_coarse_layout_gives_the_broadcast_map_also_without_the_middle_scale():
    model = wrap(tiny_vit(num_classes=0, img_size=64), policy=Logits(), stages=2).eval()
    grid = model.embed.grid((64, 64))
    for corner in (False, True):  # True: the top-left coarse patch splits twice, the others never: scales 0 and 2 only
        masks = [torch.zeros(1, *grid.shape(s), dtype=torch.bool) for s in (1, 2)]
        if corner:
            masks[0][:, :2, :2] = masks[1][:, :1, :1] = True
        layout = build_layout(Splits(tuple(masks), grid))
        assert set(layout.scale.tolist()) == ({0, 2} if corner else {2})
        (dense,) = model.features(images(1, 64), taps=[1], layout=layout)
        features = model.encode(model.pyramid(images(1, 64)), layout, taps=[1])
        tokens = features.taps[0][features.packed.patch_index]
        for r in range(8):
            for c in range(8):
                assert torch.equal(dense[0, :, r, c], tokens[layout.owner[0, r, c]])


@pytest.mark.parametrize("head", ["linear", "upernet"])
def test_binary_gates_of_a_union_sequence_give_the_mixed_output(head):
    model = wrap(tiny_vit(num_classes=0, depth=4), policy=Logits(), stages=2).eval()
    own = Segment(SegmentConfig(head=head, channels=8, auxiliary_channels=0), context(depth=4)).eval()
    model.taps = own.taps
    pyramid = model.pyramid(images(2, 30, 25))
    generator = torch.Generator().manual_seed(3)
    shapes = [pyramid.grid.shape(s) for s in (1, 2)]
    masks = tuple(torch.rand(2, *s, generator=generator) < 0.5 for s in shapes)
    masks[1][0] = True  # gates below an unsplit parent move nothing
    splits = Splits(masks, pyramid.grid).nested()
    gates = tuple(mask.flatten(1).float().requires_grad_() for mask in splits.masks)
    union = own.output(model, encode_union(model, pyramid, gates))
    mixed = own.output(model, model.encode(pyramid, build_layout(splits, pyramid.valid)))
    torch.testing.assert_close(union.logits, mixed.logits, rtol=1e-3, atol=1e-4)
    own.error(union, {"segments": labels(2, 30, 25, 1)}).sum().backward()
    assert all(gate.grad.abs().sum() > 0 for gate in gates)


def test_distance_is_zero_from_itself_and_rollouts_share_a_reference():
    output, own = prediction(2, Grid((3, 2), 1), (2, 2), 1), task()
    assert own.distance(output, output).abs().max() < 1e-6
    twice = repeat_target({"dense": output}, 2)["dense"]
    assert twice.canvas == output.canvas
    other = prediction(4, Grid((3, 2), 1), (2, 2), 2)
    found = own.distance(other, twice)
    p, q = output.logits.softmax(1), other.logits.softmax(1)
    expected = (p[1] * (p[1] / q[3]).log()).sum(0).mean()
    torch.testing.assert_close(found[3], expected)


@pytest.mark.parametrize("size", [(32, 32), (30, 41), (9, 8), (1, 70)])
@pytest.mark.parametrize("head", ["linear", "upernet"])
def test_any_size_trains_and_the_auxiliary_loss_counts(head, size):
    model = wrap(tiny_vit(num_classes=0, depth=4), policy=Logits(), budget=None)
    own = Segment(SegmentConfig(head=head, channels=8, auxiliary_channels=4), context(depth=4)).train()
    model.taps = own.taps
    pictures, target = images(2, *size), {"segments": labels(2, *size, seed=1)}
    features = model.forward_features(pictures)
    output = own.output(model, features)
    loss = own.loss(output, target, features)
    loss.backward()
    assert all(p.grad is not None for p in own.parameters()), "every parameter is used, as data parallelism needs"
    assert own.error(output, target).shape == (2,)
    if head == "upernet":
        assert loss > own.error(output, target).mean()


def test_chunks_change_nothing(monkeypatch):
    output, target = prediction(5, Grid((3, 3), 1), (2, 2), 3), {"segments": labels(5, 6, 6, 3)}
    own = task()
    whole = own.error(output, target), own.score(output, target), own.error_map(output, target)
    monkeypatch.setattr("split_tasks.segment.CHUNK", 1)
    chunked = own.error(output, target), own.score(output, target), own.error_map(output, target)
    for before, after in zip(whole, chunked, strict=True):
        assert torch.allclose(before, after, rtol=1e-6)


def test_taps_are_the_papers_and_wrong_ones_are_named():
    assert default_taps(24) == (7, 11, 15, 23)
    assert default_taps(12) == (3, 5, 7, 11)
    assert task().taps == (1,)
    with pytest.raises(SplitError, match=r"task.taps: there is no block 2, the last one is 1"):
        task(taps=(2,))
    with pytest.raises(ValueError, match="upernet reads four blocks, not 1"):
        task(head="upernet", taps=(0,))
    with pytest.raises(ValueError, match="rising block numbers"):
        task(taps=(1, 0))
    with pytest.raises(SplitError, match=r"task.stuff: there is no class 3; the last one is 2"):
        task(stuff=(3,))
    with pytest.raises(SplitError, match="this data set has none"):
        Segment(SegmentConfig(), TaskContext(("a",), 8, 2, Described()))
