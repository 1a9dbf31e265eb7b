"""Deciding after a look: coarse patches through the first blocks, for context or to go on from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from split_core.errors import SplitError
from split_core.flops import backbone_flops, forward_flops
from split_core.policy import SplitPolicy, StageView
from split_core.quadtree import build_layout, uniform_splits
from split_core.wrapping import wrap
from tiny import Bright, images, jitter, relative, tiny_vit


class Seen(SplitPolicy):
    """Scores by what the look found; keeps every view."""

    def __init__(self, depth: int = 1, carries: bool = False) -> None:
        super().__init__()
        self.depth, self.carries = depth, carries
        self.views: list[StageView] = []

    def forward(self, view: StageView) -> Tensor:
        self.views.append(view)
        return view.context[..., 0]


def looking(depth: int = 1, *, carries: bool = False, stages: int = 1, family: str = "vit"):
    model = wrap(tiny_vit(family, depth=3), Seen(depth, carries), stages=stages)
    jitter(model.embed, 2)
    return model.eval()


@pytest.mark.parametrize("family", ["vit", "gap", "clip", "registers_without_position"])
@pytest.mark.parametrize("size", [(32, 32), (40, 24)])
def test_the_context_is_the_coarse_sequence_after_the_first_blocks(family: str, size: tuple[int, int]) -> None:
    model = looking(2, family=family, stages=2)
    picture = images(2, *size)
    model.tokenize(picture)
    coarse, fine = (view for scale in (2, 1) for view in model.policy.views if view.scale == scale)
    plain = wrap(model.vit, Bright(), stages=2)
    plain.embed = model.embed
    pyramid = plain.pyramid(picture)
    layout = build_layout(uniform_splits(pyramid.grid, 2, split=False))
    packed = plain.pack(pyramid, layout)
    tokens, _ = plain.run(packed.tokens, plain.streams(packed, layout), stop=2)
    patches = tokens[packed.patch_index]
    cols = pyramid.grid.shape(2)[1]
    for index in range(layout.total):
        image, row, col = (int(x[index]) for x in (layout.image, layout.row, layout.col))
        torch.testing.assert_close(coarse.context[image, row // 4 * cols + col // 4], patches[index])
        torch.testing.assert_close(fine.context[image, row // 2 * 2 * cols + col // 2], patches[index])


def test_a_look_alone_does_not_change_what_a_partition_gives() -> None:
    model, plain = looking(2), wrap(tiny_vit(depth=3), Bright())
    plain.embed = model.embed
    picture = images(2)
    layout = model.tokenize(picture)
    assert relative(model(picture, layout=layout), plain(picture, layout=layout)) < 1e-6


@pytest.mark.parametrize("stages", [1, 2])
def test_carried_coarse_tokens_go_on_with_what_the_blocks_computed(stages: int) -> None:
    """All coarse, a late decision is the coarse sequence through all blocks."""
    model = looking(2, carries=True, stages=stages)
    picture = images(2, 40, 24)
    pyramid = model.pyramid(picture)
    layout = build_layout(uniform_splits(pyramid.grid, 2, split=False))
    plain = wrap(model.vit, Bright(), stages=stages)
    plain.embed = model.embed
    expected = plain.encode(plain.pyramid(picture), layout)
    assert relative(model.encode(pyramid, layout).tokens, expected.tokens) < 1e-5


def test_carried_children_add_what_their_ancestor_learned() -> None:
    model = looking(1, carries=True)
    picture = images(1)
    pyramid = model.pyramid(picture)
    layout = model.decide(pyramid, picture)
    coarse = build_layout(uniform_splits(pyramid.grid, 1, split=False))
    start = model.pack(pyramid, coarse)
    change = model.run(start.tokens, model.streams(start, coarse), stop=1)[0] - start.tokens
    packed = model.pack(pyramid, layout)
    x = packed.tokens.clone()
    x[packed.prefix_index[0]] += change[start.prefix_index[0]]
    for index in range(layout.total):
        row, col = int(layout.row[index]) // 2, int(layout.col[index]) // 2
        x[packed.patch_index[index]] += change[start.patch_index[2 * row + col]]
    expected, _ = model.run(x, model.streams(packed, layout), start=1)
    assert relative(model.encode(pyramid, layout).tokens, model.vit.norm(expected)) < 1e-5


def test_gradients_reach_the_first_blocks_only_where_their_work_is_carried() -> None:
    for carries in (False, True):
        model = looking(1, carries=carries).train()
        pyramid = model.pyramid(images(2))
        assert pyramid.look is not None
        assert pyramid.look.tokens.requires_grad == carries


def test_rollouts_share_the_look_of_their_image() -> None:
    model = looking(1, carries=True)
    picture = images(2)
    pyramid = model.pyramid(picture)
    splits = model.splits(pyramid, picture)
    twice = type(splits)(tuple(mask.repeat(2, 1, 1) for mask in splits.masks), splits.grid)
    once, both = (model.encode(pyramid, build_layout(part)) for part in (splits, twice))
    torch.testing.assert_close(both.tokens, once.tokens.repeat(2, 1), atol=1e-5, rtol=1e-5)


def test_a_tap_before_the_decision_is_refused() -> None:
    with pytest.raises(SplitError, match="tap 0: the sequence passes blocks 1 to 2"):
        looking(1, carries=True).features(images(1), taps=[0])


def test_context_without_depth_is_refused() -> None:
    model = wrap(tiny_vit(), Seen(0))
    with pytest.raises(SplitError, match="needs a policy with depth"):
        model(images(1))


@pytest.mark.parametrize("name", ["look", "late", "xattn_context"])
@pytest.mark.parametrize("stages", [1, 2])
def test_registered_policies_with_context(name: str, stages: int) -> None:
    model = wrap(tiny_vit(depth=3), name, stages=stages).eval()
    assert model(images(2, 40, 24)).shape == (2, 5)
    assert (model.depth, model.carries) == {"look": (1, False), "late": (1, True), "xattn_context": (0, False)}[name]


def test_a_depth_beyond_the_backbone_is_refused() -> None:
    with pytest.raises(SplitError, match=r"policy.depth=3: a backbone of 3 blocks allows at most 2"):
        wrap(tiny_vit(depth=3), {"name": "late", "depth": 3})


def test_a_look_counts_in_the_flops_and_carrying_saves_them() -> None:
    """At one half of the tokens in every block: beside the mixed sequence, or in its place."""
    picture = images(1)
    plain, look, late = wrap(tiny_vit(depth=3), Bright()), looking(2), looking(2, carries=True)
    layout = look.tokenize(picture)
    tokens, coarse = int(layout.counts), 4
    mixed, once = (float(backbone_flops(plain.vit, n)) for n in (tokens, coarse))
    assert forward_flops(plain, layout).item() == mixed
    embedding = 2 * plain.vit.patch_embed.proj.weight.numel()
    blocks = (once - coarse * embedding) / 3
    assert forward_flops(look, layout).item() == pytest.approx(mixed + 2 * blocks + coarse * embedding)
    assert forward_flops(late, layout).item() == pytest.approx(
        (mixed - tokens * embedding) / 3 + 2 * blocks + coarse * embedding
    )
