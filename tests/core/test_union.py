"""The union sequence: equal to the mixed forward at binary gates, and its derivatives those of finite differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from split_core.attention.masked import MaskedAttention
from split_core.attention.weighted import WeightedAttention
from split_core.errors import SplitError
from split_core.features import Features
from split_core.learn.credit import credit
from split_core.learn.gate import encode_blend
from split_core.learn.union import Gates, encode_union
from split_core.model import SplitViT
from split_core.packing import Segments
from split_core.policy import SplitPolicy, StageView
from split_core.quadtree import build_layout
from split_core.types import Pyramid, Splits
from split_core.wrapping import wrap
from strategies import Case, cases
from tiny import Bright, images, jitter, relative, tiny_vit

FAMILIES = ["vit", "gap", "gap_over_prefix", "dinov2", "siglip", "map_with_class_token", "eva02", "dinov3", "pe"]


class Late(SplitPolicy):
    """Decides after the first block, and the mixed sequence goes on from there."""

    depth, carries = 1, True

    def forward(self, view: StageView) -> Tensor:
        return view.context[..., 0]


def model_of(family: str = "vit", *, stages: int = 1, policy: SplitPolicy | None = None, **options) -> SplitViT:
    model = wrap(tiny_vit(family), policy or Bright(), stages=stages, **options)
    jitter(model.embed, 1)
    return model.eval()


def gates_of(splits: Splits, dtype: torch.dtype = torch.float32) -> Gates:
    return tuple(mask.flatten(1).to(dtype) for mask in splits.masks)


def random_splits(pyramid: Pyramid, times: int = 1, seed: int = 0) -> Splits:
    generator = torch.Generator().manual_seed(seed)
    grid = pyramid.grid
    shapes = ((times * pyramid.batch, *grid.shape(s)) for s in range(1, grid.stages + 1))
    return Splits(tuple(torch.rand(shape, generator=generator) < 0.5 for shape in shapes), grid)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["area", "token"])
@pytest.mark.parametrize("size", [(32, 32), (40, 24)])
@pytest.mark.parametrize("stages", [1, 2])
def test_binary_gates_give_the_mixed_forward(family: str, pooling: str, size: tuple[int, int], stages: int) -> None:
    model = model_of(family, stages=stages, pooling=pooling)
    pyramid = model.pyramid(images(3, *size))
    splits = random_splits(pyramid, times=2)
    mixed = model.encode(pyramid, build_layout(splits))
    union = encode_union(model, pyramid, gates_of(splits))
    assert relative(model.forward_head(union), model.forward_head(mixed)) < 1e-5
    torch.testing.assert_close(union.dense(), mixed.dense(), atol=1e-4, rtol=1e-4)


def test_binary_gates_after_a_late_decision() -> None:
    model = model_of(stages=2, policy=Late())
    pyramid = model.pyramid(images(2, 40))
    splits = random_splits(pyramid, times=2)
    mixed, union = model.encode(pyramid, build_layout(splits)), encode_union(model, pyramid, gates_of(splits))
    assert relative(model.forward_head(union), model.forward_head(mixed)) < 1e-5


@settings(max_examples=25)
@given(cases(largest=5, most_stages=2, most_images=2))
def test_any_partition_of_any_canvas(case: Case) -> None:
    model = model_of("gap", stages=case.grid.stages)
    rows, cols = case.grid.cells
    valid = None if case.valid is None else case.valid
    pyramid = model.embed(images(case.batch, 8 * rows, 8 * cols), valid)
    mixed = model.encode(pyramid, build_layout(case.splits, valid))
    union = encode_union(model, pyramid, gates_of(case.splits))
    torch.testing.assert_close(model.forward_head(union), model.forward_head(mixed), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(union.dense(), mixed.dense(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("family", ["vit", "gap"])
@pytest.mark.parametrize("stages", [1, 2])
def test_credit_is_the_finite_difference(family: str, stages: int, inside: bool) -> None:
    model = model_of(family, stages=stages).double()
    pyramid = model.pyramid(images(2).double())
    gates = tuple(0.2 + 0.6 * gate for gate in gates_of(random_splits(pyramid), torch.float64))

    def error_of(features: Features) -> Tensor:
        return model.forward_head(features).square().sum(1)

    _, saved, _ = credit(model, pyramid, error_of, gates, inside=inside)
    step = 1e-6
    for s, gate in enumerate(gates):
        for parent in range(gate.shape[1]):
            errors = []
            for sign in (1, -1):
                moved = [g.clone() for g in gates]
                moved[s][:, parent] += sign * step
                with torch.no_grad():
                    errors.append(error_of(encode_union(model, pyramid, tuple(moved))))
            slope = (errors[0] - errors[1]) / (2 * step)
            # A parent below an unsplit one is not asked, so its slope is left out.
            asked = torch.ones(2, dtype=torch.bool)
            if s + 1 < stages:
                _, cols = pyramid.grid.shape(s + 1)
                above = (gates[s + 1] > 0.5).unflatten(1, pyramid.grid.shape(s + 2))
                asked = above[:, parent // cols // 2, parent % cols // 2]
            torch.testing.assert_close(saved[s][:, parent], torch.where(asked, -slope, 0), atol=1e-5, rtol=1e-4)


def test_credit_means_over_an_images_masks() -> None:
    model = model_of()
    pyramid = model.pyramid(images(2))
    gates = gates_of(random_splits(pyramid, times=3))

    def error_of(features: Features) -> Tensor:
        return model.forward_head(features).square().sum(1)

    _, together, asked = credit(model, pyramid, error_of, gates, times=3)
    alone = [credit(model, pyramid, error_of, (gates[0][2 * k : 2 * k + 2],))[1][0] for k in range(3)]
    torch.testing.assert_close(together[0], torch.stack(alone).mean(0), atol=1e-5, rtol=1e-4)
    assert asked[0].all()


def test_dead_keys_that_would_win_give_finite_slopes() -> None:
    """A key without weight may outscore all others by far; nothing may overflow or vanish."""
    q, k, v = torch.randn(3, 6, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    k = k.clone()
    k[2] = 400 * q[0]
    weight = torch.tensor([[1.0, 1, 0, 1, 0, 1]], requires_grad=True)
    segments = Segments(torch.tensor([0, 6], dtype=torch.int32), (6,), 6)
    out = WeightedAttention(weight).attend(q, k, v, segments, scale=1.0)
    live = [0, 1, 3, 5]
    four = Segments(torch.tensor([0, 4], dtype=torch.int32), (4,), 4)
    torch.testing.assert_close(out[live], MaskedAttention().attend(q[live], k[live], v[live], four, scale=1.0))
    (slope,) = torch.autograd.grad(out.sum(), weight)
    assert slope.isfinite().all()


def test_positive_weights_on_fused_kernels_are_the_same_attention() -> None:
    """Keys of weight 0 are absent then, however well they would score."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 10, 2, 6, generator=generator, dtype=torch.float64).unbind(0)
    k = k.clone()
    k[2] = 400 * q[0]
    weight = torch.rand(2, 5, generator=generator, dtype=torch.float64) + 0.01
    weight[0, 2] = weight[1, 4] = 0
    segments = Segments(torch.tensor([0, 5, 10], dtype=torch.int32), (5, 5), 5)
    found = []
    for positive in (False, True):
        parts = [x.clone().requires_grad_() for x in (q, k, v, weight)]
        out = WeightedAttention(parts[3], positive=positive).attend(*parts[:3], segments, scale=0.4)
        slopes = torch.autograd.grad(out.square().sum(), parts)
        found.append([out, *slopes[:3], slopes[3] * (weight > 0)])
    for naive, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, naive)


def test_weighted_attention_wants_one_length() -> None:
    x = torch.randn(5, 1, 4)
    segments = Segments(torch.tensor([0, 2, 5], dtype=torch.int32), (2, 3), 3)
    with pytest.raises(ValueError, match="images of 2 tokens each"):
        WeightedAttention(torch.ones(2, 2)).attend(x, x, x, segments, scale=1.0)


def test_patch_tokens_of_a_union_are_refused() -> None:
    model = model_of()
    pyramid = model.pyramid(images(1))
    with pytest.raises(SplitError, match=r"read features\.prefix, mean"):
        _ = encode_union(model, pyramid, gates_of(random_splits(pyramid))).patches


def test_a_blend_at_gates_of_one_is_all_fine() -> None:
    model = model_of()
    pyramid = model.pyramid(images(2))
    ones = (torch.ones(2, pyramid.grid.size(1)),)
    fine = Splits((torch.ones(2, *pyramid.grid.shape(1), dtype=torch.bool),), pyramid.grid)
    mixed = model.encode(pyramid, build_layout(fine))
    assert relative(encode_blend(model, pyramid, ones).tokens, mixed.tokens) < 1e-6
