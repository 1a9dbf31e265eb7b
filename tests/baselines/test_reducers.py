"""Every reducer on every family of ViT: the timm model at no reduction, its own definition otherwise."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

import naive_baselines as naive
import split_baselines
from split_baselines.tome import rates
from split_core import registry
from split_core.errors import SplitError
from split_core.flops import backbone_flops, layer_flops
from split_core.packing import area_mean
from tiny import FAMILIES, ROTARY, images, relative, tiny_vit

IDLE: dict[str, dict[str, Any]] = {
    "tome": {"r": 0}, "dtem": {"r": 0}, "evit": {"keep": 1}, "dynamicvit": {"keep": 1}, "resize": {"scale": 1}
}  # fmt: skip
"""Settings at which each reducer leaves every token."""
PLAIN = ("vit", "registers", "qk_norm", "dinov2", "deit3", "clip", "gap", "post_norm", "eva_post_norm", *ROTARY)
UNREDUCED = ("parallel", "parallel_things")
REDUCED = [family for family in FAMILIES if family not in UNREDUCED]


def has_class(family: str) -> bool:
    return FAMILIES[family].get("class_token", True)


@pytest.mark.parametrize("family", UNREDUCED)
def test_blocks_without_a_place_are_refused(family: str) -> None:
    with pytest.raises(SplitError, match="no place to reduce"):
        split_baselines.apply(tiny_vit(family), "tome")


def test_all_reducers_of_the_distribution_are_tested() -> None:
    ours = {n for n, r in registry.entries("reducer").items() if r.entry.target.startswith("split_baselines")}
    assert ours == set(IDLE)


@pytest.mark.parametrize("family", REDUCED)
@pytest.mark.parametrize("name", IDLE)
def test_without_reduction_it_is_the_timm_model(family: str, name: str) -> None:
    if name == "evit" and not has_class(family):
        pytest.skip("refused")
    vit = tiny_vit(family)
    reduced = split_baselines.apply(vit, name, **IDLE[name]).eval()
    with torch.no_grad():
        assert relative(reduced(images(2)), vit(images(2))) < 1e-5


@pytest.mark.parametrize("family", REDUCED)
@pytest.mark.parametrize("name", IDLE)
def test_layers_read_as_many_tokens_as_planned_and_reported(family: str, name: str) -> None:
    if name == "evit" and not has_class(family):
        pytest.skip("refused")
    vit = tiny_vit(family, depth=4)
    reduced = split_baselines.apply(vit, name, budget=0.6).eval()
    seen: list[int] = []
    for block in vit.blocks:
        for norm in (block.norm1, block.norm2):
            norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel() // 32 // 3))
    with torch.no_grad():
        reduced(images(3))
    expected = [count for pair in reduced.plan(reduced.config, 16) for count in pair]
    assert [n - vit.num_prefix_tokens for n in seen] == expected
    assert reduced.layout is not None
    assert [count for pair in reduced.layout.layers for count in pair] == expected
    assert reduced.layout.token_fraction.tolist() == pytest.approx([sum(expected) / len(expected) / 16] * 3)


@pytest.mark.parametrize("budget", [0.9, 0.75, 0.6])
@pytest.mark.parametrize("name", IDLE)
def test_a_budget_takes_the_weakest_settings_within_its_flops(name: str, budget: float) -> None:
    vit = tiny_vit(img_size=80, depth=4)
    reduced = split_baselines.apply(vit, name, budget=budget)
    allowed = backbone_flops(vit, budget * 100)
    spent = layer_flops(vit, reduced.plan(reduced.config, 100))
    assert spent <= allowed * (1 + 1e-9)
    weaker = [layer_flops(vit, reduced.plan(c, 100)) for c in reduced.strengths((10, 10))]
    assert weaker[0] == backbone_flops(vit, 100)
    assert not any(spent < other <= allowed for other in weaker[: weaker.index(spent)])
    assert spent > 0.8 * allowed


def test_a_budget_out_of_reach_is_one_line() -> None:
    with pytest.raises(SplitError, match=r"ToMe cannot be matched to budget 0\.1: .* its own fewest are 0\.\d+"):
        split_baselines.apply(tiny_vit(), "tome", budget=0.1)
    with pytest.raises(SplitError, match="not a token fraction"):
        split_baselines.apply(tiny_vit(), "tome", budget=0.0)


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("family", PLAIN)
def test_tome_is_what_it_is_written_out(family: str, proportional: bool) -> None:
    vit = tiny_vit(family, depth=3)
    reduced = split_baselines.apply(vit, "tome", r=(4, 3, 2), proportional=proportional).eval()
    batch = images(2)
    with torch.no_grad():
        features = reduced.forward_features(batch)
        for i in range(2):
            tokens, cells = naive.tome(vit, batch[i], [4, 3, 2], proportional=proportional)
            mine = features.tokens.unflatten(0, (2, -1))[i]
            torch.testing.assert_close(mine, tokens, rtol=1e-3, atol=1e-4)
            owner = features.layout.owner[i].flatten() - i * len(cells)
            for place, group in enumerate(cells):
                assert (owner == place).nonzero().flatten().tolist() == sorted(group)


@pytest.mark.parametrize("family", ["dinov2", "post_norm", "rope_mixed"])
def test_dtem_deployed_is_tome_on_its_own_embedding(family: str) -> None:
    vit = tiny_vit(family, depth=3)
    reduced = split_baselines.apply(vit, "dtem", r=3).eval()
    batch = images(2)

    def metric(index: int, x: torch.Tensor) -> torch.Tensor:
        return reduced.metric[index](x)

    with torch.no_grad():
        features = reduced.forward_features(batch)
        for i in range(2):
            tokens, _ = naive.tome(vit, batch[i], [3, 3, 3], metric=metric)
            torch.testing.assert_close(features.tokens.unflatten(0, (2, -1))[i], tokens, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", [f for f in PLAIN if has_class(f)])
def test_evit_is_what_it_is_written_out(family: str) -> None:
    vit = tiny_vit(family, depth=3)
    reduced = split_baselines.apply(vit, "evit", keep=0.6, at=(0, 2)).eval()
    batch = images(2)
    with torch.no_grad():
        features = reduced.forward_features(batch)
        for i in range(2):
            mine = features.tokens.unflatten(0, (2, -1))[i]
            torch.testing.assert_close(mine, naive.evit(vit, batch[i], 0.6, (0, 2)), rtol=1e-3, atol=1e-4)


def test_evit_without_fusing_forgets() -> None:
    vit = tiny_vit(depth=4)
    fused, bare = (split_baselines.apply(vit, "evit", keep=0.5, at=(1,), fuse=fuse).eval() for fuse in (True, False))
    with torch.no_grad():
        fused(images(2)), bare(images(2))
    assert fused.layout is not None
    assert bare.layout is not None
    assert (fused.layout.lengths, bare.layout.lengths) == ((9, 9), (8, 8))
    assert (fused.layout.owner >= 0).all()
    assert (bare.layout.owner < 0).sum((1, 2)).tolist() == [8, 8]
    assert fused.layout.area.view(2, -1)[:, -1].tolist() == [8, 8]


@pytest.mark.parametrize("family", ["registers", "post_norm", "dinov3", "rope_mixed"])
def test_dynamicvit_keeps_what_its_predictors_prefer(family: str) -> None:
    vit = tiny_vit(family, depth=4)
    reduced = split_baselines.apply(vit, "dynamicvit", keep=0.5, at=(0, 2)).eval()
    batch = images(2)
    with torch.no_grad():
        features = reduced.forward_features(batch)
        expected = [naive.dynamicvit(vit, image, reduced.predictors, {0: 8, 2: 4}) for image in batch]
    torch.testing.assert_close(features.tokens.unflatten(0, (2, -1)), torch.stack(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["gap", "dinov3", "rope_mixed"])
def test_resize_is_the_model_on_the_smaller_image(family: str) -> None:
    vit = tiny_vit(family)
    small = tiny_vit(family, img_size=24)
    state = {k: v for k, v in vit.state_dict().items() if k != "pos_embed"}
    small.load_state_dict(state, strict=False)
    reduced = split_baselines.apply(vit, "resize", grid=(3, 3)).eval()
    with torch.no_grad():
        if small.pos_embed is not None:
            small.pos_embed.copy_(reduced.embed.positions.patches(reduced.embed.grid((24, 24)))[None])
        shrunk = nn.functional.interpolate(images(2), size=(24, 24), mode="bicubic", antialias=True)
        torch.testing.assert_close(reduced(images(2)), small(shrunk), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", IDLE)
def test_dense_maps_have_the_cells_of_the_image_and_keep_what_is_constant(name: str) -> None:
    vit = tiny_vit(depth=4, img_size=48)
    reduced = split_baselines.apply(vit, name, budget=0.6).eval()
    with torch.no_grad():
        features = reduced.forward_features(images(2, 48), taps=(0, 2))
        assert features.dense().shape == (2, 32, 6, 6)
        for tap, dense in enumerate(reduced.features(images(2, 48), (0, 2))):
            torch.testing.assert_close(dense, features.dense(tap))
            assert dense.shape == (2, 32, 6, 6)
        # every token the same: unmerged or enlarged, the map is that constant wherever a token is left
        constant = torch.ones_like(features.tokens)
    kept = features.layout.owner >= 0
    dense = type(features)(constant, features.packed, features.layout).dense()
    assert torch.equal(dense, kept[:, None].expand(-1, 32, -1, -1).float())
    if name not in ("dynamicvit",):
        assert kept.all()
        torch.testing.assert_close(area_mean(features.patches, features.layout), features.dense().mean((2, 3)))


def test_unmerged_tokens_are_the_means_over_the_cells_that_merged() -> None:
    vit = tiny_vit(depth=1)
    reduced = split_baselines.apply(vit, "tome", r=8).eval()
    with torch.no_grad():
        dense = reduced.forward_features(images(1)).dense()[0].flatten(1)
        owner = reduced.layout.owner.flatten()  # type: ignore[union-attr]
    assert len(owner.unique()) == 8
    for token in owner.unique():
        assert (dense[:, owner == token] == dense[:, owner == token][:, :1]).all()


@pytest.mark.parametrize("size", [(32, 32), (48, 24), (30, 33), (8, 8)])
@pytest.mark.parametrize("family", ["vit", "eva02", "rope_mixed"])
@pytest.mark.parametrize("name", IDLE)
def test_any_size_of_image(name: str, family: str, size: tuple[int, int]) -> None:
    reduced = split_baselines.apply(tiny_vit(family), name).eval()
    with torch.no_grad():
        features = reduced.forward_features(images(2, *size))
    rows, cols = -(-size[0] // 8), -(-size[1] // 8)
    assert features.dense().shape == (2, 32, rows, cols)
    assert features.layout.valid_cells.tolist() == [rows * cols] * 2


@pytest.mark.parametrize("family", ["vit", "dinov3", "rope_mixed"])
@pytest.mark.parametrize("name", IDLE)
def test_images_do_not_touch_each_other(name: str, family: str) -> None:
    reduced = split_baselines.apply(tiny_vit(family, depth=4), name, budget=0.6).eval()
    with torch.no_grad():
        together = reduced(images(3))
        alone = torch.cat([reduced(image[None]) for image in images(3)])
        assert reduced(images(3)[:0]).shape == (0, 5)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["vit", "rope_mixed"])
@pytest.mark.parametrize("name", IDLE)
def test_every_parameter_learns_and_nothing_else_changes(name: str, family: str) -> None:
    vit = tiny_vit(family, depth=4)
    before = {k: v.clone() for k, v in vit.state_dict().items()}
    reduced = split_baselines.apply(vit, name, budget=0.6).train()
    torch.manual_seed(0)
    features = reduced.forward_features(images(4))
    loss = reduced.forward_head(features).square().mean() + sum(value for _, value in features.losses)
    loss.backward()
    still = [n for n, p in reduced.named_parameters() if p.grad is None]
    assert still == []
    own = [p for n, p in reduced.named_parameters() if not n.startswith("vit.")]
    assert all(p.grad.isfinite().all() for p in own)
    # all but the last merging embedding, whose merges only the last MLP sees, and the class token does not
    moved = [bool(p.grad.abs().sum() > 0) for p in own]
    assert sum(moved) >= len(moved) - (2 if name == "dtem" else 0)
    assert all(torch.equal(before[k], v) for k, v in vit.state_dict().items())


def test_dynamicvit_trains_towards_its_share() -> None:
    reduced = split_baselines.apply(tiny_vit(depth=4), "dynamicvit", keep=0.5, at=(1,), distill_weight=0).train()
    for name, parameter in reduced.named_parameters():
        parameter.requires_grad_(name.startswith("predictors"))
    optimizer = torch.optim.Adam(reduced.predictors.parameters(), lr=0.02)
    torch.manual_seed(0)
    shares = []
    for step in range(40):
        features = reduced.forward_features(images(8, seed=step))
        ((_, loss),) = features.losses
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert features.weight is not None
        assert set(features.weight.unique().tolist()) <= {0.0, 1.0}
        shares.append(features.weight.detach().mean().item())
    assert abs(sum(shares[-10:]) / 10 - 0.5) < 0.06
    assert features.tokens.shape[0] == 8 * 17, "in training every token stays in the sequence"


@pytest.mark.parametrize("family", ["vit", "post_norm", "dinov3", "rope_mixed"])
def test_dynamicvit_s_teacher_is_the_dense_model(family: str) -> None:
    vit = tiny_vit(family, depth=2)
    reduced = split_baselines.apply(vit, "dynamicvit", keep=0.5, at=(1,)).train()
    with torch.no_grad():
        reduced.predictors[0].leave[-2].weight.zero_()
        reduced.predictors[0].leave[-2].bias.copy_(torch.tensor([50.0, -50.0]))  # all kept
        features = reduced.forward_features(images(2))
        expected = vit.forward_features(images(2))
    torch.testing.assert_close(features.tokens.unflatten(0, (2, -1)), expected, rtol=1e-4, atol=1e-4)
    assert dict(features.losses)["distill"].item() < 1e-8


def test_models_without_rotary_positions_carry_no_cells() -> None:
    for family, carried in (("dinov2", False), ("dinov3", True)):
        tokens = split_baselines.apply(tiny_vit(family), "tome").enter(images(1))
        assert [x is not None for x in (tokens.table, tokens.cell, tokens.rope(0))] == [carried] * 3


def test_a_dropped_key_weighs_nothing_in_training() -> None:
    reduced = split_baselines.apply(tiny_vit("registers", depth=2), "dynamicvit", keep=0.5, at=(1,)).train()
    with torch.no_grad():
        reduced.predictors[0].leave[-2].weight.zero_()
        reduced.predictors[0].leave[-2].bias.copy_(torch.tensor([-50.0, 50.0]))  # all dropped
        features = reduced.forward_features(images(2))
        x = reduced.vit.blocks[0](reduced.embed(images(2)))
        expected = reduced.vit.norm(reduced.vit.blocks[1](x[:, :5]))
    torch.testing.assert_close(features.prefix, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["sdpa", "masked"])
@pytest.mark.parametrize("name", ["tome", "evit"])
def test_backends_agree(name: str, backend: str) -> None:
    vit = tiny_vit(depth=3, embed_dim=36, num_heads=3)  # heads of 12 channels: the weight's extra channel is padded
    one, other = (split_baselines.apply(vit, name, attention=a).eval() for a in ("auto", backend))
    with torch.no_grad():
        torch.testing.assert_close(one(images(2)), other(images(2)), rtol=1e-4, atol=1e-5)


def test_under_bf16_autocast() -> None:
    vit = tiny_vit("qk_norm", depth=3)
    for name in IDLE:
        reduced = split_baselines.apply(vit, name).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            half = reduced(images(2))
        assert half.isfinite().all()


def test_the_timm_model_is_given_back_untouched() -> None:
    vit = tiny_vit()
    classes = [type(m) for m in vit.modules()]
    reduced = split_baselines.apply(vit, "tome", r=4)
    assert split_baselines.remove(reduced) is vit
    assert split_baselines.remove(vit) is vit
    assert [type(m) for m in vit.modules()] == classes
    assert set(reduced.state_dict()) == {f"vit.{key}" for key in vit.state_dict()}


def test_copies_and_pickles() -> None:
    reduced = split_baselines.apply(tiny_vit(), "tome", r=4).eval()
    with torch.no_grad():
        expected = reduced(images(1))
        for twin in (copy.deepcopy(reduced), pickle.loads(pickle.dumps(reduced))):
            assert twin.layout is None
            assert twin.embed.vit is twin.vit
            torch.testing.assert_close(twin(images(1)), expected)


def patched() -> nn.Module:
    vit = tiny_vit()
    vit.blocks[1].register_forward_hook(lambda _, __, out: out * 2)
    return vit


REFUSALS: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "class token": (lambda: tiny_vit("gap"), "evit", {}, "no class token"),
    "blocks": (lambda: tiny_vit(block_fn=ParallelScalingBlock), "tome", {}, "blocks.0 is a ParallelScalingBlock"),
    "patched": (patched, "tome", {}, r"blocks\.1 .* has forward hooks"),
    "twice": (lambda: split_baselines.apply(tiny_vit(), "tome"), "evit", {}, "already wrapped"),
    "not a ViT": (lambda: nn.Linear(1, 1), "tome", {}, "cannot wrap a Linear"),
    "name": (tiny_vit, "tmoe", {}, "Did you mean tome"),
    "setting": (tiny_vit, "tome", {"rr": 3}, r"tome: no setting is called 'rr'\. Did you mean r\?"),
    "value": (tiny_vit, "evit", {"keep": 2}, "evit: keep=2"),
    "schedule": (tiny_vit, "tome", {"r": [1, 2, 3]}, "the model has 2 blocks"),
    "stage": (tiny_vit, "evit", {"at": [5]}, r"at=\[5\]"),
    "grid": (tiny_vit, "resize", {"grid": (5, 5)}, "enlarges"),
}


@pytest.mark.parametrize(("model", "name", "settings", "line"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_done_is_one_line(model: Any, name: str, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SplitError, match=line) as caught:
        split_baselines.apply(model(), name, **settings)
    assert "\n" not in str(caught.value)


def test_rates_of_more_tokens_than_there_are_merge_half() -> None:
    vit = tiny_vit(depth=3)
    reduced = split_baselines.apply(vit, "tome", r=100).eval()
    with torch.no_grad():
        reduced(images(1))
    assert reduced.layout is not None
    assert reduced.layout.layers == ((16, 8), (8, 4), (4, 2))
    assert rates(reduced.config, 3) == [100] * 3
