"""Blocks on a packed sequence, and which models are refused, each in one clear line."""

from __future__ import annotations

import copy
import types
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.layers import AttentionPoolPrr, PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.vision_transformer import Block, DiffParallelScalingBlock, VisionTransformer
from torch import Tensor, nn

from split_core.attention.masked import MaskedAttention
from split_core.attention.sdpa import SdpaAttention
from split_core.backbone.blocks import BLOCKS
from split_core.backbone.check import check_backbone
from split_core.backbone.pooling import pool_attention
from split_core.backbone.probe import probe
from split_core.backbone.stream import Stream, drop_path
from split_core.errors import SplitError
from split_core.packing import Segments
from split_core.wrapping import wrap
from tiny import FAMILIES, Bright, Everywhere, images, jitter, tiny_vit


def segments_of(*lengths: int) -> Segments:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Segments(starts, lengths, max(lengths))


@pytest.mark.parametrize("backend", [SdpaAttention(), MaskedAttention()], ids=["sdpa", "masked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_block_is_the_block_on_each_image_alone(family: str, backend) -> None:
    block = tiny_vit(family).blocks[0]
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    packed = BLOCKS[type(block)](block, x, Stream(segments_of(3, 7, 2), segments_of(3, 7, 2), backend))
    alone = torch.cat([block(part[None])[0] for part in x.split([3, 7, 2])])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_drop_path_drops_whole_images_and_each_on_its_own() -> None:
    block = tiny_vit(drop_path_rate=0.6).train().blocks[1]
    lengths = tuple([1, 5, 3, 2] * 10)
    torch.manual_seed(0)
    kept = drop_path(block.drop_path1, torch.ones(sum(lengths), 4), segments_of(*lengths))
    per_image = [part.unique().tolist() for part in kept.split(lengths)]
    assert all(len(values) == 1 for values in per_image)
    factors = {round(values[0], 4) for values in per_image}
    assert factors == {0.0, round(1 / 0.4, 4)}
    assert torch.equal(drop_path(block.eval().drop_path1, kept, segments_of(*lengths)), kept)


def test_drop_path_keeps_its_share_and_its_mean() -> None:
    block = tiny_vit(drop_path_rate=0.5).train().blocks[1]
    torch.manual_seed(0)
    ones = torch.ones(4000, 1)
    kept = drop_path(block.drop_path1, ones, segments_of(*[1] * 4000))
    assert float((kept == 0).float().mean()) == pytest.approx(0.5, abs=0.04)
    assert float(kept.mean()) == pytest.approx(1, abs=0.08)
    block.drop_path1.scale_by_keep = False
    assert set(drop_path(block.drop_path1, ones, segments_of(*[1] * 4000)).unique().tolist()) == {0.0, 1.0}


def with_pool(pool: nn.Module) -> VisionTransformer:
    model = tiny_vit("siglip")
    model.attn_pool = pool
    return model


def patched(kind: str, family: str = "vit") -> VisionTransformer | Eva:
    model = tiny_vit("siglip" if kind.startswith("pool") else family)
    block = model.blocks[1]
    if kind == "block":
        block.forward = types.MethodType(lambda self, x: Block.forward(self, x) + 1, block)
    elif kind == "attention":
        inner = block.attn.forward
        block.attn.forward = lambda x, **options: inner(x.flip(1), **options)
    elif kind == "hook":
        block.register_forward_hook(lambda module, args, out: 2 * out)
    elif kind == "pool":
        model.attn_pool.register_forward_hook(lambda module, args, out: 2 * out)
    elif kind == "pool_positions":
        model.attn_pool.pos_embed = nn.Parameter(torch.zeros(16, 32))
    elif kind == "rope_kind":
        model.rope = nn.Identity()
    elif kind == "rope":
        inner_rope = model.rope.get_embed
        model.rope.get_embed = lambda *args, **options: inner_rope(*args, **options).roll(1, 0)
    return model


class Subclassed(VisionTransformer):
    def _pos_embed(self, x: Tensor) -> Tensor:
        return super()._pos_embed(x).flip(1)


class OwnHead(VisionTransformerDistilled):
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return x.mean(1)


class OwnAttention(timm.models.vision_transformer.Attention):
    pass


class OwnEmbed(PatchEmbed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Adapter(nn.Module):
    """Does nothing until it has learned something."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * x


def overlapping() -> VisionTransformer | Eva:
    model = tiny_vit()
    model.patch_embed.proj.stride = (4, 4)
    return model


def with_forward(path: str) -> VisionTransformer | Eva:
    model = tiny_vit()
    module = model.get_submodule(path)
    inner = module.forward
    module.forward = lambda x: 2 * inner(x)
    return model


def with_adapter() -> VisionTransformer | Eva:
    model = tiny_vit()
    model.blocks[0].drop_path1 = Adapter()
    return model


SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
REFUSED = {
    "resnet": (lambda: timm.create_model("resnet10t"), "cannot wrap a ResNet: a timm VisionTransformer or Eva is"),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1), num_heads=(1, 2)),
        "cannot wrap a SwinTransformer",
    ),
    "beit": (
        lambda: timm.create_model("beit_base_patch16_224", embed_dim=24, depth=1, num_heads=2),
        "independent of a fixed grid; its attention adds a bias for each pair of cells",
    ),
    "linear": (lambda: nn.Linear(2, 2), "cannot wrap a Linear"),
    "wrapped": (lambda: wrap(tiny_vit(), Bright()), "already wrapped; call .unwrap() first"),
    "patch_drop": (lambda: tiny_vit(patch_drop_rate=0.5), "patch_drop: it removes tokens"),
    "eva_patch_drop": (lambda: tiny_vit("eva02", patch_drop_rate=0.5), "patch_drop: it removes tokens"),
    "attention_pool": (lambda: with_pool(AttentionPoolPrr(32, 2)), "attention pooling is a AttentionPoolPrr"),
    "pool_with_positions": (lambda: patched("pool_positions"), "attention pooling adds positions of a fixed grid"),
    "hooked_pool": (lambda: patched("pool"), "attn_pool (AttentionPoolLatent) has forward hooks"),
    "max_pool": (lambda: tiny_vit(global_pool="max"), "global_pool='max'; 'token', 'avg' and 'map' are supported"),
    "no_pool": (lambda: tiny_vit(global_pool="", num_classes=0), "global_pool=''; 'token', 'avg' and 'map' are"),
    "differential": (lambda: tiny_vit(block_fn=DiffParallelScalingBlock), "blocks.0 is a DiffParallelScalingBlock"),
    "attention_subclass": (
        lambda: tiny_vit(attn_layer=OwnAttention), "blocks.0 is a OwnAttention, which has no packed",
    ),
    "patched_block": (lambda: patched("block"), "blocks.1 (Block) has a forward of its own, patched on"),
    "patched_attention": (lambda: patched("attention"), "blocks.1.attn (Attention) has a forward of its own"),
    "hooked_block": (lambda: patched("hook"), "blocks.1 (Block) has forward hooks, which would not run"),
    "patched_eva": (lambda: patched("attention", "eva02"), "blocks.1.attn (EvaAttention) has a forward of its"),
    "rope_of_another_kind": (lambda: patched("rope_kind", "eva02"), "rotary positions are a Identity; known are"),
    "rope_of_other_angles": (lambda: patched("rope", "dinov3"), "RotaryEmbeddingDinoV3 gives other angles than its"),
    "rope_augmented": (lambda: tiny_vit("dinov3", rope_rescale_coords=2.0), "shifts, jitters or rescales"),
    "own_head": (lambda: jitter(OwnHead(**SIZES)), "cannot wrap a OwnHead, which has its own forward_head"),
    "own_positions": (lambda: jitter(Subclassed(**SIZES)), "cannot wrap a Subclassed, which has its own _pos_embed"),
    "own_patch_embedding": (lambda: tiny_vit(embed_layer=OwnEmbed), "whose patch embedding is a OwnEmbed, not one"),
    "overlapping_patches": (lambda: overlapping(), "whose patches overlap or leave gaps"),
    "patched_patch_embedding": (
        lambda: with_forward("patch_embed"), "patch_embed (PatchEmbed) has a forward of its own, patched on",
    ),
    "patched_model": (lambda: with_forward(""), "cannot wrap a VisionTransformer, which has its own forward"),
    "replaced_drop_path": (lambda: with_adapter(), "blocks.0.drop_path1 is a Adapter, which packed tokens do not pass"),
    "hybrid": (
        lambda: timm.create_model("vit_tiny_r_s16_p8_224", embed_dim=24, depth=1, num_heads=2),
        "whose patch embedding is a HybridEmbed, not one convolution",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_wrapped_is_refused_in_one_line(name: str) -> None:
    make, line = REFUSED[name]
    model = make()
    with pytest.raises(SplitError) as caught:
        wrap(model, Bright())
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


BYPASSED = [
    *(("vit", path) for path in ("", "patch_embed", "patch_embed.proj", "patch_drop", "blocks")),
    *((family, f"blocks.1{part}") for family in ("vit", "eva02", "post_norm") for part in ("", ".attn", ".drop_path1")),
    ("parallel", "blocks.0.drop_path"), ("parallel_things", "blocks.0.attns.1.attn"), ("siglip", "attn_pool"),
    ("parallel_things", "blocks.0.ffns.0"),
]  # fmt: skip
CALLED = [
    *(("vit", f"blocks.0.{part}") for part in ("norm1", "attn.qkv", "attn.proj", "ls1", "mlp", "mlp.fc1", "norm2")),
    *(("vit", path) for path in ("norm", "pos_drop", "head")), ("eva", "blocks.0.mlp"), ("dinov3", "blocks.0.attn.qkv"),
    ("parallel", "blocks.0.in_proj"), ("parallel_things", "blocks.0.ffns.0.mlp"), ("siglip", "attn_pool.mlp"),
    ("post_norm", "blocks.0.norm1"), ("embed_norm", "patch_embed.norm"),
]  # fmt: skip


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(("family", "path"), BYPASSED)
def test_a_hook_on_a_module_that_is_not_called_is_refused(family: str, path: str, register: str) -> None:
    model = tiny_vit(family)
    module = model.get_submodule(path)
    hook = getattr(module, register)(lambda *_, **__: None, with_kwargs=True)  # changes no value
    with pytest.raises(SplitError) as caught:
        wrap(model, Bright())
    line = f"{path or 'the model'} ({type(module).__name__}) has forward hooks, which would not run"
    assert str(caught.value).startswith(line)
    assert "features(images, taps=...)" in str(caught.value)
    hook.remove()
    wrap(model, Bright())


@pytest.mark.parametrize(("family", "path"), CALLED)
def test_a_hook_on_a_module_that_is_called_runs(family: str, path: str) -> None:
    model = tiny_vit(family)
    seen: list[int] = []
    model.get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
    wrapped = wrap(model, Bright()).eval()
    seen.clear()
    wrapped(images(1))
    assert seen


def test_backward_hooks_are_harmless() -> None:
    model = tiny_vit()
    model.blocks[0].register_full_backward_hook(lambda *_: None)
    wrap(model, Bright())


def faint(family: str) -> VisionTransformer | Eva:
    """As trained models may be: what the blocks add is a hundred thousand times smaller than what they read."""
    model = tiny_vit(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = family in ("vit", "eva02") and "blocks" in name and ("proj." in name or "fc2" in name)
            if last or "gamma" in name or ("post_norm" in family and "norm" in name):
                parameter.mul_(1e-5)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family",
    ["vit", "eva02", "dinov2", "eva02_fused", "post_norm", "eva_post_norm", "parallel_things", "rope_mixed"],
)
def test_the_probe_sees_attention_however_little_a_block_adds(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = faint(family).to(dtype)
    wrap(model, Bright())
    attn = model.blocks[0].attns[0].attn if family == "parallel_things" else model.blocks[0].attn
    inner = type(attn).forward
    monkeypatch.setattr(type(attn), "forward", lambda self, x, **options: inner(self, x.flip(1), **options))
    with pytest.raises(SplitError, match=r"blocks\.0.* gives other values packed than by itself"):
        wrap(model, Bright())


def test_attention_that_reads_nothing_is_refused_on_an_untrained_model() -> None:
    model = timm.create_model("vit_tiny_patch16_224", init_values=1e-5, depth=2)
    for block in model.blocks:
        block.attn.forward = lambda x, attn=block.attn, **_: attn.proj(torch.zeros_like(x))
    with pytest.raises(SplitError, match=r"blocks\.0\.attn \(Attention\) has a forward of its own"):
        wrap(model)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", ["vit", "eva02", "rope_mixed", "parallel", "siglip"])
def test_a_changed_scale_counts_where_it_counts_for_timm(family: str, fused: bool) -> None:
    """timm's fused attention does not read `scale`, its own does."""
    model = tiny_vit(family)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
            module.scale *= 2
    picture = images(2)
    with torch.no_grad():
        expected, found = model(picture), wrap(model, Everywhere()).eval()(picture)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_accepted_unchanged(family: str) -> None:
    model = tiny_vit(family)
    before = copy.deepcopy(model.state_dict())
    assert check_backbone(model) is model
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["vit", "eva02", "dinov3", "pe", "rope_mixed", "siglip"])
def test_other_precisions_pass_the_probe(family: str, dtype: torch.dtype) -> None:
    wrap(tiny_vit(family).to(dtype), Bright())


def test_pooling_by_attention_is_that_of_each_image_alone() -> None:
    pool = tiny_vit("siglip").attn_pool
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    lengths = (3, 7, 2)
    packed = pool_attention(pool, x, segments_of(*lengths).image, 3, torch.ones(12))
    alone = torch.cat([pool(part[None]) for part in x.split(lengths)])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    area = torch.tensor([4, 1, 1, *[1] * 7, 16, 1])
    repeated = [
        part.repeat_interleave(times, 0) for part, times in zip(x.split(lengths), area.split(lengths), strict=True)
    ]
    expected = torch.cat([pool(part[None]) for part in repeated])
    packed = pool_attention(pool, x, segments_of(*lengths).image, 3, area.float())
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"num_kv_heads": 1}, {"gated_attn": True}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("attn_type", ["rope", "eva"])
def test_variants_of_the_eva_block(attn_type: str, options: dict) -> None:
    """Grouped queries, gates and q/k norms, which few models have."""
    if attn_type == "eva" and "num_kv_heads" in options:
        return  # timm offers them with attn_type="rope" only
    block = EvaBlock(32, 2, attn_type=attn_type, qkv_fused=False, num_prefix_tokens=1, **options)
    probe(jitter(block), 0, 32, rope="shared", prefix=1)
    block.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(SplitError, match=r"blocks\.0 \(EvaBlock\) has forward hooks"):
        probe(block, 0, 32, rope="shared", prefix=1)


def test_the_probe_leaves_the_mode_of_every_module() -> None:
    model = tiny_vit().train()
    model.blocks[0].norm1.eval()
    model.blocks[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    check_backbone(model)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(SplitError):
        probe(patched("block").train().blocks[1], 1, 32)


def test_train_mode_does_not_disturb_the_probe() -> None:
    check_backbone(tiny_vit(drop_path_rate=0.5, attn_drop_rate=0.5, proj_drop_rate=0.5).train())


def test_train_mode_uses_the_models_own_dropout() -> None:
    model = wrap(tiny_vit(proj_drop_rate=0.5, attn_drop_rate=0.5, pos_drop_rate=0.2, drop_rate=0.2), Bright())
    picture = images(2)
    model.train()
    torch.manual_seed(0)
    first = model(picture)
    torch.manual_seed(0)
    assert torch.equal(model(picture), first)
    assert not torch.allclose(model(picture), first)
    model.eval()
    assert torch.equal(model(picture), model(picture))


def test_arguments_that_could_have_no_effect_are_found_when_wrapping() -> None:
    with pytest.raises(SplitError, match=r"no attention is called 'sdp'\. Did you mean sdpa"):
        wrap(tiny_vit(), Bright(), attention="sdp")
    with pytest.raises(SplitError, match=r"attention=None: one of auto, .*sdpa.* is needed"):
        wrap(tiny_vit(), Bright(), attention=None)
    with pytest.raises(SplitError, match="rope='corner': a VisionTransformer without rotary positions has no use for"):
        wrap(tiny_vit(), Bright(), rope="corner")
    wrap(tiny_vit(), Bright(), rope="center", attention="auto")


@pytest.mark.parametrize("budget", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_a_budget_is_any_number(budget: Any) -> None:
    model = wrap(tiny_vit(), "entropy", budget=budget, stages=np.int64(2))
    assert model.decision.budget == model.spec.budget == 0.5
    assert type(model.decision.budget) is float
    assert type(model.spec.stages) is int


@pytest.mark.parametrize("model", ["vit_tiny", None])
def test_what_is_no_model_is_refused_with_an_example(model: Any) -> None:
    with pytest.raises(
        SplitError, match=rf"^model={model!r}: a timm model is needed, such as timm.create_model\('vit_"
    ):
        check_backbone(model)
