"""Saving and sharing, without a network: what comes back computes the same, and what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import split_core
from split_core import hub
from split_core.decision import Decision
from split_core.errors import SplitError
from split_core.model import SplitViT
from split_core.wrapping import load_pretrained, wrap
from tiny import Bright, images, jitter, tiny_vit

SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def made(architecture: str = "vit_tiny_patch16_224", policy: Any = "xattn", **options: Any) -> SplitViT:
    torch.manual_seed(0)
    wrapping = {key: options.pop(key) for key in ("budget", "rope", "pooling", "stages") if key in options}
    vit = timm.create_model(architecture, **{**SIZES, **options})
    return jitter(wrap(vit, policy, **wrapping), 1, spread=0.05).eval()  # type: ignore[return-value]


def outputs(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return model(images(3, 40).to(dtype))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": {"name": "entropy", "tau": [2.0, 1.0]}, "budget": 0.6, "stages": 2},
        {"architecture": "vit_small_patch16_dinov3", "rope": "corner", "pooling": "token"},
        {"architecture": "vit_small_patch16_rope_mixed_224", "num_classes": 3},
        {"architecture": "deit_tiny_distilled_patch16_224", "policy": "cosine"},
        {"architecture": "vit_base_patch16_siglip_224", "num_classes": 0},
        {"architecture": "vit_small_patch14_reg4_dinov2", "init_values": 0.3, "drop_path_rate": 0.1},
    ],
    ids=lambda options: options.get("architecture", str(options.get("policy", "xattn"))),
)
def test_what_comes_back_computes_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    model = made(**options)
    model.decision = Decision("threshold", 0.6, 0.25)
    expected = outputs(model)
    model.save_pretrained(tmp_path / "kept")
    again = load_pretrained(tmp_path / "kept")
    assert torch.equal(outputs(again), expected)
    assert again.decision == model.decision
    assert again.spec == model.spec
    assert again.transforms == model.transforms
    assert again.layout.lengths == model.layout.lengths
    assert not again.training
    assert str(again) == str(model)
    again.save_pretrained(tmp_path / "twice")
    for name in ("config.json", "README.md"):
        assert (tmp_path / "twice" / name).read_text() == (tmp_path / "kept" / name).read_text()


def test_precision_and_changed_heads_come_back(tmp_path: Path) -> None:
    model = made()
    model.vit.reset_classifier(7)
    model.to(torch.bfloat16)
    split_core.load_pretrained(model.save_pretrained(tmp_path))
    again = load_pretrained(tmp_path)
    assert outputs(again, torch.bfloat16).shape == (3, 7)
    assert torch.equal(outputs(again, torch.bfloat16), outputs(model, torch.bfloat16))


def test_normalisation_of_the_pictures_comes_back(tmp_path: Path) -> None:
    """Pixel policies undo it, so a lost mean would change decisions in silence."""
    vit = timm.create_model("vit_tiny_patch16_224", pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)}, **SIZES)
    again = load_pretrained(wrap(vit, "entropy").save_pretrained(tmp_path))
    assert tuple(again.transforms["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(again.policy.info.mean) == (0.1, 0.2, 0.3)
    assert again.transforms["input_size"] == (3, 32, 32)


def test_options_may_be_overridden_when_loading(tmp_path: Path) -> None:
    made().save_pretrained(tmp_path)
    assert load_pretrained(tmp_path, attention="masked").attention == "masked"


def test_the_card_holds_what_was_measured(tmp_path: Path) -> None:
    rows = [{"method": "dense", "accuracy": 0.8123456}, {"method": "xattn|ppo", "tokens": 0.5}]
    card = (made(budget=0.5).save_pretrained(tmp_path, measured=rows) / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: split-core\nlicense: apache-2.0\n")
    assert (
        "| method | accuracy | tokens |\n| --- | --- | --- |\n| dense | 0.8123 |  |\n| xattn\\|ppo |  | 0.5 |" in card
    )
    assert "rule threshold, budget 0.5, offset 0.0" in card
    assert "Nothing was measured" in (made().save_pretrained(tmp_path) / "README.md").read_text()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit(folder: Path, key: str, value: Any) -> None:
    """Set one value in the file, e.g. spec.stages; `...` removes it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    *parents, last = key.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    section[last] = value
    if value is ...:
        del section[last]
    path.write_text(json.dumps(config))


