"""Embeddings of every scale: the pretrained one at the fine scale, a shrunk picture's at the start, the fold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.nn import functional as F

from split_core.errors import SplitError
from split_core.pyramid import PyramidEmbed
from split_core.types import Pyramid
from tiny import images, jitter, relative

DIM, P = 16, 4


def make(stages: int = 2, *, moved: bool = True, norm: bool = False, bias: bool = True, **options: Any) -> PyramidEmbed:
    """A pyramid on 4 px patches; `moved` sets the aggregator and the zero layer to random values."""
    torch.manual_seed(0)
    proj = nn.Conv2d(3, DIM, P, P, bias=bias)
    embed = PyramidEmbed(proj, stages=stages, norm=jitter(nn.LayerNorm(DIM)) if norm else None, **options)
    if moved:
        jitter(embed, seed=1, spread=0.3)
    return embed.eval()


def reference(embed: PyramidEmbed, picture: Tensor) -> list[Tensor]:
    """The equations, in NCHW, with E read as convolution and norm."""

    def e(x: Tensor) -> Tensor:
        return embed.norm(embed.proj(x).movedim(1, -1)).movedim(-1, 1)

    side = P << embed.stages
    height, width = (-(-n // side) * side for n in picture.shape[-2:])
    canvas = torch.zeros(picture.shape[0], 3, height, width)
    canvas[..., : picture.shape[-2], : picture.shape[-1]] = picture
    levels, aggregated = [e(canvas)], e(canvas)
    for s in range(1, embed.stages + 1):
        aggregated = embed.aggregate(aggregated)
        n = 1 << s
        small = canvas.unflatten(2, (-1, n)).unflatten(4, (-1, n)).mean((3, 5))
        levels.append(e(small) + embed.zero(aggregated.movedim(1, -1)).movedim(-1, 1))
    return [level.flatten(2).transpose(1, 2) for level in levels]


def levels_of(embed: PyramidEmbed, picture: Tensor, *, fold: bool) -> Pyramid:
    with torch.set_grad_enabled(not fold):
        assert embed._can_fold() == (fold and embed.down == "area" and isinstance(embed.norm, nn.Identity))
        return embed(picture)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("size", [(32, 32), (15, 40), (1, 1), (33, 8)], ids=str)
def test_the_fine_level_is_timms_patch_embedding(size: tuple[int, int], norm: bool) -> None:
    timm_embed = jitter(PatchEmbed(None, P, 3, DIM, norm_layer=nn.LayerNorm if norm else None))
    embed = PyramidEmbed(timm_embed.proj, stages=2, norm=timm_embed.norm).eval()
    picture = images(2, *size)
    pyramid = embed(picture)
    rows, cols = pyramid.grid.shape(0)
    padded = F.pad(picture, (0, cols * P - size[1], 0, rows * P - size[0]))
    assert torch.equal(pyramid.levels[0], timm_embed(padded))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("fold", [False, True], ids=["modules", "folded"])
def test_at_the_start_a_coarse_token_is_the_embedding_of_a_smaller_picture(norm: bool, fold: bool) -> None:
    embed = make(2, moved=False, norm=norm)
    picture = images(2, 32, 48)
    with torch.set_grad_enabled(not fold):
        pyramid = embed(picture)
        for s in (1, 2):
            small = F.interpolate(picture, scale_factor=0.5**s, mode="area")
            expected = embed.norm(embed.proj(small).flatten(2).transpose(1, 2))
            torch.testing.assert_close(pyramid.levels[s], expected, atol=1e-5, rtol=1e-5)


sides = st.integers(1, 40)


@given(st.integers(1, 3), sides, sides, st.booleans(), st.booleans())
def test_levels_follow_the_equations_for_any_size(stages: int, height: int, width: int, norm: bool, bias: bool) -> None:
    embed = make(stages, norm=norm, bias=bias)
    picture = images(2, height, width)
    pyramid = levels_of(embed, picture, fold=False)
    assert pyramid.grid.cells == (-(-height // P), -(-width // P))
    for level, expected in zip(pyramid.levels, reference(embed, picture), strict=True):
        torch.testing.assert_close(level, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("size", [(32, 64), (30, 21)], ids=str)
def test_folded_is_unfolded(stages: int, bias: bool, size: tuple[int, int]) -> None:
    embed = make(stages, bias=bias)
    picture = images(2, *size)
    folded, plain = (levels_of(embed, picture, fold=fold) for fold in (True, False))
    for a, b in zip(folded.levels, plain.levels, strict=True):
        assert relative(a, b.detach()) <= 1e-5


def sgd(embed: PyramidEmbed) -> None:
    for parameter in (*embed.parameters(), *embed.proj.parameters()):
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([*embed.parameters(), *embed.proj.parameters()], lr=0.1).step()


def only_the_backbone(embed: PyramidEmbed) -> None:
    embed.proj.weight.grad = torch.ones_like(embed.proj.weight)
    torch.optim.SGD([embed.proj.weight], lr=0.1).step()


def load(embed: PyramidEmbed) -> None:
    embed.load_state_dict(jitter(copy.deepcopy(embed), seed=9).state_dict())


def edit_data_and_switch_mode(embed: PyramidEmbed) -> None:
    embed.zero.weight.data.mul_(2)
    embed.train()
    embed.eval()


@pytest.mark.parametrize("change", [sgd, only_the_backbone, load, edit_data_and_switch_mode])
def test_the_fold_follows_its_parameters(change) -> None:
    embed, picture = make(2), images(1, 32)
    before = levels_of(embed, picture, fold=True).levels[2]
    assert embed._folds() is embed._folds()
    change(embed)
    after = levels_of(embed, picture, fold=True).levels[2]
    assert relative(after, before) > 1e-3
    assert relative(after, levels_of(embed, picture, fold=False).levels[2].detach()) <= 1e-5


def test_no_fold_while_training_or_with_gradients() -> None:
    embed = make(1)
    assert not embed._can_fold()
    with torch.no_grad():
        assert embed._can_fold()
        assert not embed.train()._can_fold()


def test_a_fold_made_in_inference_mode_serves_afterwards() -> None:
    embed, picture = make(2), images(1, 32)
    with torch.inference_mode():
        expected = embed(picture).levels[2].clone()
    assert relative(levels_of(embed, picture, fold=True).levels[2], expected) <= 1e-6


@pytest.mark.parametrize("stages", [1, 2])
def test_bilinear_is_apts_reduction(stages: int) -> None:
    embed = make(stages, moved=False, down="bilinear")
    picture = images(2, 32)
    with torch.no_grad():
        pyramid = embed(picture)
        small = F.interpolate(picture, scale_factor=0.5**stages, mode="bilinear", antialias=False)
        expected = embed.proj(small).flatten(2).transpose(1, 2)
    torch.testing.assert_close(pyramid.levels[stages], expected)
    area = make(stages, moved=False)
    same = torch.allclose(levels_of(area, picture, fold=True).levels[stages], expected, atol=1e-5)
    assert same == (stages == 1)  # two by two pixels have one mean; of larger blocks bilinear reads the centre alone


def test_the_zero_layer_moves_first_and_then_the_aggregator_learns() -> None:
    """No gradient trap: A gets none while Z is zero, Z gets one at once, and after one step both do."""
    embed, picture = make(2, moved=False), images(2, 32)
    optimizer = torch.optim.SGD(embed.parameters(), lr=0.1)

    def backward() -> None:
        optimizer.zero_grad()
        sum(level.square().mean() for level in embed(picture).levels).backward()

    backward()
    assert (embed.aggregate.weight.grad == 0).all()
    assert embed.zero.weight.grad.abs().max() > 0
    optimizer.step()
    backward()
    assert embed.aggregate.weight.grad.abs().max() > 0
    assert embed.proj.weight.grad.abs().max() > 0


def test_it_adds_5_d2_plus_2_d_parameters_and_none_of_the_backbones() -> None:
    embed = make(3)
    assert sum(p.numel() for p in embed.parameters()) == 5 * DIM**2 + 2 * DIM
    assert set(embed.state_dict()) == {"aggregate.weight", "aggregate.bias", "zero.weight", "zero.bias"}


def test_oblong_patches() -> None:
    torch.manual_seed(0)
    embed = PyramidEmbed(nn.Conv2d(3, DIM, (4, 8), (4, 8)), stages=1).eval()
    pyramid = embed(images(1, 20, 24))
    assert pyramid.grid.cells == (5, 3)
    assert [level.shape[1] for level in pyramid.levels] == [24, 6]
    jitter(embed)
    with torch.no_grad():
        folded = embed(images(1, 20, 24)).levels[1]
    assert relative(folded, embed(images(1, 20, 24)).levels[1].detach()) <= 1e-5


def test_a_batch_of_none() -> None:
    for fold in (True, False):
        levels = levels_of(make(2), images(0, 30), fold=fold).levels
        assert [tuple(level.shape) for level in levels] == [(0, 64, DIM), (0, 16, DIM), (0, 4, DIM)]


def test_copies_embed_with_their_own_weights() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = make(1)
            self.proj = self.embed.proj

    holder = Holder()
    with torch.no_grad():
        holder.embed(images(1))
    twin = copy.deepcopy(holder)
    assert twin.embed.proj is twin.proj
    assert twin.proj is not holder.proj
    assert twin.embed._folded is None


def test_a_coarse_patch_far_larger_than_the_image_is_refused_before_memory_is_taken() -> None:
    embed = PyramidEmbed(torch.nn.Conv2d(3, 8, 4, stride=4), stages=12)
    with pytest.raises(SplitError, match=r"stages=12: a coarse patch spans 2\^12 fine ones and the image has 10x10"):
        embed(torch.zeros(1, 3, 40, 40))
