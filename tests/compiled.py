"""Run by test_compile in a process of its own, because shapes checked at run time would enter the graphs."""

from __future__ import annotations

import json
import sys

import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from split_core.windows import Windows
from split_core.wrapping import wrap
from tiny import Logits, images, relative, tiny_vit

SIZES = [(32, 32), (40, 40), (32, 64), (48, 48), (56, 40), (64, 64), (24, 72), (80, 80), (72, 64)]
WINDOWED = [(32, 32), (64, 32), (32, 64), (64, 64), (96, 32), (32, 96), (96, 64), (64, 96), (96, 96)]


def generated(family: str) -> None:
    """Print how many kernels' code was generated, and the largest relative differences, for nine forwards."""
    torch.set_num_threads(1)
    vit = tiny_vit(family, depth=1)
    model, plain = (wrap(vit, Logits(), stages=2, compile_blocks=compiled).eval() for compiled in (True, False))
    compiled, errors, totals = [], [], set()
    with torch.no_grad():
        for batch, size in enumerate(SIZES, start=2):
            picture = images(batch, *size)
            errors.append(relative(model(picture), plain(picture)))
            totals.add(model.layout.total)
            compiled.append(counters["inductor"]["fxgraph_cache_miss"])
    print(json.dumps({"compiled": compiled, "errors": errors, "totals": len(totals)}))


def main(family: str) -> None:
    """Print graphs and largest relative differences of nine forwards, and graphs and gradients of three steps.

    Args:
        family: as in `tiny`; "windows" is EVA-02 without class token, its first block within windows.
    """
    torch.set_num_threads(1)
    count = CompileCounter()
    compile_with = torch.compile
    # Graphs are run as they are: generating code for these would take minutes, and `generated` does it once.
    torch.compile = lambda function, **options: compile_with(function, backend=count, **options)  # type: ignore[assignment]
    windows, sizes, options = None, SIZES, {}
    if family == "windows":
        family, windows, sizes, options = "eva02", Windows(4, (1,)), WINDOWED, {"class_token": False}
    vit = tiny_vit(family, depth=2, drop_path_rate=0.3, **options)
    model, plain = (wrap(vit, Logits(), stages=2, compile_blocks=c, windows=windows) for c in (True, False))
    graphs, errors, totals = [], [], set()
    with torch.no_grad():
        for batch, size in enumerate(sizes, start=2):
            picture = images(batch, *size)
            errors.append(relative(model.eval()(picture), plain.eval()(picture)))
            totals.add(model.layout.total)
            graphs.append(count.frame_count)
    trained, gradients = [], []
    for batch in (2, 3):
        steps = []
        for one in (model.train(), plain.train()):
            torch.manual_seed(batch)
            vit.zero_grad()
            one(images(batch, *sizes[-1])).square().sum().backward()
            steps.append(torch.cat([p.grad.flatten() for p in vit.parameters() if p.grad is not None]))
        gradients.append(relative(*steps))
        trained.append(count.frame_count)
    found = {"graphs": graphs, "errors": errors, "totals": len(totals), "trained": trained, "gradients": gradients}
    print(json.dumps(found))


if __name__ == "__main__":
    {"graphs": main, "code": generated}[sys.argv[1]](sys.argv[2])
