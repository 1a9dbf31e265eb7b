"""The warm-start rule as a policy (Sec. 3.4)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from split_core.learn.warmstart import cosine_dissimilarity
from split_core.types import Pyramid
from split_policies.configs import CosineConfig
from split_policies.cosine import Cosine


@pytest.mark.parametrize(("size", "stages", "scale"), [((64, 64), 1, 1), ((52, 90), 2, 1), ((52, 90), 2, 2)])
def test_equals_a_loop_over_children_in_the_picture(size, stages, scale, make_view, make_info):
    view = make_view(size, stages=stages, scale=scale)
    rows, cols = view.grid.shape(scale)
    level = view.pyramid.levels[scale - 1].unflatten(1, (2 * rows, 2 * cols))
    side = 8 << (scale - 1)
    expected = torch.zeros(3, rows * cols)
    for i in range(3):
        for n in range(rows * cols):
            parent = view.parents[i, n]
            for k in range(4):
                r, c = 2 * (n // cols) + k // 2, 2 * (n % cols) + k % 2
                if r * side < size[0] and c * side < size[1]:
                    cosine = parent @ level[i, r, c] / (parent.norm() * level[i, r, c].norm())
                    expected[i, n] = torch.maximum(expected[i, n], (1 - cosine) / 2)
    policy = Cosine(CosineConfig(tau=0.3), make_info(stages=stages))
    torch.testing.assert_close(cosine_dissimilarity(view), expected)
    torch.testing.assert_close(policy(view), expected - 0.3)


def test_range(make_view):
    """Equal embeddings score 0; one opposite child is enough for 1."""
    view = make_view((16, 32), batch=1)
    fine = view.parents[:, :1].expand(1, 8, -1).clone()
    fine[0, 7] = -fine[0, 7]
    view = replace(view, pyramid=Pyramid((fine, fine[:, :2].clone()), view.grid))
    torch.testing.assert_close(cosine_dissimilarity(view), torch.tensor([[0.0, 1.0]]))