def other_type(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["vit.norm.bias"] = state["vit.norm.bias"].half()
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("spec.stagez", 2, "there is no key spec.stagez; did you mean stages?"),
        ("spec.stages", ..., "lacks spec.stages"),
        ("spec.stages", "2", "spec.stages='2': Input should be a valid integer"),
        ("spec.stages", 0, "spec.stages=0: Input should be greater than or equal to 1"),
        ("spec.budget", "x", "spec.budget='x': Input should be a valid number"),
        ("spec", [1], "spec=[1]: "),
        ("spec.options.stages", 2, "there is no key spec.options.stages"),
        ("spec.options.down", "bicubic", "spec.options.down='bicubic': Input should be 'area' or 'bilinear'"),
        ("spec.options.attention", "sdp", "no attention is called 'sdp'. Did you mean sdpa?"),
        ("spec.policy", {"name": "nosuch"}, "no policy is called 'nosuch'"),
        ("spec.policy", {"name": "xattn", "tauu": 3}, "policy.tauu=3: "),
        ("spec.policy", {}, "no name is given"),
        ("decision.ruel", "image", "there is no key decision.ruel; did you mean rule?"),
        ("decision.budget", "x", "decision.budget='x': Input should be a valid number"),
        ("decision.budget", 3, "decision={"),
        ("decision.offset", "x", "decision.offset='x': Input should be a valid number"),
        ("decision.rule", "best", "decision.rule='best': Input should be 'threshold', 'sample', 'image' or 'batch'"),
        ("dtype", 3, "dtype=3: Input should be 'float16', 'bfloat16', 'float32' or 'float64'"),
        ("dtype", "nn", "dtype='nn': Input should be"),
        ("dtype", "float99", "dtype='float99': Input should be"),
        ("backbone", 3, "backbone=3: Input should be a valid string"),
        ("backbone", "hf_hub:a/b", "timm cannot build hf_hub:a/b: it has no such model"),
        ("model_args.patch_size", 0, "timm cannot build vit_tiny_patch16_224 with"),
        ("transforms.mean", "x", "transforms.mean='x': Input should be a valid array"),
        ("weights", "x", "there is no key weights"),
    ],
)
def test_a_wrong_key_in_the_configuration_is_named(key: str, value: Any, line: str, tmp_path: Path) -> None:
    made().save_pretrained(tmp_path)
    edit(tmp_path, key, value)
    with pytest.raises(SplitError) as caught:
        load_pretrained(tmp_path)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert key == "backbone" or key.startswith("model_args") or str(tmp_path / "config.json") in str(caught.value)


def test_a_model_is_saved_as_it_is_now(tmp_path: Path) -> None:
    model = made("vit_small_patch16_dinov3")
    model.pooling, model.attention, model.compile_blocks = "token", "masked", True
    again = load_pretrained(model.save_pretrained(tmp_path), compile_blocks=False)
    assert (again.pooling, again.attention, again.compile_blocks) == ("token", "masked", False)
    model.compile_blocks = False
    assert torch.equal(outputs(again), outputs(model))


