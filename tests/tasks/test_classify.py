"""Objects in cells and tokens, and the classification task."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from split_core.quadtree import build_layout
from split_core.task import TaskContext
from split_core.types import Grid, Splits
from split_tasks.classify import Classify
from split_tasks.configs import ClassifyConfig
from split_tasks.objects import object_cells, object_tokens


def naive_cells(mask, grid, patch, share):
    rows, cols = grid.shape(0)
    out = np.zeros((len(mask), rows, cols), dtype=bool)
    for b in range(len(mask)):
        for r in range(rows):
            for c in range(cols):
                part = mask[b, r * patch[0] : (r + 1) * patch[0], c * patch[1] : (c + 1) * patch[1]]
                out[b, r, c] = int(part.sum()) * 1.0 >= share * patch[0] * patch[1] - 1e-9
    return torch.from_numpy(out)


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.sampled_from([(2, 2), (4, 3), (5, 5)]),
    st.integers(1, 2),
    st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_object_cells_equal_the_naive_loop(height, width, patch, stages, share, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, height, width, generator=generator) < 0.3
    grid = Grid((-(-height // patch[0]), -(-width // patch[1])), stages)
    assert torch.equal(object_cells(mask, grid, patch, share), naive_cells(mask.numpy(), grid, patch, share))


def test_a_mask_larger_than_the_grid_is_refused():
    with pytest.raises(ValueError, match="9x4 px does not fit into a grid of 8x8"):
        object_cells(torch.zeros(1, 9, 4, dtype=torch.bool), Grid((2, 2), 1), (4, 4), 0.1)


def quad_layout():
    """One image of 4x4 fine cells: the top-left parent split, the other three whole.

    Tokens in raster order of their corner: 0 and 1 fine, 2 coarse; 3 and 4 fine; 5 and 6 coarse.
    """
    split = torch.tensor([[[True, False], [False, False]]])
    return build_layout(Splits((split,), Grid((4, 4), 1)))


def test_a_token_is_on_the_object_when_half_of_its_cells_are():
    cells = torch.zeros(1, 4, 4, dtype=torch.bool)
    cells[0, 0, 1] = True  # a fine token
    cells[0, 0, 2] = cells[0, 1, 3] = True  # two of four
    cells[0, 2, 0] = True  # one of four
    assert object_tokens(cells, quad_layout()).tolist() == [False, True, True, False, False, False, False]


CONTEXT = TaskContext(("a", "b", "c"), 8)
LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 3.0, 0.0]])
TARGET = {"label": torch.tensor([0, 2])}


def test_error_is_the_cross_entropy_of_each_image():
    task = Classify(ClassifyConfig(label_smoothing=0.3), CONTEXT)
    error = task.error(LOGITS, TARGET)
    expected = [-np.log(np.exp(2) / (np.exp(2) + 1 + np.exp(-1))), -np.log(1 / (np.exp(3) + 2))]
    np.testing.assert_allclose(error.numpy(), expected, rtol=1e-6)
    assert task.error(LOGITS.bfloat16(), TARGET).dtype == torch.float32
    assert task.score(LOGITS, TARGET).tolist() == [1.0, 0.0]


def test_smoothing_is_in_the_loss_only():
    plain, smooth = (Classify(ClassifyConfig(label_smoothing=s), CONTEXT) for s in (0.0, 0.2))
    assert torch.equal(plain.error(LOGITS, TARGET), smooth.error(LOGITS, TARGET))
    torch.testing.assert_close(plain.loss(LOGITS, TARGET, None), plain.error(LOGITS, TARGET).mean())
    assert smooth.loss(LOGITS, TARGET, None) != plain.loss(LOGITS, TARGET, None)


def test_token_loss_teaches_class_on_the_object_and_background_elsewhere():
    task = Classify(ClassifyConfig(token_loss=1.0), CONTEXT)
    mask = torch.zeros(1, 16, 16, dtype=torch.bool)
    mask[0, 0:4, 4:8] = True  # fine cell (0, 1), token 1
    target = {"label": torch.tensor([2]), "mask": mask}
    assert task._token_labels(target, quad_layout()).tolist() == [3, 2, 3, 3, 3, 3, 3]
    features = SimpleNamespace(patches=torch.randn(7, 8), layout=quad_layout())
    loss = task.loss(LOGITS[:1], target, features)
    loss.backward()
    assert task.token_head.weight.grad.abs().sum() > 0
    assert loss > task.error(LOGITS[:1], target).mean()
    with pytest.raises(ValueError, match="token_loss needs masks"):
        task.loss(LOGITS, TARGET, features)


def test_objects_follow_the_masks():
    task = Classify(ClassifyConfig(), CONTEXT)
    assert task.objects(TARGET, Grid((2, 2), 1), (4, 4)) is None
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[0, 0, 4:6] = True  # 2 of 16 pixels
    assert task.objects({"mask": mask}, Grid((2, 2), 1), (4, 4)).tolist() == [[[False, True], [False, False]]]


def test_a_head_of_another_size_is_named():
    with pytest.raises(ValueError, match="the head has 5 outputs and the data 3 classes"):
        Classify(ClassifyConfig(), CONTEXT).error(torch.zeros(2, 5), TARGET)
