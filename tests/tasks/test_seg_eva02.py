"""EVA-02 for segmentation: official names on a synthetic checkpoint, and the wrapped model against timm's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eva02_official import official_block
from split_core import wrap
from split_core.engine.reference import dense_reference
from split_core.engine.session import Learner
from split_core.errors import SplitError
from split_core.quadtree import build_layout, uniform_splits
from split_core.task import ModelContext
from split_tasks.configs import SegmentConfig
from split_tasks.models.configs import Eva02Config
from split_tasks.models.eva02 import build
from split_tasks.models.eva02_seg import convert, main
from split_tasks.segment import Segment
from tiny import Logits, images, jitter
from tinyseg import context

DIM, DEPTH, HIDDEN, CHANNELS, CLASSES = 32, 3, 85, 8, 3


def official() -> dict[str, torch.Tensor]:
    """Random tensors under the official names, with their shapes for these sizes."""
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.cls_token": (1, 1, DIM), "backbone.pos_embed": (1, 17, DIM),
        "backbone.patch_embed.proj.weight": (DIM, 3, 16, 16), "backbone.patch_embed.proj.bias": (DIM,),
        "backbone.rope.freqs_cos": (16, 16), "backbone.rope.freqs_sin": (16, 16),
    }  # fmt: skip
    for n in range(DEPTH):
        shapes |= {f"backbone.blocks.{n}.{key}": shape for key, shape in official_block(DIM, HIDDEN).items()}
    for key in ("fpn1.0", "fpn1.3", "fpn2.0"):
        shapes |= {f"backbone.{key}.weight": (DIM, DIM, 2, 2), f"backbone.{key}.bias": (DIM,)}
    shapes |= norm("backbone.fpn1.1", DIM)
    convs = {f"psp_modules.{i}.1": (DIM, 1) for i in range(4)} | {f"lateral_convs.{i}": (DIM, 1) for i in range(3)}
    convs |= {f"fpn_convs.{i}": (CHANNELS, 3) for i in range(3)}
    convs |= {"bottleneck": (DIM + 4 * CHANNELS, 3), "fpn_bottleneck": (4 * CHANNELS, 3)}
    named = {f"decode_head.{key}": conv for key, conv in convs.items()} | {"auxiliary_head.convs.0": (DIM, 3)}
    for key, (inputs, kernel) in named.items():
        shapes[f"{key}.conv.weight"] = (CHANNELS, inputs, kernel, kernel)
        shapes |= norm(f"{key}.bn", CHANNELS)
    for part in ("decode_head", "auxiliary_head"):
        shapes |= {f"{part}.conv_seg.weight": (CLASSES, CHANNELS, 1, 1), f"{part}.conv_seg.bias": (CLASSES,)}
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.rand(shape, generator=generator) + 0.1 if shape else torch.tensor(7) for key, shape in shapes.items()
    }


def norm(key: str, width: int) -> dict[str, tuple[int, ...]]:
    names = ("weight", "bias", "running_mean", "running_var")
    return {f"{key}.{name}": (width,) for name in names} | {f"{key}.num_batches_tracked": ()}


def head_config(**more: object) -> SegmentConfig:
    return SegmentConfig(head="upernet", channels=CHANNELS, auxiliary_channels=CHANNELS, **more)


def test_an_official_checkpoint_loads_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = official()
    torch.save({"state_dict": state, "meta": {"epoch": 1}}, tmp_path / "eva.pth")
    assert main([str(tmp_path / "eva.pth"), str(tmp_path / "out")]) == 0
    weights = tmp_path / "out" / "backbone.safetensors"
    vit = build(Eva02Config(size="tiny", img_size=64, weights=str(weights)), ModelContext(num_classes=0))
    task = Segment(head_config(weights=tmp_path / "out" / "head.safetensors"), context(dim=DIM, depth=DEPTH))
    block = vit.blocks[2]
    for ours, theirs in {
        block.mlp.fc1_g.weight: "blocks.2.mlp.w1.weight", block.mlp.fc1_x.weight: "blocks.2.mlp.w2.weight",
        block.mlp.norm.bias: "blocks.2.mlp.ffn_ln.bias", block.mlp.fc2.weight: "blocks.2.mlp.w3.weight",
        block.attn.q_proj.bias: "blocks.2.attn.q_bias", block.attn.v_proj.bias: "blocks.2.attn.v_bias",
        vit.pos_embed: "pos_embed", task.head.fpn1[1].running_var: "fpn1.1.running_var",
    }.items():  # fmt: skip
        assert torch.equal(ours, state[f"backbone.{theirs}"])
    assert torch.equal(task.head.decode.classifier.weight, state["decode_head.conv_seg.weight"])
    bn = task.head.auxiliary.convs[0].batch_norm
    assert torch.equal(bn.running_mean, state["auxiliary_head.convs.0.bn.running_mean"])
    kept = len(load_file(weights)) + len(load_file(tmp_path / "out" / "head.safetensors"))
    assert kept == sum(not re.search("rope", key) for key in state)


def test_what_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SplitError, match=r"no place for rpn.weight"):
        convert(official() | {"rpn.weight": torch.zeros(1)})
    with pytest.raises(SplitError, match=r"no backbone.\* or no decode_head"):
        convert({"backbone.cls_token": torch.zeros(1)})
    assert main([str(tmp_path / "none.pth"), str(tmp_path)]) == 2
    assert "none.pth" in capsys.readouterr().err
    assert main([]) == 2
    torch.save(official(), tmp_path / "eva.pth")
    main([str(tmp_path / "eva.pth"), str(tmp_path)])
    with pytest.raises(SplitError, match=r"head.safetensors does not fit UperNet; .*decode.classifier.weight"):
        Segment(head_config(weights=tmp_path / "head.safetensors"), context(("a", "b"), dim=DIM, depth=DEPTH))
    with pytest.raises(SplitError, match="60 is no multiple of the patch, 16"):
        build(Eva02Config(size="tiny", img_size=60, weights="none"), ModelContext(num_classes=0))


def test_wrapped_eva02_with_upernet_equals_the_dense_model() -> None:
    vit = build(Eva02Config(size="tiny", img_size=64, weights="none"), ModelContext(num_classes=0)).eval()
    jitter(vit)
    model = wrap(vit, policy=Logits(), stages=2).eval()
    task = Segment(head_config(), context(dim=DIM, depth=DEPTH)).eval()
    model.taps = task.taps
    layout = build_layout(uniform_splits(model.embed.grid((64, 64)), 2, split=True))
    with torch.no_grad():
        mixed = task.output(model, model.forward_features(images(2, 64), layout=layout))
        dense = dense_reference(Learner(model, task))(images(2, 64))
    torch.testing.assert_close(mixed.logits, dense.logits, rtol=1e-3, atol=1e-4)