def test_types_that_would_not_come_back_are_not_saved(tmp_path: Path) -> None:
    model = made()
    model.policy.half()
    with pytest.raises(SplitError, match=r"^policy\..* is torch.float16 and the patch embedding torch.float32"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("folder", [None, "", "  ", 3], ids=repr)
def test_what_names_no_folder_is_one_clear_line(folder: Any) -> None:
    with pytest.raises(SplitError, match="names no folder"):
        hub.named(folder)
    if isinstance(folder, str):
        with pytest.raises(SplitError, match="names no folder"):
            load_pretrained(folder)
        with pytest.raises(SplitError, match="names no folder"):
            made().save_pretrained(folder)


def test_the_decision_may_be_chosen_when_loading(tmp_path: Path) -> None:
    made(policy="entropy", budget=0.6).save_pretrained(tmp_path)
    assert load_pretrained(tmp_path, budget=0.5).decision == Decision("image", 0.5)
    assert load_pretrained(tmp_path, rule="batch").decision == Decision("batch", 0.6)
    again = load_pretrained(tmp_path, budget=0.5, rule="batch", pooling="token")
    assert (again.decision, again.pooling) == (Decision("batch", 0.5), "token")
    assert again.tokenize(images(2)).token_fraction.mean() <= 0.5
    with pytest.raises(SplitError, match="has no effect under rule='threshold'"):
        load_pretrained(tmp_path, budget=0.5, rule="threshold")
    learned = made()
    learned.decision = Decision("threshold", 0.6, 0.25)
    learned.save_pretrained(tmp_path)
    assert load_pretrained(tmp_path, budget=0.5).decision == Decision("image", 0.5, 0.25)
    made(policy="dense").save_pretrained(tmp_path)
    with pytest.raises(SplitError, match="does not rank patches"):
        load_pretrained(tmp_path, budget=0.5)


@pytest.mark.parametrize("options", [{"stages": 2}, {"policy": "dense"}, {"down": "bilinear"}, {"rope": "corner"}])
def test_what_belongs_to_the_weights_is_not_chosen_when_loading(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SplitError, match=r"belongs to the saved weights; budget, rule, attention, .* can be chosen"):
        load_pretrained(made().save_pretrained(tmp_path), **options)


def without_and_with(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["vit.extra"] = state.pop("vit.norm.bias")
    state["vit.norm.weight"] = torch.zeros(3)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (without_and_with, r"missing vit.norm.bias; unexpected vit.extra; vit.norm.weight is \(3,\), wanted \(32,\)"),
        (other_type, r"vit.norm.bias is torch.float16, wanted torch.float32; in all 1 of"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "model.safetensors cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: edit_config(folder, split_core=99), "no configuration of a wrapped model in format 1"),
        (lambda folder: edit_config(folder, spec=None), "config.json lacks spec"),
        (lambda folder: edit_config(folder, backbone="vit_nosuch"), "timm cannot build vit_nosuch"),
        (lambda folder: edit_config(folder, model_args={"widht": 3}), "timm cannot build vit_tiny_patch16_224 with"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(damage, line: str, tmp_path: Path) -> None:
    made().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(SplitError, match=line) as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_built_again_is_not_saved(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", **SIZES)
    for model, line in [
        (wrap(vit, Bright()), "the policy is a Bright without a name"),
        (wrap(tiny_vit(), "entropy"), "was not made by timm.create_model"),
        (made(act_layer=nn.ReLU), "model argument act_layer=.* cannot be written"),
    ]:
        with pytest.raises(SplitError, match=line):
            model.save_pretrained(tmp_path / "none")
    model = wrap(vit, "entropy")
    vit.blocks[0].mlp.act = nn.ReLU()
    with pytest.raises(SplitError, match="has other layers than the model"):
        model.save_pretrained(tmp_path / "none")
    vit.blocks[0].mlp.fc3 = nn.Linear(2, 2)
    with pytest.raises(SplitError, match=r"missing blocks\.0\.mlp\.fc3\.bias|unexpected blocks\.0\.mlp\.fc3\.bias"):
        model.save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(SplitError, match="is a file; a folder is needed"):
        made().save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("source", ["nosuch", "./a/b", "a/b/c", "/nosuch/x"])
def test_no_such_folder(source: str) -> None:
    with pytest.raises(SplitError, match=r"no such folder, and no name of a repository \(owner/name\)"):
        load_pretrained(source)


class Hub:
    """A hub in a folder, behind the calls that are made to the real one."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> huggingface_hub.RepoUrl:
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
        for path in Path(folder_path).iterdir():
            (self.root / repo_id / path.name).write_bytes(path.read_bytes())
        return f"https://huggingface.co/{repo_id}/tree/main"

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if not (self.root / repo_id).is_dir():
            raise OSError(f"404 Client Error: {repo_id} ({revision})\nmore lines")
        return str(self.root / repo_id)


def test_push_and_load_through_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(tmp_path, monkeypatch)
    model = made()
    assert model.push_to_hub("someone/vit-split", measured=[{"tokens": 0.5}]).endswith("someone/vit-split/tree/main")
    assert sorted(path.name for path in (tmp_path / "someone/vit-split").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert torch.equal(outputs(load_pretrained("someone/vit-split")), outputs(model))
    with pytest.raises(SplitError, match=r"someone/else: no such folder, and the Hub gives nothing: 404 .* \(v1\)$"):
        load_pretrained("someone/else", revision="v1")


def test_a_hub_that_cannot_be_asked_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):
        """As httpx.ConnectError: of no class that this package knows."""

    def fail(*_: Any, **__: Any) -> None:
        raise Unreachable("[Errno -2] Name or service not known\nmore lines")

    model = made()
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(SplitError, match=r"^someone/it: the Hub does not take the model: .* not known$"):
        model.push_to_hub("someone/it")
    with pytest.raises(SplitError, match=r"^someone/it: no such folder, and the Hub gives nothing: .* not known$"):
        load_pretrained("someone/it")


@pytest.mark.parametrize("repo", ["a/b/c", "bad name!", "-x/y"])
def test_a_wrong_name_of_a_repository_is_one_clear_line(repo: str) -> None:
    model = made()
    with pytest.raises(SplitError, match="the Hub does not take the model: Repo id must") as caught:
        model.push_to_hub(repo)
    assert "\n" not in str(caught.value)
