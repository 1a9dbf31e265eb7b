"""Entropy scores at 1536 px beside a loop of torch.histc over the patches: times, memory, and the largest difference.

    python bench/entropy.py [--threads 1] [--block 32] [--repeats 15]

Both start from the normalised image and end with one score for each patch; one call of each is timed in turn. Prints a
row in Markdown: medians in ms of wall time and of processor time, their ratios, peak memory over the image's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from split_policies.entropy import block_entropy
from split_policies.pixels import luma

SIDE = 1536
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photograph() -> Tensor:
    """(1, 3, side, side): 8-bit noise of 8 scales, so that patches differ in entropy as those of a photograph do."""
    random = torch.Generator().manual_seed(0)
    levels = torch.zeros(1, 3, SIDE, SIDE)
    for octave in range(8):
        noise = torch.rand(1, 3, 6 << octave, 6 << octave, generator=random)
        levels += torch.nn.functional.interpolate(noise, size=(SIDE, SIDE), mode="bilinear") / 2**octave
    image = (levels / levels.amax() * 255).round() / 255
    return (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def loop(image: Tensor, block: int) -> Tensor:
    grey, scores = luma(image, mean=MEAN, std=STD)[0], []
    for top in range(0, SIDE, block):
        for left in range(0, SIDE, block):
            p = torch.histc(grey[top : top + block, left : left + block], bins=512, min=0, max=256) / block**2
            scores.append(-(p * (p + 1e-10).log2()).sum())
    return torch.stack(scores)[None]


def ours(image: Tensor, block: int) -> Tensor:
    grid = SIDE // block
    return block_entropy(image, mean=MEAN, std=STD, block=(block, block), shape=(grid, grid))


def timed(call: Callable[[], Tensor]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3


def peak(call: Callable[[], Tensor]) -> int:
    """Most bytes of tensors alive at a time during a call, by the allocator's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--block", type=int, default=32, help="side of a coarse patch; 32 for a ViT/16 with one stage")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    image = photograph()
    calls = [lambda: loop(image, options.block), lambda: ours(image, options.block)]
    difference = float((calls[0]() - calls[1]()).abs().max())
    times = [[timed(call) for call in calls] for _ in range(options.repeats)]
    wall, processor = (
        [statistics.median(row[which][clock] for row in times) for which in range(2)] for clock in range(2)
    )
    memory = peak(calls[1]) / image.nbytes
    print("| block | threads | wall: loop | ours | ratio | processor: loop | ours | ratio | memory | difference |")
    print("|" + " ---: |" * 10)
    cells = [f"{a:.1f} | {b:.1f} | {a / b:.1f}" for a, b in (wall, processor)]
    print(f"| {options.block} | {options.threads} | {' | '.join(cells)} | {memory:.2f} | {difference:.0e} |")


if __name__ == "__main__":
    main()
