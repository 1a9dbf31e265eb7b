"""Learning rates that fall with the distance from the output (`adapt.layer_decay`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from split_core import resolve
from split_core.backbone.tower import VisionTower
from split_core.config import RunConfig
from split_core.engine import adapt
from split_core.engine.groups import clip, layer_distances, parameter_groups
from split_core.engine.log import RunLog
from split_core.engine.session import Session
from split_core.errors import SplitError
from tiny import FAMILIES, tiny_vit

ADAPT = {"images": 32, "batch_size": 8, "backbone_lr": 8.0, "head_lr": 3.0, "layer_decay": 0.5}
SETTINGS: dict[str, Any] = {
    "task": "cls", "data": {"name": "digits", "val": 32}, "policy": "xattn", "warmstart": {"policy_lr": 5.0},
    "model": {"name": "digits_vit", "weights": "none", "dim": 16, "depth": 2, "heads": 2}, "budget": 0.5,
    "device": "cpu", "threads": 1, "log_every": 1, "checkpoint": {"every_steps": 1}, "eval": {"batch_size": 64},
}  # fmt: skip


def configure(run_dir: Path, *, policy: str = "xattn", **changes: Any) -> RunConfig:
    return resolve.load({**SETTINGS, "run_dir": str(run_dir), "policy": policy, "adapt": {**ADAPT, **changes}})


def rates(config: RunConfig) -> dict[str, float]:
    """The rate of every parameter that moves, by name."""
    learner = Session(config).learner(config.policy)
    names = {id(p): name for module in learner.modules().values() for name, p in module.named_parameters()}
    groups = parameter_groups(learner, config)
    assert {(g["part"], g["weight_decay"]) for g in groups} == {("backbone", 0.05), ("head", 0.05), ("policy", 0.0)}
    return {names[id(p)]: group["lr"] for group in groups for p in group["params"]}


def by_hand(name: str) -> float:
    """8 at the output, halved by the last block and each step down."""
    for beginning, rate in (("policy.", 5.0), ("vit.head.", 3.0), ("embed.", 3.0), ("vit.blocks.1.", 4.0),
                            ("vit.norm.", 4.0), ("vit.blocks.0.", 2.0), ("vit.", 1.0)):  # fmt: skip
        if name.startswith(beginning):
            return rate
    raise AssertionError(name)


def test_rates_are_the_table_s(tmp_path: Path) -> None:
    found = rates(configure(tmp_path))
    assert {"vit.pos_embed", "vit.cls_token", "vit.patch_embed.proj.weight", "vit.blocks.1.attn.qkv.weight"} <= set(
        found
    )
    assert found == {name: by_hand(name) for name in found}
    assert set(rates(configure(tmp_path, layer_decay=None)).values()) == {8.0, 3.0, 5.0}


def test_frozen_names_move_no_other_s_rate(tmp_path: Path) -> None:
    found = rates(configure(tmp_path, freeze=["vit.patch_embed", "vit.blocks.0.", "vit.norm"]))
    assert not any(name.startswith(("vit.patch_embed", "vit.blocks.0.", "vit.norm")) for name in found)
    assert found == {name: by_hand(name) for name in found}
    assert {"vit.pos_embed", "vit.blocks.1.norm1.weight"} <= set(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_which_layer_is_which(family: str) -> None:
    found = layer_distances(tiny_vit(family))
    for name, distance in found.items():
        if name.startswith("blocks."):
            assert distance == 2 - int(name.split(".")[1])
        elif name.startswith(("patch_embed.", "pos_embed", "cls_token", "reg_token", "dist_token", "norm_pre.")):
            assert distance == 3, name
        else:
            assert distance == (1 if name.startswith("norm.") else 0), name


def test_vision_towers_say_it_too() -> None:
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=56, patch_size=14
    )
    found = layer_distances(VisionTower(CLIPVisionModel(config)))
    assert any(name.startswith("blocks.1.") for name in found)
    for name, distance in found.items():
        assert distance == (3 if name.startswith(("embeddings.", "norm_pre.")) else 2 - int(name.split(".")[1])), name


def test_layers_share_the_limit_on_their_part_s_gradient() -> None:
    parts = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, value in zip(parts, (3.0, 4.0, 9.0), strict=True):
        parameter.grad = torch.tensor([value])
    names = ("backbone", "backbone", "head")
    clip([{"part": name, "params": [p]} for name, p in zip(names, parts, strict=True)], 1.0)
    assert [round(float(p.grad), 3) for p in parts if p.grad is not None] == [0.6, 0.8, 1.0]


class Killed(BaseException):
    """Stands for a kill signal."""


def test_a_resumed_run_keeps_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(run_dir: Path) -> None:
        run_dir.mkdir(exist_ok=True)
        with Session(configure(run_dir, policy="dense", backbone_lr=1e-3, head_lr=1e-2)) as session:
            adapt.adapt(session, "dense")

    tuned(tmp_path / "whole")
    write = RunLog.write

    def write_or_die(log: RunLog, at: str, now: int, numbers: Any) -> None:
        write(log, at, now, numbers)
        if now == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write_or_die)
        with pytest.raises(Killed):
            tuned(tmp_path / "cut")
    tuned(tmp_path / "cut")
    whole, cut = (load_file(tmp_path / place / "models" / "dense.safetensors") for place in ("whole", "cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


@pytest.mark.parametrize("value", [0, -0.5, 1.5, "steep"])
def test_what_is_no_factor_is_one_line(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SplitError, match=r"adapt\.layer_decay") as caught:
        configure(tmp_path, layer_decay=value)
    assert "\n" not in str(caught.value)
