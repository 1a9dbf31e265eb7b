"""EVA-02 of the detector: official names on a synthetic checkpoint, rotary rows written out, the wrapped model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from eva02_official import official_block
from split_core import Windows, load_pretrained, wrap
from split_core.engine.reference import windowed
from split_core.errors import SplitError
from split_core.task import ModelContext
from split_core.types import Grid
from split_tasks.models.configs import Eva02DetConfig
from split_tasks.models.eva02 import build_detector, resampled
from split_tasks.models.eva02_det import convert, main, patch_rows
from tiny import images, jitter

DIM, DEPTH, HIDDEN = 32, 3, 85
CONFIG: dict[str, Any] = {"size": "tiny", "img_size": 128, "window": 4, "weights": "none"}


def official() -> dict[str, torch.Tensor]:
    """Random tensors under the official names, with their shapes for these sizes."""
    shapes: dict[str, tuple[int, ...]] = {
        "pos_embed": (1, 17, DIM), "patch_embed.proj.weight": (DIM, 3, 16, 16), "patch_embed.proj.bias": (DIM,),
        "rope_win.freqs_cos": (16, 16), "rope_win.freqs_sin": (16, 16), "rope_glb.freqs_cos": (64, 16),
        "rope_glb.freqs_sin": (64, 16),
    }  # fmt: skip
    for n in range(DEPTH):
        shapes |= {f"blocks.{n}.{key}": shape for key, shape in official_block(DIM, HIDDEN).items()}
    heads: dict[str, tuple[int, ...]] = {
        "backbone.simfp_2.0.weight": (DIM, DIM // 2, 2, 2),
        "proposal_generator.rpn_head.conv.conv0.weight": (8, 8, 3, 3),
        "roi_heads.box_predictor.0.cls_score.weight": (81, 8),
        "roi_heads.mask_head.deconv.bias": (8,),
    }
    named = {f"backbone.net.{key}": shape for key, shape in shapes.items()} | heads
    generator = torch.Generator().manual_seed(0)
    return {key: torch.rand(shape, generator=generator) + 0.1 for key, shape in named.items()}


def detector(**more: Any) -> Any:
    return build_detector(Eva02DetConfig(**{**CONFIG, **more}), ModelContext(num_classes=0))


def test_an_official_backbone_loads_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = official()
    torch.save({"model": state, "iteration": 7}, tmp_path / "eva.pth")
    assert main([str(tmp_path / "eva.pth"), str(tmp_path / "out")]) == 0
    weights = tmp_path / "out" / "backbone.safetensors"
    assert f"{weights}  {3 + 19 * DEPTH} tensors" in capsys.readouterr().out
    kept, (_, heads) = load_file(weights), convert(state)
    assert len(kept) + len(heads) == sum("rope" not in key for key in state)
    assert sorted(heads) == sorted(key for key in state if not key.startswith("backbone.net."))
    vit = detector(weights=str(weights))
    block = vit.blocks[2]
    for ours, theirs in {
        block.mlp.fc1_g.weight: "blocks.2.mlp.w1.weight", block.mlp.fc1_x.bias: "blocks.2.mlp.w2.bias",
        block.mlp.norm.bias: "blocks.2.mlp.ffn_ln.bias", block.mlp.fc2.weight: "blocks.2.mlp.w3.weight",
        block.attn.q_proj.bias: "blocks.2.attn.q_bias", block.attn.v_proj.bias: "blocks.2.attn.v_bias",
        block.attn.k_proj.weight: "blocks.2.attn.k_proj.weight", vit.patch_embed.proj.bias: "patch_embed.proj.bias",
    }.items():  # fmt: skip
        assert torch.equal(ours, state[f"backbone.net.{theirs}"])
    assert block.attn.k_proj.bias is None
    table = state["backbone.net.pos_embed"][:, 1:].view(1, 4, 4, DIM).permute(0, 3, 1, 2)
    wanted = F.interpolate(table, size=(8, 8), mode="bicubic", align_corners=False)
    torch.testing.assert_close(vit.pos_embed.detach().view(8, 8, DIM), wanted[0].permute(1, 2, 0))
    same = detector(weights=str(weights), img_size=64)
    assert torch.equal(same.pos_embed, state["backbone.net.pos_embed"][:, 1:])


def test_what_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SplitError, match=r"no place for decode_head.weight"):
        convert(official() | {"decode_head.weight": torch.zeros(1)})
    with pytest.raises(SplitError, match=r"no backbone.net.\* in it"):
        convert({"roi_heads.weight": torch.zeros(1)})
    with pytest.raises(SplitError, match="19 rows, no square grid"):
        patch_rows(torch.zeros(1, 19, 2))
    assert patch_rows(torch.zeros(1, 16, 2)).shape == (1, 16, 2)
    assert main([str(tmp_path / "none.pth"), str(tmp_path)]) == 2
    assert "none.pth" in capsys.readouterr().err
    assert main([]) == 2
    assert "split_tasks.models.eva02_det CHECKPOINT" in capsys.readouterr().err
    lacking = official()
    del lacking["backbone.net.blocks.1.mlp.w3.bias"]
    torch.save(lacking | {"backbone.net.blocks.0.attn.relative": torch.zeros(1)}, tmp_path / "eva.pth")
    main([str(tmp_path / "eva.pth"), str(tmp_path)])
    with pytest.raises(SplitError, match=r"missing: blocks.1.mlp.fc2.bias; unexpected: blocks.0.attn.relative"):
        detector(weights=str(tmp_path / "backbone.safetensors"))
    for more, message in (
        ({"img_size": 120}, "120 is no multiple of the patch, 16"),
        ({"window": None, "global_blocks": (1,)}, r"model.global_blocks: without model\.window"),
    ):
        with pytest.raises(SplitError, match=message):
            detector(**more)


def test_a_table_of_no_square_is_left_to_be_refused() -> None:
    assert resampled(torch.zeros(1, 15, 2), (4, 4)).shape == (1, 15, 2)


BLOCKS = {"base": (1, 3, 5, 7, 9, 11), "large": (2, 5, 8, 11, 14, 17, 20, 23)}


@pytest.mark.parametrize(("size", "hidden"), [("base", 2048), ("large", 2730)])
def test_sizes_are_the_detectors(size: str, hidden: int) -> None:
    with torch.device("meta"):
        vit: Any = build_detector(Eva02DetConfig(size=size, weights="none"), ModelContext(num_classes=0))
    assert vit.windows == Windows(32, BLOCKS[size])
    assert vit.blocks[0].mlp.fc1_g.out_features == hidden
    assert vit.pos_embed.shape == (1, 96 * 96, vit.embed_dim)
    assert vit.cls_token is None
    assert isinstance(vit.norm, torch.nn.Identity)
    assert vit.blocks[0].norm1.eps == 1e-6


@pytest.mark.parametrize("side", [4, 8])
def test_rotary_rows_are_the_detectors(side: int) -> None:
    """Its table, written out: place / side * 16, the first half of a head's pairs by row, the second by column."""
    model = wrap(detector(), "dense", stages=2)
    half = DIM // 2 // 2  # channels of a head that turn with one axis; each angle turns two
    rows = []
    for row in range(side):
        for col in range(side):
            angles = [place / side * 16 / 10000 ** (k / half) for place in (row, col) for k in range(0, half, 2)]
            rows.append(angles)
    expected = torch.tensor(rows)
    found = model.rope.cells(Grid((side, side), 0))
    assert found is not None
    torch.testing.assert_close(found[:-1], torch.cat([expected.sin(), expected.cos()], -1), atol=1e-5, rtol=1e-5)


def test_all_fine_is_the_dense_detector() -> None:
    vit = jitter(detector()).eval()
    model, picture = wrap(vit, "dense", stages=2).eval(), images(2, 128)
    with torch.no_grad():
        tokens, _ = windowed(model, picture)
        torch.testing.assert_close(model.forward_features(picture).dense().flatten(2).mT, tokens, rtol=1e-4, atol=1e-5)
        plain = wrap(jitter(detector(window=None)).eval(), "dense", stages=2).eval()
        assert plain.windows is None
        whole = plain.vit.forward_features(picture)
        torch.testing.assert_close(plain.forward_features(picture).dense().flatten(2).mT, whole, rtol=1e-4, atol=1e-5)


def test_it_is_saved_with_its_windows(tmp_path: Path) -> None:
    vit = build_detector(Eva02DetConfig(**CONFIG), ModelContext(num_classes=3))
    model = wrap(vit, "entropy", stages=2, budget=0.6).eval()
    again = load_pretrained(model.save_pretrained(tmp_path))
    assert again.windows == model.windows == Windows(4, (1,))
    assert torch.equal(again(images(1, 128)), model(images(1, 128)))
    assert again.transforms == model.transforms
