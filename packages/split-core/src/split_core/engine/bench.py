"""``do=bench``: images per second of the whole pipeline, every method between two runs of the dense timm model.

Each policy is timed at each token fraction twice. `equal`: every image gets exactly that share of the tokens, best
parents first, so that lengths are equal and attention is an ordinary batch. `ragged`: a threshold that spends the
share on average over the images timed, so that lengths differ as they do in deployment. Images are real ones, because
on noise every content-adaptive rule splits everything; the weights do not matter to speed, so a run's trained ones
are used where there are some and random ones otherwise. Reducers keep equally many tokens of every image: one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from split_core.attention import choose_backend
from split_core.calibrate import scores_of, threshold_for
from split_core.config import RunConfig
from split_core.decision import Decision
from split_core.engine import plots, tables
from split_core.engine.adapt import load_learner, own_settings
from split_core.engine.assemble import chooser, is_reducer, operate
from split_core.engine.memory import peak_gib
from split_core.engine.methods import WARM, is_learned, method, named, policy_class
from split_core.engine.reference import dense_reference
from split_core.engine.results import write_json
from split_core.engine.session import Learner, Session, provenance
from split_core.engine.timing import Clock, Run, Timing, interleave, stages
from split_core.errors import SplitError
from split_core.flops import forward_flops, ideal_speedup
from split_core.model import SplitViT
from split_core.reduced import Reduced
from split_core.reducer import Reducer

Images = Float[Tensor, "b ch H W"]
Shown = tuple[Images, Bool[Tensor, "b r c"] | None]
"""A batch of images, and which fine cells hold picture."""
REFERENCE = "timm"
"""Name of the dense model's row; `dense` is the wrapped model with every parent split."""
FIXED = ("dense", "coarse")
"""Policies that spend what they spend, whatever the budget."""


@dataclass(frozen=True)
class Variant:
    """One row of the comparison: a method at one token fraction.

    Args:
        method: its name.
        learner: its model.
        point: how much it spends here: a `Decision`, or a reducer's settings.
        lengths: "equal", "ragged", or "fixed" for policies that ignore the budget.
        budget: token fraction aimed at, of a reducer that of equal FLOPs; None when fixed.
    """

    method: str
    learner: Learner
    point: Any
    lengths: str
    budget: float | None

    @property
    def name(self) -> str:
        return self.method if self.budget is None else f"{self.method} {self.budget:g} {self.lengths}"

    def __call__(self, images: Images, valid: Tensor | None = None) -> Any:
        operate(self.learner.model, self.point)
        return self.learner(images, valid)


@torch.no_grad()
def measure(
    learners: Mapping[str, Learner], shown: Shown, *, repeats: int, warmup: int, clock: Clock
) -> dict[str, Timing]:
    """Time learners as they are on one batch, each between two runs of the dense timm model."""
    dense = dense_reference(next(iter(learners.values())))
    runs = {name: lambda _, learner=learner: learner(*shown) for name, learner in learners.items()}
    rounds = range(-warmup, repeats)
    images = shown[0]
    size, device = images.shape[0], images.device
    return interleave(lambda _: dense(images), runs, rounds, batch=size, device=device, clock=clock)[1]


def main(config: RunConfig) -> None:
    """Time, print the table, write run_dir/bench.json and run_dir/report/bench.{md,png}."""
    with Session(config) as session:
        results = provenance() | run(session)
        write_json(session.run_dir / "bench.json", results)
        folder = session.run_dir / "report"
        table = tables.bench(results)
        table.save(folder / "bench.md", results)
        plots.bench(results, folder / "bench.png")
        table.show(session.log.console)
        session.log.say(f"{folder / 'bench.md'}  {folder / 'bench.png'}")


@torch.no_grad()
def run(session: Session) -> dict[str, Any]:
    """All rows, and what they have in common."""
    config = session.config
    threads = torch.get_num_threads()
    left_out: list[str] = []
    learners = dict(_learners(session, left_out))
    common = conditions(session, learners)
    rows = [row for size in config.bench.batch_sizes for row in _rows(session, learners, size, left_out)]
    if torch.get_num_threads() != threads:
        raise SplitError(f"the number of threads changed while timing, from {threads} to {torch.get_num_threads()}")
    return common | {"rows": rows, "left_out": left_out}


def conditions(session: Session, learners: Mapping[str, Learner]) -> dict[str, Any]:
    """Dtype, threads and attention, which all methods must share.

    Raises:
        SplitError: they do not.
    """
    seen = {(str(next(learner.model.vit.parameters()).dtype), learner.model.attention) for learner in learners.values()}
    if len(seen) > 1:
        raise SplitError(f"methods would be timed under different conditions: {sorted(seen)}")
    model = next(iter(learners.values())).model
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(session.config.precision, torch.float32)
    return {
        "model": session.config.model, "image_size": list(model.vit.patch_embed.img_size),
        "stages": session.config.stages, "threads": torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch."),
        "attention": choose_backend(model.attention, session.device, dtype).name,
        "repeats": session.config.bench.repeats,
    }  # fmt: skip


def _learners(session: Session, left_out: list[str]) -> Iterator[tuple[str, Learner]]:
    """Methods to time by name, the run's own last: trained if the run has weights, else as they start."""
    own = session.config.policy["name"]
    learned = own if is_learned(own) else None
    for name in [*named(session.config, "bench"), own]:
        chosen = method(name, learned)
        if policy_class(chosen.policy).analysis:
            raise SplitError(f"bench.methods: {name} reads labels, so its speed says nothing; leave it out")
        if (session.run_dir / "models" / f"{chosen.weights}.safetensors").is_file():
            yield name, load_learner(session, chosen.weights, chosen.policy)
        elif name.endswith(WARM):
            raise SplitError(f"bench.methods: {name} has no weights in {session.run_dir}; {own} has the same speed")
        else:
            try:
                yield name, session.learner(own_settings(session.config, chosen.policy)).eval()
            except SplitError as error:
                if not is_reducer(name):
                    raise
                note(left_out, name, error)


