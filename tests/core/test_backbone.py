"""Blocks on a packed sequence, and which models are refused, each in one clear line."""

from __future__ import annotations

import copy
import types

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn

from split_core.attention.masked import MaskedAttention
from split_core.attention.sdpa import SdpaAttention
from split_core.backbone.blocks import Stream, drop_path, probe, run_block
from split_core.backbone.check import check_backbone
from split_core.errors import SplitError
from split_core.packing import Segments
from split_core.wrapping import wrap
from tiny import FAMILIES, Bright, images, jitter, tiny_vit


def segments_of(*lengths: int) -> Segments:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return Segments(starts, lengths, max(lengths))


@pytest.mark.parametrize("backend", [SdpaAttention(), MaskedAttention()], ids=["sdpa", "masked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_block_is_the_block_on_each_image_alone(family: str, backend) -> None:
    block = tiny_vit(family).blocks[0]
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    packed = run_block(block, x, Stream(segments_of(3, 7, 2), backend))
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


def patched(kind: str) -> VisionTransformer:
    model = tiny_vit()
    block = model.blocks[1]
    if kind == "block":
        block.forward = types.MethodType(lambda self, x: Block.forward(self, x) + 1, block)
    elif kind == "attention":
        inner = block.attn.forward
        block.attn.forward = lambda x, **options: inner(x.flip(1), **options)
    elif kind == "hook":
        block.register_forward_hook(lambda module, args, out: 2 * out)
    return model


class Subclassed(VisionTransformer):
    def _pos_embed(self, x: Tensor) -> Tensor:
        return super()._pos_embed(x).flip(1)


class OwnAttention(timm.models.vision_transformer.Attention):
    pass


SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
REFUSED = {
    "resnet": (lambda: timm.create_model("resnet10t"), "cannot wrap a ResNet: a timm VisionTransformer is needed"),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1), num_heads=(1, 2)),
        "cannot wrap a SwinTransformer",
    ),
    "beit": (
        lambda: timm.create_model("beit_base_patch16_224", embed_dim=24, depth=1, num_heads=2), "cannot wrap a Beit",
    ),
    "linear": (lambda: nn.Linear(2, 2), "cannot wrap a Linear"),
    "wrapped": (lambda: wrap(tiny_vit(), Bright()), "already wrapped; call .unwrap() first"),
    "patch_drop": (lambda: tiny_vit(patch_drop_rate=0.5), "patch_drop: it removes tokens"),
    "attention_pool": (lambda: tiny_vit(global_pool="map", class_token=False), "attention pooling (global_pool='map')"),
    "max_pool": (lambda: tiny_vit(global_pool="max"), "global_pool='max'; 'token' and 'avg' are supported"),
    "no_pool": (lambda: tiny_vit(global_pool="", num_classes=0), "global_pool=''; 'token' and 'avg' are supported"),
    "parallel_blocks": (lambda: tiny_vit(block_fn=ParallelScalingBlock), "blocks.0 is a ParallelScalingBlock"),
    "attention_subclass": (
        lambda: tiny_vit(attn_layer=OwnAttention), "blocks.0 is a OwnAttention, which has no packed",
    ),
    "patched_block": (lambda: patched("block"), "blocks.1 (Block) gives other values packed than by itself"),
    "patched_attention": (lambda: patched("attention"), "blocks.1 (Block) gives other values"),
    "hooked_block": (lambda: patched("hook"), "blocks.1 (Block) gives other values"),
    "distilled": (lambda: jitter(VisionTransformerDistilled(**SIZES)), "VisionTransformerDistilled, which has its own"),
    "own_positions": (lambda: jitter(Subclassed(**SIZES)), "cannot wrap a Subclassed, which has its own _pos_embed"),
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_accepted_unchanged(family: str) -> None:
    model = tiny_vit(family)
    before = copy.deepcopy(model.state_dict())
    assert check_backbone(model) is model
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_pass_the_probe(dtype: torch.dtype) -> None:
    check_backbone(tiny_vit().to(dtype))


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
