"""Timing by a clock that the test turns, and FLOPs against torch's own count."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from split_core import wrap
from split_core.engine.memory import peak_gib
from split_core.engine.session import Learner
from split_core.engine.timing import STAGES, interleave, stages
from split_core.features import Features
from split_core.flops import backbone_flops, ideal_speedup
from split_core.model import SplitViT
from split_core.reducer import Reducer
from split_core.task import Target, Task
from tiny import Logits, tiny_vit

CPU = torch.device("cpu")


class Clock:
    """Time that passes only when work says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> object:
        self.now += seconds
        return None


def test_rates_and_ratios() -> None:
    clock = Clock()
    runs = {"twice": lambda _: clock.work(1.0), "same": lambda _: clock.work(2.0)}
    dense, found = interleave(lambda _: clock.work(2.0), runs, range(-1, 3), batch=8, device=CPU, clock=clock)
    assert (dense.images_per_s, dense.speedup) == (4.0, 1.0)
    assert (found["twice"].images_per_s, found["twice"].speedup, found["twice"].speedup_spread) == (
        8.0,
        2.0,
        (2.0, 2.0),
    )
    assert found["same"].speedup == 1.0


def test_a_machine_that_slows_down_steadily_changes_no_ratio() -> None:
    clock = Clock()
    calls = {"n": 0}

    def slowing(share: float) -> object:
        calls["n"] += 1
        return clock.work(share * (10 + calls["n"]))

    runs = {name: lambda _: slowing(0.5) for name in "abc"}
    _, found = interleave(lambda _: slowing(1.0), runs, range(4), batch=1, device=CPU, clock=clock)
    assert all(timing.speedup == pytest.approx(2.0) for timing in found.values())
    assert all(timing.speedup_spread == pytest.approx((2.0, 2.0)) for timing in found.values())


def test_warm_up_rounds_do_not_count_and_the_median_does() -> None:
    clock = Clock()
    seconds = {-1: 100.0, 0: 1.0, 1: 2.0, 2: 30.0}
    run = {"a": lambda repeat: clock.work(seconds[repeat])}
    _, found = interleave(lambda _: clock.work(4.0), run, range(-1, 3), batch=6, device=CPU, clock=clock)
    assert found["a"].images_per_s == 3.0
    assert found["a"].images_per_s_spread == (0.2, 6.0)
    assert found["a"].speedup == 2.0


class Plain(Task):
    """The model's own head."""

    def output(self, model: SplitViT | Reducer, features: Features, target: Target | None = None) -> Tensor:
        return model.forward_head(features)


def test_the_peak_is_that_of_the_work_and_of_no_earlier_work() -> None:
    def holds(mib: int) -> Callable[[], object]:
        return lambda: torch.ones(mib * 2**18).sum()

    peaks = [peak_gib(holds(mib), CPU) for mib in (400, 100, 300, 1)]
    if None in peaks:
        pytest.skip("this system does not say")
    least = peaks[-1]
    assert [peak - least for peak in peaks] == pytest.approx([0.39, 0.097, 0.29, 0], abs=0.03)


def test_stages_are_those_of_the_forward() -> None:
    model = wrap(tiny_vit(), policy=Logits(), budget=0.7).eval()
    images = torch.randn(3, 3, 32, 32)
    ticks = iter(range(1_000_000))
    taken = stages(Learner(model, Plain()), images, repeats=2, warmup=1, clock=lambda: float(next(ticks)))
    assert tuple(taken) == STAGES
    assert taken == {"pyramid": 1.0, "decide": 1.0, "pack": 1.0, "blocks": 0.0, "head": 1.0}


@pytest.mark.parametrize("family", ["vit", "registers", "gap"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    vit = tiny_vit(family, num_classes=0)
    for block in vit.blocks:
        block.attn.fused_attn = False  # the counter does not know the CPU's fused kernel
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        vit.forward_features(torch.randn(1, 3, 32, 32))
    assert backbone_flops(vit, 16) == counter.get_total_flops()


def shape(dim: int, depth: int, patch: int, side: int) -> tuple[SimpleNamespace, int]:
    """What `backbone_flops` reads of a standard ViT, and its number of patches."""
    mlp = nn.Sequential(nn.Linear(dim, 4 * dim, device="meta"), nn.Linear(4 * dim, dim, device="meta"))
    weight = torch.empty(dim, 3, patch, patch, device="meta")
    embed = SimpleNamespace(proj=SimpleNamespace(weight=weight))
    blocks = [SimpleNamespace(mlp=mlp)] * depth
    vit = SimpleNamespace(embed_dim=dim, num_prefix_tokens=1, blocks=blocks, patch_embed=embed)
    return vit, (side // patch) ** 2


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((768, 12, 16, 224), 1.44),
        ((1024, 24, 14, 224), 1.44),
        ((1024, 24, 14, 336), 1.464),
        ((1280, 32, 14, 336), 1.46),
    ],
)
def test_ideal_speedup_of_the_paper_s_models_at_seven_tenths(sizes: tuple[int, int, int, int], expected: float) -> None:
    vit, cells = shape(*sizes)
    assert ideal_speedup(vit, cells, backbone_flops(vit, 0.7 * cells)) == pytest.approx(expected, abs=0.008)
    assert ideal_speedup(vit, cells, backbone_flops(vit, [cells, cells])) == 1.0