def _variants(
    session: Session, learners: Mapping[str, Learner], batches: Sequence[Shown], left_out: list[str]
) -> Iterator[Variant]:
    """All rows of one batch size, in order; what cannot be timed is added to `left_out`."""
    fixed = [name for name in learners if name in FIXED]
    for name in fixed:
        yield Variant(name, learners[name], Decision("threshold"), "fixed", None)
    for budget in session.config.bench.budgets or (session.config.budget,):
        for name, learner in learners.items():
            if name in fixed:
                continue
            model = learner.model
            if isinstance(model, Reducer):
                try:
                    yield Variant(name, learner, model.settings_for(budget), "equal", budget)
                except SplitError as error:
                    note(left_out, name, error)
                continue
            yield Variant(name, learner, Decision("image", budget), "equal", budget)
            if budget < 1 and not chooser(model).exact:  # at 1 both are all fine
                ragged = threshold_for([scores_of(model, *shown) for shown in batches], budget)
                yield Variant(name, learner, ragged, "ragged", budget)


def note(left_out: list[str], name: str, error: SplitError) -> None:
    """Remember, once, what is left out of a comparison and why."""
    line = f"{name} is left out: {error}"
    if line not in left_out:
        left_out.append(line)


def _rows(
    session: Session, learners: Mapping[str, Learner], size: int, left_out: list[str]
) -> Iterator[dict[str, Any]]:
    """Everything at one batch size, in one interleaved run."""
    bench = session.config.bench
    first = next(iter(learners.values()))
    batches = list(session.images(first.model, session.config.eval.split, size, size * bench.repeats))
    batches = [shown for shown in batches if len(shown[0]) == size]
    if not batches:
        raise SplitError(
            f"bench.batch_sizes: the data's {session.config.eval.split} split has fewer than {size} images"
        )
    variants = list(_variants(session, learners, batches, left_out))
    dense = first.model.vit
    rounds = range(-bench.warmup, bench.repeats)

    def on(call: Callable[..., object]) -> Run:
        return lambda repeat: call(*batches[repeat % len(batches)])

    with session.accelerator.autocast():
        reference, timings = interleave(
            on(dense_reference(first)),
            {variant.name: on(variant) for variant in variants},
            session.log.track(rounds, total=len(rounds), title=f"batch size {size}, {len(variants)} rows"),
            batch=size,
            device=session.device,
        )
    cells = _cells(dense)
    common = {"rho": None, "seed": session.config.seed, "batch_size": size}
    described: dict[str, Any] = {
        "token_fraction": 1.0,
        "tokens_per_image": cells,
        "tokens_range": [cells, cells],
        "ideal_speedup": 1.0,
    }
    with session.accelerator.autocast():
        described["peak_memory_gib"] = peak_gib(lambda: on(dense_reference(first))(0), session.device)
    yield {"method": REFERENCE, **common, "lengths": "fixed", **_row(reference, described)}
    for variant in variants:
        with session.accelerator.autocast():
            described = _describe(variant, batches, bench.repeats, bench.warmup)
        place = {**common, "rho": variant.budget, "lengths": variant.lengths}
        yield {"method": variant.method, **place, **_row(timings[variant.name], described)}


def _row(timing: Timing, described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **described,
        "images_per_s": timing.images_per_s, "images_per_s_spread": timing.images_per_s_spread,
        "speedup": timing.speedup, "speedup_spread": timing.speedup_spread,
        "share_of_ideal": timing.speedup / described["ideal_speedup"],
    }  # fmt: skip


def _describe(variant: Variant, batches: Sequence[Shown], repeats: int, warmup: int) -> dict[str, Any]:
    """Tokens and FLOPs of every image timed, seconds of the stages on the first batch, and the most memory."""
    model, task, device = variant.learner.model, variant.learner.task, batches[0][0].device
    cells = _cells(model.vit)
    counts: list[int] = []
    fractions: list[float] = []
    flops: list[float] = []

    def forwards() -> None:
        for shown in batches:
            variant(*shown)
            assert model.layout is not None
            counts.extend(model.layout.lengths)
            fractions.extend(model.layout.token_fraction.tolist())
            further = task.flops(model.layout.counts.cpu().numpy())
            flops.extend((forward_flops(model, model.layout) + further).tolist())

    peak = peak_gib(forwards, device)
    result: dict[str, Any] = {
        "token_fraction": sum(fractions) / len(fractions), "tokens_per_image": sum(counts) / len(counts),
        "tokens_range": [min(counts), max(counts)], "ideal_speedup": ideal_speedup(
            model.vit, cells, flops, model.windows, task.flops(cells)
        ),
    }  # fmt: skip
    if isinstance(model.layout, Reduced):
        result["tokens_per_layer"] = [list(pair) for pair in model.layout.layers]
    if isinstance(model, SplitViT):
        result["stages_s"] = stages(variant.learner, *batches[0], repeats=repeats, warmup=min(1, warmup))
    return result | {"peak_memory_gib": peak}


def _cells(vit: Any) -> int:
    rows, cols = vit.patch_embed.grid_size
    return int(rows) * int(cols)
