"""The settings of a run: one schema, checked whole before anything is written or torch is loaded.

Seven groups choose something that plugins offer. Each is a mapping ``{"name": ..., setting: value}`` whose settings
are checked by the chosen entry's own class, with its defaults filled in, so that the mapping written to config.yaml
is complete. `split_core.resolve` makes a RunConfig from recipes and the command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from split_core import registry
from split_core.errors import SplitError, unknown
from split_core.learn.config import DualConfig, PPOConfig, check_steps
from split_core.plugins import KINDS, PluginConfig

__all__ = ["GROUPS", "DualConfig", "PPOConfig", "RunConfig"]

GROUPS = tuple(kind for kind in KINDS if kind != "reducer")
"""Fields of RunConfig whose settings belong to a plugin. Reducers are rivals to run beside it, not a part of a run."""

Group = dict[str, Any]
Rule = Literal["threshold", "sample", "image", "batch"]


class Section(PluginConfig):
    """A part of RunConfig, under the rules of plugin settings: unknown keys are errors, instances do not change."""


class MethodsSection(Section):
    """A section that compares methods."""

    methods: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if v == "all" else v)] = Field(
        (),
        description="policies and reducers to compare with the run's own policy, which stands last;"
        " all: every one that needs no labels and no estimator (no reducers where pictures share a canvas)",
    )


class AdaptConfig(Section):
    """Fine-tuning of the backbone and the head on mixed masks (Sec. 3.4), alike for every method compared."""

    images: int = Field(50_000, ge=0, description="images seen; 0 skips the phase")
    batch_size: int = Field(512, ge=1, description="images per step")
    backbone_lr: float = Field(1e-6, ge=0, description="peak learning rate of the backbone; 0 freezes it")
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="factor on the backbone's rate for each block further from its output; null is 1"
    )
    head_lr: float = Field(1e-4, ge=0, description="peak learning rate of the task's head and the pyramid's new layers")
    weight_decay: float = Field(0.05, ge=0, description="AdamW weight decay")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    warmup: float = Field(0.05, ge=0, le=1, description="fraction of the steps over which learning rates rise")
    dense_fraction: float = Field(
        0.0, ge=0, le=1, description="share of images seen all-fine, to keep the dense accuracy"
    )
    freeze: tuple[str, ...] = Field(
        (), description="parameter names, or their beginnings, that stay as they are (vit.*, embed.*)"
    )
    budget_range: tuple[float, float] | None = Field(
        None, description="draw each step's budget from [low, high] instead of keeping to `budget`"
    )
    shard: bool = Field(
        False,
        description="FSDP2: divide weights, gradients and optimizer state among the processes, for large backbones",
    )

    @model_validator(mode="after")
    def _check_steps(self) -> AdaptConfig:
        check_steps(self.images, self.batch_size)
        return self

    @field_validator("budget_range")
    @classmethod
    def _check_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 < value[0] <= value[1] <= 1:
            raise ValueError("should be [low, high] with 0 < low <= high <= 1")
        return value


class WarmstartConfig(Section):
    """Cosine pseudo-labels for a learned policy while the backbone adapts (Sec. 3.4), or a policy already taught."""

    policy_lr: float = Field(1e-3, gt=0, description="learning rate of the policy")
    tau: float | None = Field(
        None,
        ge=0,
        le=1,
        description="cosine distance above which a parent is labelled to split, at first; null fits it to `budget`",
    )
    tau_lr: float = Field(1e-3, ge=0, description="step of tau per unit of (token fraction - budget)")
    policy: str | None = Field(
        None,
        description="models/NAME.safetensors of another run: start from its policy, taught by credit say, instead of"
        " labels (and by init from its backbone)",
    )
    spread: float = Field(
        2.0, gt=0, description="standard deviation that the logits of such a policy are brought to, about its threshold"
    )


class EvalConfig(MethodsSection):
    """Evaluation beside other methods at the same token fraction."""

    images: int = Field(5_000, ge=1, description="images evaluated")
    batch_size: int = Field(64, ge=1, description="images per batch")
    random_draws: int = Field(5, ge=1, description="draws that policies with randomness are averaged over")
    split: Literal["train", "val", "test"] = Field("test", description="split of the data")
    calibrate: Literal["val", "test"] = Field(
        "val",
        description="where thresholds are set: on val; or on further images of `split`, which matches budgets when val"
        " is busier or calmer, and adds the learned policy so matched (NAME_matched) beside the one that deploys",
    )


class BenchConfig(MethodsSection):
    """Speed of the whole pipeline, each method interleaved with the dense model."""

    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field((16,), min_length=1, description="batch sizes timed")
    budgets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (), description="token fractions timed; empty means `budget`"
    )
    repeats: int = Field(5, ge=1, description="timed runs, of which the median counts")
    warmup: int = Field(2, ge=0, description="runs before the timed ones")


class CompareConfig(Section):
    """Every method at several budgets (do=compare); methods are eval.methods, batch sizes bench.batch_sizes."""

    budgets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (), description="token fractions compared; reducers at equal FLOPs; empty means `budget`"
    )
    seeds: tuple[Annotated[int, Field(ge=0, le=2**62)], ...] = Field((), description="seeds; empty means `seed`")


class DrawConfig(Section):
    """Pictures of where the tokens went."""

    image: str | None = Field(
        None, description="a picture file; without one, images of the data (image=PATH for short)"
    )
    question: str | None = Field(None, description="asked about that picture (question=... for short; task=vqa)")
    count: int = Field(6, ge=1, description="images of the data drawn")

    @field_validator("image")
    @classmethod
    def _check_image(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError("should be a picture file, but there is no such file")
        return value


class ReportConfig(Section):
    """Tables and pictures from what runs have written."""

    runs: tuple[str, ...] = Field((), description="run folders (seeds, budgets) to merge; none means run_dir alone")
    out: str | None = Field(
        None, description="where the merged .json, .md and .png go, without ending; alone, remakes them from the .json"
    )

    kind: Literal["methods", "learning"] = Field(
        "methods", description="what runs are merged into: a comparison of methods, or how fast their policies learned"
    )

    @model_validator(mode="after")
    def _check_out(self) -> ReportConfig:
        if self.runs and not self.out:
            raise SplitError("runs needs out, a path without ending such as docs/results/digits_cls")
        return self


class ExportConfig(Section):
    """Weights for use without this library."""

    method: str | None = Field(None, description="whose backbone; null is the run's own policy's")
    out: str | None = Field(None, description="the .safetensors file; null is run_dir/export/METHOD.safetensors")


class CheckpointConfig(Section):
    """What a killed run resumes from."""

    every_steps: int = Field(200, ge=1, description="steps between checkpoints")
    keep_last: int = Field(2, ge=1, description="checkpoints kept")


class RunConfig(Section):
    """Everything a run depends on."""

    do: Literal["train", "eval", "bench", "compare", "draw", "report", "export", "check"] = Field(
        "train", description="what to do"
    )
    task: Group = Field(description="what the model is for")
    data: Group = Field(description="the images and their labels")
    model: Group = Field(description="the backbone and its weights")
    policy: Group = Field(description="decides which patches split")
    budget: float = Field(0.7, gt=0, le=1, description="rho, the token fraction aimed at")
    reducers: dict[str, Group] = Field(
        {}, description="settings of reducers that are compared, by name; a budget sets how strongly each reduces"
    )
    stages: int = Field(1, ge=1, description="S, split stages; a coarse patch is 2^S fine ones wide")
    attention: Group = Field({"name": "auto"}, description="attention backend; auto takes the best that runs here")
    compile_blocks: bool = Field(False, description="run the backbone's blocks through torch.compile")
    decision: Rule | None = Field(None, description="how logits become splits; null is the policy's own rule")
    adapt: AdaptConfig = Field(AdaptConfig(), description="fine-tuning of the backbone on masks")
    warmstart: WarmstartConfig = Field(WarmstartConfig(), description="warm start of a learned policy, during adapt")
    estimator: Group = Field({"name": "ppo"}, description="how the policy learns from errors, after adapt")
    error: Literal["task", "distill"] = Field(
        "task", description="what a policy learns to keep low: the task's error, or the distance to the all-fine output"
    )
    eval: EvalConfig = Field(EvalConfig(), description="evaluation")
    bench: BenchConfig = Field(BenchConfig(), description="timing")
    compare: CompareConfig = Field(CompareConfig(), description="comparison")
    draw: DrawConfig = Field(DrawConfig(), description="pictures")
    report: ReportConfig = Field(ReportConfig(), description="tables and pictures")
    export: ExportConfig = Field(ExportConfig(), description="weights for use elsewhere")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="checkpoints")
    init: str | None = Field(
        None,
        description="models/NAME.safetensors of another run: start from its backbone, pyramid and head, not its policy",
    )
    seed: int = Field(0, ge=0, le=2**62, description="seed of everything random")
    threads: int | None = Field(None, ge=1, description="CPU threads; null leaves torch's own number")
    workers: int = Field(0, ge=0, description="processes that load data; 0 loads in the main one")
    device: str = Field("auto", min_length=1, description="auto, cpu, cuda ...")
    # YAML reads a bare `no` as False
    precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(lambda v: "no" if v is False else v)] = Field(
        "no", description="mixed precision"
    )
    on_error: Literal["raise", "skip", "count"] = Field(
        "raise",
        description="a picture that cannot be read: stop, leave it out and name it, or leave it out and count it;"
        " nothing takes its place",
    )
    patience_s: int = Field(
        1800, ge=1, description="seconds that one process of a run waits for the others before it gives up"
    )
    run_dir: str = Field("", description="where everything is written; empty means runs/TASK-DATA-POLICY-BUDGET-sSEED")
    log_every: int = Field(10, ge=1, description="steps between log lines")

    @field_validator(*GROUPS, mode="before")
    @classmethod
    def _check_group(cls, value: Any, info: Any) -> Any:  # info: pydantic's ValidationInfo, a protocol at run time
        kind = info.field_name
        if not isinstance(value, str | dict | registry.Choice):
            raise ValueError(f"should be a name, one of {', '.join(registry.entries(kind))}")
        if kind == "attention" and (value == "auto" or (isinstance(value, dict) and value.get("name") == "auto")):
            if value not in ("auto", {"name": "auto"}):
                raise ValueError("auto takes no settings; name a backend to set it")
            return {"name": "auto"}
        choice = registry.choose(kind, value)
        return {"name": choice.name, **choice.settings.model_dump(mode="json")}

    @field_validator("reducers", mode="before")
    @classmethod
    def _check_reducers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("should map names of reducers to their settings")
        return {
            name: registry.choose("reducer", {"name": name, **settings}).settings.model_dump(mode="json")
            for name, settings in value.items()
        }

    def settings(self, group: str) -> PluginConfig:
        """A group's settings as an instance of the chosen entry's class, e.g. ``config.settings("estimator").lr``."""
        return registry.choose(group, getattr(self, group)).settings

    @model_validator(mode="after")
    def _check_methods(self) -> RunConfig:
        known = [*registry.entries("policy"), *registry.entries("reducer"), f"{self.policy['name']}_warmstart", "all"]
        for key in ("eval", "bench"):
            for name in getattr(self, key).methods:
                if name not in known:
                    raise SplitError(f"{key}.methods: {unknown('method', name, known)}")
        return self

    @model_validator(mode="after")
    def _name_run_dir(self) -> RunConfig:
        if not self.run_dir:
            name = f"{self.task['name']}-{self.data['name']}-{self.policy['name']}-{self.budget:g}-s{self.seed}"
            object.__setattr__(self, "run_dir", f"runs/{name}")  # frozen for users, not yet complete here
        return self
