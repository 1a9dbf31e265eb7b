"""What holds for every policy of the distribution."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace

import pydantic
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from split_core.policy import BackboneInfo, SplitPolicy, StageView
from split_core.types import Look
from split_policies import entropy
from split_policies.plugin import split_policies

ENTRIES = {entry.name: entry for entry in split_policies()}
LEARNED = {"xattn", "mlp_parent", "mlp_concat", "xattn_context", "look", "late"}
DRAWS = {"random", "oracle"}
everyone = pytest.mark.parametrize("name", ENTRIES)


def build(name: str, info: BackboneInfo, **settings) -> SplitPolicy:
    module, attribute = ENTRIES[name].target.split(":")
    return getattr(importlib.import_module(module), attribute)(ENTRIES[name].config(**settings), info)


class NoDeviceRead(TorchDispatchMode):
    """Raises on the operators that make a CUDA forward wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "unique2"):
            raise AssertionError(f"device read: {name}")
        return func(*args, **(kwargs or {}))


def test_names_are_those_of_the_paper_and_its_rivals():
    assert set(ENTRIES) == LEARNED | DRAWS | {"entropy", "upsample_mse", "laplacian", "cosine", "dense", "coarse"}


def test_listing_imports_no_torch():
    code = "import split_policies.plugin as p; p.split_policies(); import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@everyone
def test_unknown_setting_is_refused(name):
    with pytest.raises(pydantic.ValidationError):
        ENTRIES[name].config(no_such_setting=1)


@everyone
def test_class_attributes(name, make_info):
    policy = build(name, make_info())
    trainable = [p for p in policy.parameters() if p.requires_grad]
    assert policy.learned == (name in LEARNED) == bool(trainable)
    pays_as_it_goes = LEARNED | {"random", "dense", "coarse"}
    assert policy.default_rule == ("threshold" if name in pays_as_it_goes else "image")


@everyone
@pytest.mark.parametrize(
    ("size", "patch", "stages"), [((64, 64), 8, 1), ((230, 210), 16, 2), ((9, 40), 4, 3), ((5, 3), 16, 2)]
)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("content", ["noise", "constant"])
def test_finite_logit_per_parent_at_every_scale(name, size, patch, stages, channels, content, make_view, make_info):
    policy = build(name, make_info(patch=patch, stages=stages, budget=0.6, channels=channels))
    view = make_view(size, patch=patch, stages=stages, channels=channels)
    if content == "constant":
        levels = tuple(torch.zeros_like(level) for level in view.pyramid.levels)
        pyramid = replace(view.pyramid, levels=levels)
        view = replace(view, pyramid=pyramid, images=torch.full_like(view.images, 0.1))
    objects = torch.rand(3, *view.grid.shape(0)) < 0.2
    for scale in range(1, stages + 1):
        logits = policy(replace(view, scale=scale, objects=objects))
        assert logits.shape == (3, view.grid.size(scale))
        assert logits.isfinite().all()


@everyone
@pytest.mark.parametrize("canvas", [False, True])
def test_forward_reads_nothing_from_the_device(name, canvas, make_view, make_info, monkeypatch):
    monkeypatch.setattr("split_policies.entropy.bincount", entropy.scatter_count)  # as on a GPU
    view = make_view((230, 210), patch=16, stages=2, scale=2)
    valid = torch.rand(3, *view.grid.shape(0)) < 0.8 if canvas else None
    view = replace(view, pyramid=replace(view.pyramid, valid=valid), objects=torch.ones(3, 16, 16).bool())
    policy = build(name, make_info(patch=16, stages=2, budget=0.5))
    with NoDeviceRead():
        policy(view)


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - DRAWS))
def test_an_image_is_scored_alike_wherever_it_stands_in_the_batch(name, make_view, make_info):
    policy = build(name, make_info(patch=8, stages=2)).eval()
    view = make_view((60, 52), patch=8, stages=2, batch=4, scale=1)
    order = torch.tensor([2, 0, 3, 1])
    levels = tuple(level[order] for level in view.pyramid.levels)
    look = Look(*(part[order] for part in vars(view.pyramid.look).values()))
    pyramid = replace(view.pyramid, levels=levels, look=look)
    shuffled = StageView(scale=1, pyramid=pyramid, images=view.images[order])
    torch.testing.assert_close(policy(shuffled), policy(view)[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_draws_come_from_the_generator_of_the_view(name, make_view, make_info):
    policy = build(name, make_info())
    view = make_view(objects=torch.zeros(3, 8, 8, dtype=torch.bool))
    first, again, other = (policy(replace(view, generator=torch.Generator().manual_seed(s))) for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("name", "sign"), [("dense", 1), ("coarse", -1)])
def test_fixed_policies(name, sign, make_view, make_info):
    assert (build(name, make_info())(make_view()) * sign > 0).all()
