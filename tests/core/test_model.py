"""SplitViT: the timm model when every parent splits, and the same result however images are batched."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from reads import Reads, counted_forward
from split_core.backbone.blocks import BLOCKS
from split_core.decision import Decision
from split_core.errors import SplitError
from split_core.features import check_taps
from split_core.model import SplitViT, check_images
from split_core.policy import SplitPolicy
from split_core.quadtree import build_layout, uniform_splits
from split_core.reducer import build_reducer
from split_core.types import Grid, Layout, Splits
from split_core.wrapping import check_options, wrap
from strategies import bits
from tiny import FAMILIES, ROTARY, Bright, Everywhere, Linear, Logits, images, jitter, relative, tiny_vit


def dense(vit: VisionTransformer, stages: int = 2, **options: Any) -> SplitViT:
    return wrap(vit, Everywhere(), stages=stages, **options).eval()


def gradients(vit: VisionTransformer, output: Tensor) -> dict[str, Tensor]:
    vit.zero_grad()
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights).sum().backward()
    return {name: p.grad.clone() for name, p in vit.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_all_fine_is_the_timm_model_forward_and_gradient(family: str, mode: str) -> None:
    vit = tiny_vit(family)
    model = dense(vit)
    model.train(mode == "train")
    picture = images(3)
    expected, own = vit(picture), model(picture)
    assert model.layout is not None
    assert model.layout.lengths == (16, 16, 16)
    assert relative(own.detach(), expected.detach()) <= 1e-5
    reference, packed = gradients(vit, expected), gradients(vit, own)
    assert reference.keys() == packed.keys()
    for name, gradient in reference.items():
        assert (packed[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("family", ["vit", "gap", "registers", "deit3", "siglip", "distilled", "eva", *ROTARY])
@pytest.mark.parametrize("size", [(48, 48), (16, 64), (24, 40)], ids=str)
def test_all_fine_at_another_size_is_timms_dynamic_model(family: str, size: tuple[int, int]) -> None:
    expected = tiny_vit(family, dynamic_img_size=True)(images(2, *size))
    own = dense(tiny_vit(family))(images(2, *size))
    assert relative(own.detach(), expected.detach()) <= 1e-5


def test_features_of_all_fine_are_timms_token_by_token() -> None:
    vit = tiny_vit("registers")
    expected = vit.forward_features(images(2))
    features = dense(vit).forward_features(images(2))
    torch.testing.assert_close(features.prefix, expected[:, :5], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features.patches.view(2, 16, 32), expected[:, 5:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features.dense().flatten(2).transpose(1, 2), expected[:, 5:], atol=1e-5, rtol=1e-5)


SIZES = [(32, 32), (230, 210), (96, 96), (15, 40), (8, 64), (64, 8), (1, 1), (33, 31)]


@pytest.mark.parametrize(
    "family", ["vit", "gap", "gap_with_class_token", "registers_without_position", "clip", "siglip", *ROTARY]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_packed_batch_is_its_images_one_by_one(family: str, size: tuple[int, int]) -> None:
    model = wrap(tiny_vit(family), Bright(), stages=2).eval()
    jitter(model.embed, seed=3)
    picture = images(3, *size)
    with torch.no_grad():
        together = model(picture)
        layout = model.layout
        one_by_one = torch.cat([model(image[None]) for image in picture])
    assert layout is not None
    assert layout.grid == Grid((-(-size[0] // 8), -(-size[1] // 8)), 2)
    assert together.isfinite().all()
    assert relative(together, one_by_one) <= 1e-5


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 3), st.data())
@settings(max_examples=20)
def test_any_partition_packed_is_that_partition_alone(height: int, width: int, stages: int, data) -> None:
    grid = Grid((-(-height // 8), -(-width // 8)), stages)
    masks = tuple(data.draw(bits(2, *grid.shape(s))) for s in range(1, stages + 1))
    model = MODELS[stages]
    picture = images(2, height, width)
    with torch.no_grad():
        features = model.forward_features(picture, layout=build_layout(Splits(masks, grid)))
        together = model.forward_head(features)
        for i in range(2):
            alone = build_layout(Splits(tuple(mask[i : i + 1] for mask in masks), grid))
            assert relative(together[i], model(picture[i : i + 1], layout=alone)[0]) <= 1e-5
    assert features.dense().shape == (2, 32, *grid.cells)


MODELS = {
    stages: jitter(wrap(tiny_vit(), Bright(), stages=stages), seed=stages, spread=0.05).eval() for stages in (1, 2, 3)
}


@pytest.mark.parametrize("attention", ["sdpa", "masked"])
@pytest.mark.parametrize("family", ["vit", "gap"])
def test_a_batch_of_none(family: str, attention: str) -> None:
    model = wrap(tiny_vit(family), Bright(), stages=2, attention=attention).eval()
    for size in ((32, 32), (20, 9)):
        features = model.forward_features(images(0, *size))
        assert model(images(0, *size)).shape == (0, 5)
        assert features.dense().shape == (0, 32, -(-size[0] // 8), -(-size[1] // 8))
        assert features.layout.token_fraction.shape == (0,)


def test_backends_agree_on_the_whole_model_forward_and_gradient() -> None:
    results = []
    for attention in ("sdpa", "masked"):
        vit = tiny_vit("qk_norm")
        model = wrap(vit, Bright(), stages=2, attention=attention)
        out = model(images(4, 64))
        assert model.layout is not None
        assert len(set(model.layout.lengths)) > 1
        results.append((out.detach(), gradients(vit, out)))
    assert relative(results[0][0], results[1][0]) <= 1e-5
    for name, gradient in results[1][1].items():
        assert (results[0][1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_area_pooling_weighs_tokens_by_what_they_cover() -> None:
    for pooling in ("area", "token"):
        vit = tiny_vit("gap")
        model = wrap(vit, Bright(), stages=2, pooling=pooling).eval()
        features = model.forward_features(images(2, 40))
        parts = features.patches.split(features.layout.lengths)
        by_token = torch.stack([part.mean(0) for part in parts])
        expected = features.dense().mean((2, 3)) if pooling == "area" else by_token
        torch.testing.assert_close(model.forward_head(features), vit.head(vit.fc_norm(expected)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["vit", "eva02", "distilled"])
def test_gradient_checkpointing_changes_memory_and_no_value(family: str, monkeypatch) -> None:
    runs: list[int] = []
    block = type(tiny_vit(family).blocks[0])
    execute = BLOCKS[block]
    monkeypatch.setitem(BLOCKS, block, lambda *args: (runs.append(1), execute(*args))[1])
    results = []
    for enable in (False, True):
        vit = tiny_vit(family)
        model = wrap(vit, Bright(), stages=2)
        vit.set_grad_checkpointing(enable)
        runs.clear()
        out = model(images(3, 40))
        results.append((out.detach(), gradients(vit, out), len(runs)))
        with torch.no_grad():
            assert torch.equal(model(images(3, 40)), results[0][0])
    (plain, expected, once), (again, own, twice) = results
    assert torch.equal(again, plain)
    assert (once, twice) == (2, 4)  # every block runs again in the backward
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, msg=name)


def test_both_heads_of_a_distilled_model() -> None:
    vit = tiny_vit("distilled")
    model = dense(vit)
    vit.set_distilled_training()
    model.train()
    for own, expected in zip(model(images(2)), vit(images(2)), strict=True):
        assert relative(own.detach(), expected.detach()) <= 1e-5


def test_drop_path_of_the_whole_model_acts_per_image() -> None:
    """With everything dropped in the blocks but for some images, copies of one image differ; each is one of few."""
    model = wrap(tiny_vit(drop_path_rate=0.6, depth=2), Everywhere()).train()
    torch.manual_seed(0)
    out = model(images(1).repeat(24, 1, 1, 1)).detach()
    distinct = {tuple(round(x, 3) for x in row) for row in out.tolist()}
    assert 2 <= len(distinct) <= 4  # two branches of one block, each kept or not


# ---------------------------------------------------------------- decisions


def test_tokenize_is_the_decision_alone_and_can_be_forced() -> None:
    model = wrap(tiny_vit(), Bright(), stages=2).eval()
    picture = images(3, 64)
    layout = model.tokenize(picture)
    assert model.layout is None
    own = model(picture)
    assert model.layout is not None
    assert model.layout.lengths == layout.lengths
    assert torch.equal(model.layout.owner, layout.owner)
    torch.testing.assert_close(model(picture, layout=layout), own)
    coarse = build_layout(uniform_splits(layout.grid, 3, split=False))
    features = model.forward_features(picture, layout=coarse)
    assert features.layout is coarse
    assert model.layout is coarse
    assert features.tokens.shape[0] == 3 * (4 + 1)
    assert relative(model.forward_head(features).detach(), own.detach()) > 1e-3


def test_a_layout_of_other_images_is_refused() -> None:
    model = wrap(tiny_vit(), Bright()).eval()
    with pytest.raises(ValueError, match="the layout is for 8x8 patches"):
        model(images(2, 32), layout=model.tokenize(images(2, 64)))
    with pytest.raises(ValueError, match="a layout of 3 images does not fit a pyramid of 2"):
        model(images(2), layout=model.tokenize(images(3)))


def test_nothing_of_a_decision_carries_a_gradient() -> None:
    model = wrap(tiny_vit(), Linear(), stages=2)
    model(images(2)).sum().backward()
    assert all(p.grad is None for p in model.policy.parameters())
    assert model.embed.zero.weight.grad is not None
    assert all(p.grad is not None for p in model.vit.parameters())


class Seen(SplitPolicy):
    """Remembers what it was shown."""

    def forward(self, view) -> Tensor:
        self.views = [*getattr(self, "views", []), view]
        return view.parents[..., 0]


def test_a_policy_sees_every_stage_and_what_the_caller_adds() -> None:
    model = wrap(tiny_vit(), Seen(), stages=3).eval()
    picture, generator = images(2, 70, 50), torch.Generator()
    objects = torch.zeros(2, 16, 8, dtype=torch.bool)
    model.tokenize(picture, objects=objects, generator=generator)
    views = model.policy.views
    assert sorted(view.scale for view in views) == [1, 2, 3]
    for view in views:
        assert view.images is picture
        assert view.objects is objects
        assert view.generator is generator
        assert view.parents.shape == (2, view.grid.size(view.scale), 32)


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.7, 1.0])
def test_an_unlearned_policy_with_a_budget_spends_it_exactly_per_image(budget: float) -> None:
    model = wrap(tiny_vit(), Bright(), stages=1, budget=budget).eval()
    assert model.decision == Decision("image", budget)
    layout = model.tokenize(images(3, 80))
    assert set(layout.lengths) == {25 + 3 * int((budget * 100 - 25 + 1e-6) // 3)}


def test_rules_by_default() -> None:
    assert wrap(tiny_vit(), Bright()).decision == Decision("threshold")
    assert wrap(tiny_vit(), Linear(), budget=0.5).decision == Decision("threshold", 0.5)
    assert wrap(tiny_vit(), Bright(), budget=0.5, rule="batch").decision == Decision("batch", 0.5)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"stages": 0}, "stages=0: a whole number of at least 1 is needed"),
        ({"policy": "entrpy"}, "no policy is called 'entrpy'. Did you mean entropy"),
        ({"budget": 1.5}, "budget 1.5 is not a token fraction"),
        ({"attention": "flash"}, "no attention is called 'flash'"),
        ({"attention": "varlen"}, "attention backend 'varlen' is unavailable on cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(SplitError) as caught:
        wrap(tiny_vit(), **{"policy": Bright(), **arguments})(images(1))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["dense", "coarse", "entropy", "cosine", "xattn"])
def test_registered_policies_by_name(name: str) -> None:
    model = wrap(tiny_vit(img_size=64), name, budget=0.5).eval()
    fractions = model.tokenize(images(2, 64)).token_fraction
    if name in ("dense", "coarse"):
        assert (fractions == {"dense": 1.0, "coarse": 0.25}[name]).all()
    elif name != "xattn":
        assert (fractions <= 0.5).all()
        assert (fractions > 0.45).all()
    assert model(images(2, 64)).shape == (2, 5)


@pytest.mark.parametrize(
    ("tensor", "line"),
    [
        (torch.zeros(3, 32, 32), r"images must be \(batch, channels, height, width\); got shape \(3, 32, 32\)"),
        (torch.zeros(2, 1, 32, 32), r"the model wants 3 channels; got 1 \(shape \(2, 1, 32, 32\)\)"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "images must be normalised floats; got torch.uint8"),
        (torch.zeros(2, 3, 0, 32), r"images have no pixels: shape \(2, 3, 0, 32\)"),
    ],
    ids=["no_batch", "grey", "bytes", "empty"],
)
def test_images_of_another_kind_are_refused_in_one_line(tensor: Tensor, line: str) -> None:
    with pytest.raises(SplitError, match=line):
        check_images(tensor, 3)


# ---------------------------------------------------------------- what torch does to modules


def test_unwrap_gives_back_the_model_as_it_was() -> None:
    vit = tiny_vit()
    before, keys = vit(images(2)).detach(), list(vit.state_dict())
    model = wrap(vit, Bright(), stages=2).eval()
    model(images(2, 50))
    assert model.unwrap() is vit
    assert list(vit.state_dict()) == keys
    assert torch.equal(vit(images(2)), before)
    again = wrap(model.unwrap(), Everywhere()).eval()
    assert relative(again(images(2)).detach(), before) <= 1e-5


def moved_model(family: str = "vit") -> SplitViT:
    model = wrap(tiny_vit(family), Linear(), stages=2).eval()
    return jitter(model, seed=7, spread=0.02)  # type: ignore[return-value]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("family", ["vit", "eva02", "rope_mixed"])
def test_copies_are_equal_and_independent(family: str, clone) -> None:
    model, picture = moved_model(family), images(2, 40)
    with torch.no_grad():
        expected = model(picture)
        twin = clone(model)
        assert twin.layout is None
        assert torch.equal(twin(picture), expected)
        assert twin.embed.proj is twin.vit.patch_embed.proj
        assert twin.positions.vit is twin.vit
        assert twin.rope.vit is twin.vit
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        assert relative(twin(picture), expected) > 1e-2
        assert torch.equal(model(picture), expected)


@pytest.mark.parametrize("family", ["vit", "distilled", "rope_mixed"])
def test_state_dict_round_trip(family: str) -> None:
    model, picture = moved_model(family), images(2, 40)
    other = wrap(tiny_vit(family, seed=3), Linear(), stages=2).eval()
    with torch.no_grad():
        expected = model(picture)
        assert relative(other(picture), expected) > 1e-2
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(picture), expected)
    names = set(model.state_dict())
    assert {f"vit.{name}" for name in model.vit.state_dict()} < names
    assert len(names) == len(model.vit.state_dict()) + 4 + 2  # the pyramid and the policy, nothing twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", ["vit", "eva02", "dinov3", "pe", "rope_mixed"])
def test_other_precisions(family: str, dtype: torch.dtype, when: str) -> None:
    picture = images(2, 40)
    vit = tiny_vit(family)
    exact = wrap(copy.deepcopy(vit), Everywhere(), stages=2).eval()(picture).detach()
    model = wrap(vit.to(dtype) if when == "before" else vit, Linear(), stages=2).eval().to(picture.device)
    model = model.to(dtype) if when == "after" else model
    out = model(picture.to(dtype))
    assert out.dtype == dtype
    assert out.isfinite().all()
    model.policy = Everywhere()
    assert relative(model(picture.to(dtype)).detach().float(), exact) <= (1e-5 if dtype == torch.float64 else 5e-2)


@pytest.mark.parametrize("family", ["vit", "qk_norm", "gap", "no_positions", "siglip", "eva02", "rope_mixed"])
def test_autocast(family: str) -> None:
    vit, picture = tiny_vit(family), images(2, 32)
    model = wrap(vit, Bright(), stages=2).eval()
    layout = model.tokenize(picture)
    exact = model(picture, layout=layout).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(picture, layout=layout)
        out.float().sum().backward()
        assert model.tokenize(picture).batch == 2
    assert relative(out.detach().float(), exact) <= 5e-2
    assert all(p.grad is None or p.grad.isfinite().all() for p in vit.parameters())


@pytest.mark.parametrize("policy", [Bright(), "late", "look"])
def test_inference_mode_then_training(policy: Any) -> None:
    model = wrap(tiny_vit(), policy, stages=2).eval()
    model.vit.requires_grad_(False)
    with torch.inference_mode():
        expected = model(images(2)).clone()
    out = model(images(2))
    assert relative(out.detach(), expected) <= 1e-5
    out.sum().backward()
    assert model.embed.zero.weight.grad is not None


def test_a_model_made_in_inference_mode_runs_there_and_sees_its_edits() -> None:
    with torch.inference_mode():
        model, picture = wrap(tiny_vit(), Bright(), stages=2).eval(), images(2)
        before = model(picture)
        model.embed.zero.bias.add_(1.0)
        model.vit.pos_embed.mul_(2.0)
        after = model(picture)
        assert relative(after, before) > 1e-2
        twin = wrap(tiny_vit(), Bright(), stages=2).eval()
        twin.load_state_dict(model.state_dict())
        assert relative(twin(picture), after) <= 1e-6


def test_weights_put_in_place_of_others_are_seen_wherever_they_lie() -> None:
    model, picture = wrap(tiny_vit(), Bright(), stages=2).eval(), images(2)
    with torch.no_grad():
        for factor in (1.5, 0.5, 2.0, 0.25):
            model(picture)
            for _ in range(2):  # the second may get the memory of the first
                for weight in (model.embed.zero.weight, model.vit.patch_embed.proj.weight):
                    weight.data = torch.randn_like(weight) * factor
            now = model(picture)
            assert relative(now, model.train().eval()(picture)) <= 1e-5


@pytest.mark.parametrize("rule", ["image", "batch"])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (3, 30)])
def test_an_image_too_small_for_the_budget_stays_coarse(rule: str, size: tuple[int, int]) -> None:
    model = wrap(tiny_vit(), Bright(), stages=2, budget=0.1, rule=rule).eval()
    with torch.no_grad():
        assert model(images(2, *size)).isfinite().all()
    assert set(model.layout.scale.tolist()) == {2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 8}, "a coarse patch spans 2.8 fine ones"),
        ({"stages": 1, "budget": 0.2, "rule": "image"}, "budget 0.2 cannot be met"),
    ],
)
def test_what_cannot_be_met_at_the_models_own_size_is_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        wrap(tiny_vit(), Bright(), **options)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([1, 1], "should rise"),
        ([1, 0], "should rise"),
        (1, "should be a list of block numbers"),
        (["a"], "tap 'a': the sequence passes blocks 0 to"),
        ([-1], "tap -1: the sequence passes blocks 0 to"),
    ],
)
def test_taps_that_are_no_rising_blocks_are_one_line(taps: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        check_taps(taps, 0, 2)


def test_taps_out_of_order_are_refused_where_they_are_asked_for() -> None:
    for model in (wrap(tiny_vit(), Bright(), stages=1), build_reducer("tome", tiny_vit())):
        with pytest.raises(SplitError, match="should rise"):
            model.features(images(1), [1, 0])


def test_a_training_step_changes_what_eval_computes() -> None:
    model, picture = wrap(tiny_vit(), Bright(), stages=2), images(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        before = model.eval()(picture)
    layout = model.tokenize(picture)
    model.train()(picture, layout=layout).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        folded = model.eval()(picture, layout=layout)
    assert relative(folded, before) > 1e-3
    assert relative(folded, model(picture, layout=layout).detach()) <= 1e-5


# ---------------------------------------------------------------- device reads, number of operations


@pytest.mark.parametrize(
    "rule", [{"budget": 0.5}, {}, {"budget": 0.5, "rule": "batch"}], ids=["image", "threshold", "batch"]
)
@pytest.mark.parametrize("attention", ["sdpa", "masked"])
@pytest.mark.parametrize("family", ["registers", "eva02", "rope_mixed", "siglip"])
def test_a_forward_reads_the_device_once(family: str, rule: dict[str, Any], attention: str, monkeypatch) -> None:
    model = wrap(tiny_vit(family), Bright(), stages=2, attention=attention, **rule).eval()
    with torch.no_grad():
        model(images(3, 60, 44))  # the probe of the backend, the position table and the fold happen once
        seen = Reads(monkeypatch)
        model(images(3, 60, 44))
    assert seen.calls == ["tolist"]
    monkeypatch.undo()  # the dispatch mode looks below Python, at what masked indexing and the like read
    assert counted_forward(model, 3)[1] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0.5, "attention": "sdpa"},
        {"attention": "masked"},
        {"budget": 0.5, "rule": "batch", "attention": "masked"},
    ],
    ids=["uniform", "ragged", "batch_rule"],
)
@pytest.mark.parametrize("family", ["vit", "eva02", "rope_mixed", "pe"])
def test_the_number_of_operations_does_not_depend_on_the_batch(family: str, options: dict[str, Any]) -> None:
    model = wrap(tiny_vit(family), Bright(), stages=2, **options).eval()
    # sdpa's single call needs equal lengths, which the image rule gives where every split costs the same
    size = (64, 32) if options["attention"] == "sdpa" else (60, 44)
    counted_forward(model, 1, size)
    assert counted_forward(model, 2, size)[0] == counted_forward(model, 24, size)[0]


def test_a_coarse_batch_runs_as_few_tokens_as_it_says() -> None:
    """Tokens are left out, not masked."""
    model = wrap(tiny_vit(), Logits(), budget=0.25).eval()
    features = model.forward_features(images(4, 64))
    assert features.tokens.shape[0] == 4 * (64 // 4 + 1)


def test_the_layout_type_is_public() -> None:
    import split_core

    model = split_core.wrap(tiny_vit(), policy=Bright())
    assert isinstance(model, split_core.SplitViT)
    layout = model.tokenize(images(2))
    assert isinstance(layout, split_core.Layout)
    assert isinstance(layout, Layout)
    assert layout.counts.shape == layout.token_fraction.shape == (2,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "0.5"}, "budget='0.5': a number in"),
        ({"stages": True}, "stages=True: a whole number"),
        ({"policy": None}, "policy=None: a name"),
        ({"down": "bicubic"}, "down='bicubic': one of area, bilinear"),
        ({"pooling": "max"}, "pooling='max': one of area, token"),
        ({"poolin": "area"}, "Did you mean pooling"),
    ],
)
def test_an_argument_of_another_kind_is_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        check_options(**{"stages": 1, "policy": "entropy", "budget": None, **arguments})


def test_a_wrong_setting_of_a_policy_is_one_clear_line() -> None:
    with pytest.raises(SplitError, match=r"^policy\.tauu=3: ") as caught:
        wrap(tiny_vit("vit"), {"name": "entropy", "tauu": 3})
    assert "\n" not in str(caught.value)


def test_a_dense_policy_stays_dense_under_every_rule() -> None:
    for rule in ("image", "batch", "threshold"):
        model = wrap(tiny_vit("vit"), "dense", budget=0.5, rule=rule)
        assert model.tokenize(images(2)).token_fraction.tolist() == [1.0, 1.0]


def test_images_in_another_precision_are_named() -> None:
    with pytest.raises(SplitError, match=r"model is in torch\.float32 and the images in torch\.float64"):
        wrap(tiny_vit("vit"), "dense")(images(1).double())
