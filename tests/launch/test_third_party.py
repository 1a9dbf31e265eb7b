"""A plugin distribution that pip installed is listed, and every one of its entries works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import run
import split_core
from split_core import registry, resolve
from split_core.config import GROUPS
from split_core.learn.estimator import EstimatorContext, Lesson
from split_core.plugins import KINDS
from split_core.task import DataContext, Dataset, ModelContext, TaskContext

SOURCE = Path(__file__).parents[1] / "third_party_plugin"
NAMES = {
    "policy": "bright",
    "task": "quadrant",
    "data": "squares",
    "model": "small",
    "reducer": "every_other",
    "attention": "naive",
    "estimator": "reinforce",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example, built from a copy so that the source stays clean."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCE, source)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", target, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(site)
    registry.discover.cache_clear()
    yield
    registry.discover.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "split_example"]:
        del sys.modules[name]


def test_the_example_offers_one_of_each_kind() -> None:
    assert set(NAMES) == set(KINDS)


def test_do_plugins_lists_it_in_a_fresh_process(site: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, run.__file__, "do=plugins"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    rows = [line.split()[:4] for line in done.stdout.splitlines()]
    for kind, name in NAMES.items():
        assert [kind, name, "split-example", "1.2.3"] in rows
    assert done.stderr == ""


@pytest.mark.usefixtures("installed")
def test_its_settings_are_checked_and_shown_like_our_own() -> None:
    chosen = [f"{kind}={name}" for kind, name in NAMES.items() if kind in GROUPS]
    arguments = [*chosen, "policy.tau=0.5", "estimator.price=2"]
    config = run.configure(resolve.parse_arguments(arguments))
    assert config.policy == {"name": "bright", "tau": 0.5}
    assert config.settings("estimator").price == 2  # type: ignore[attr-defined]
    with pytest.raises(split_core.errors.SplitError, match=r"Did you mean policy\.tau"):
        run.configure(resolve.parse_arguments([*arguments, "policy.tua=0.5"]))
    assert "split above this mean normalised brightness" in run.usage(run.RECIPES)


@pytest.mark.usefixtures("installed")
def test_its_parts_work_together() -> None:
    torch.manual_seed(0)
    data = registry.build("data", "squares", DataContext("train", image_size=(32, 32)))
    assert isinstance(data, Dataset)
    batch = next(iter(DataLoader(data, batch_size=6, collate_fn=data.collate)))
    images, target = batch["image"], batch["target"]
    vit = registry.build("model", {"name": "small", "patch": 4}, ModelContext(4, (32, 32)))
    model = split_core.wrap(vit, {"name": "bright", "tau": 0.3}, attention="naive")
    task = registry.build("task", "quadrant", TaskContext(tuple(data.classes), vit.embed_dim))

    features = model.forward_features(images)
    splits = (features.layout.counts - 16) // 3
    assert (splits >= 1).all()  # every square covers a whole parent ...
    assert (splits <= 4).all()  # ... and touches no more than four
    reference = split_core.wrap(vit, {"name": "bright", "tau": 0.3}, attention="masked").forward_features(images)
    torch.testing.assert_close(features.tokens, reference.tokens, rtol=1e-4, atol=1e-5)

    output = task.output(model, features)
    assert task.error(output, target).shape == (6,)
    assert set(task.score(output, target).tolist()) <= {0.0, 1.0}


@pytest.mark.usefixtures("installed")
def test_its_estimator_moves_a_policy_of_ours_towards_fewer_tokens_when_they_are_all_that_costs() -> None:
    torch.manual_seed(0)
    vit = registry.build("model", {"name": "small", "depth": 1}, ModelContext(4, (16, 16)))
    model = split_core.wrap(vit, "xattn")
    estimator = registry.build("estimator", "reinforce", EstimatorContext(budget=0.5, steps=10))
    optimizer = torch.optim.Adam(model.policy.parameters(), lr=0.1)
    images = torch.randn(8, 3, 16, 16)
    costs = []
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        lesson = Lesson(images, lambda features: torch.zeros(features.batch), generator)
        for loss in estimator.losses(model, lesson):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        costs.append(estimator.metrics()["cost"])
    assert costs[-1] < costs[0] - 0.1


@pytest.mark.usefixtures("installed")
def test_its_reducer_runs_the_later_blocks_on_fewer_tokens() -> None:
    vit = registry.build("model", {"name": "small", "depth": 2}, ModelContext(4, (32, 32))).eval()
    images = torch.randn(2, 3, 32, 32)
    reduced = registry.build("reducer", {"name": "every_other", "at": 1}, vit).eval()
    features = reduced.forward_features(images)
    assert reduced.forward_head(features).shape == (2, 4)
    assert features.layout.layers == ((64, 64), (32, 32)) == tuple(reduced.plan(reduced.config, 64))
    dense = features.dense()
    torch.testing.assert_close(dense[..., ::2], dense[..., 1::2])
