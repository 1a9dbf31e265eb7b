"""What a run works with, built once from its configuration: device, data, backbone, task, log."""

from __future__ import annotations

import copy
import errno
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn

from split_core import registry, resolve
from split_core.config import RunConfig
from split_core.engine.assemble import assemble, not_shared
from split_core.engine.checkpoint import Checkpoints, load_weights, save_weights
from split_core.engine.interrupt import Interrupt
from split_core.engine.loader import evaluation_batches, to_device, valid_of
from split_core.engine.lock import RunLock
from split_core.engine.log import RunLog
from split_core.engine.ranks import Ranks, lost_peer
from split_core.engine.saver import Saver
from split_core.engine.tolerance import LeftOut, Tolerant
from split_core.errors import SplitError, Stopped, first_line
from split_core.files import unwritable
from split_core.model import SplitViT
from split_core.reducer import Reducer
from split_core.task import DataContext, Dataset, ModelContext, Task, TaskContext
from split_core.wrapping import backbone_info

logger = logging.getLogger(__name__)
SHARED = ("train", "eval")
"""Commands that several processes can do together."""
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EIO)
"""What a disk says that is not ours to mend."""


@dataclass
class Learner:
    """A model with its task head: what is trained, saved and evaluated together."""

    model: SplitViT | Reducer
    task: Task
    facts: dict[str, Any] = field(default_factory=dict)
    """What its weights' file says of how they were made."""

    def modules(self) -> dict[str, nn.Module]:
        """By the names their weights are saved under."""
        return {"model": self.model, "task": self.task}

    def __call__(self, images: torch.Tensor, valid: torch.Tensor | None = None) -> Any:
        """The task's output for images: the whole pipeline."""
        return self.task.output(self.model, self.model.forward_features(images, valid=valid))

    @property
    def split(self) -> SplitViT:
        """The model of a splitting method, for what only those have (a policy, a decision rule)."""
        assert isinstance(self.model, SplitViT)
        return self.model

    def eval(self) -> Learner:
        self.model.eval()
        self.task.eval()
        return self


class Session:
    """A run's configuration made into objects.

    Args:
        config: checked settings.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.accelerator = accelerator(config)
        self.device = self.accelerator.device if config.device in ("auto", "cpu") else torch.device(config.device)
        self.ranks = Ranks(self.accelerator.process_index, self.accelerator.num_processes, self.device)
        if self.ranks.world > 1 and config.do not in SHARED:
            raise SplitError(f"do={config.do} is for one process; only {' and '.join(SHARED)} can be shared")
        self.interrupt = Interrupt()
        self.run_dir = Path(config.run_dir)
        self.lock: RunLock | None = None
        self.left_out = LeftOut(named=config.on_error == "skip")
        self._data: dict[str, Dataset] = {}

    def __enter__(self) -> Session:
        self.interrupt.watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.interrupt.restore()
        if summary := self.left_out.summary():
            self.log.say(summary)
        self.log.close()
        if self.lock is not None:
            self.lock.release()
        if error is not None and self.ranks.world > 1 and lost_peer(error):
            raise SplitError(
                f"rank {self.ranks.rank}: another process of this run is gone, its own log says why; the same command"
                f" goes on from the last checkpoint ({first_line(error)})"
            ) from error
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            raise unwritable(Path(error.filename or self.run_dir), error) from error
        if error is None and self.ranks.world > 1:
            torch.distributed.destroy_process_group()

    @cached_property
    def log(self) -> RunLog:
        return RunLog(self.run_dir, self.config.log_every, writes=self.ranks.main)

    def saver(self, phase: str) -> Saver:
        """Checkpoints of a phase."""
        folder, settings = self.run_dir / "checkpoints" / phase, self.config.checkpoint
        return Saver(
            Checkpoints(folder, settings.keep_last, resolve.settings_of(self.config)),
            self.ranks, every=settings.every_steps, interrupt=self.interrupt, scaler=self.accelerator.scaler,
        )  # fmt: skip

    def stop_if_asked(self) -> None:
        """Between two pieces of work that need no saving; all processes have to ask together.

        Raises:
            Stopped: one of them was asked to stop.
        """
        if self.ranks.any(self.interrupt.asked):
            raise Stopped(
                f"stopped as asked; do={self.config.do} starts again from what is saved",
                again=self.ranks.any(self.interrupt.again),
            )

    def finished(self, weights: Path) -> bool:
        """Whether a phase has left its weights; one answer for all processes."""
        return self.ranks.same(weights.is_file)

    def finish(self, weights: Path, learner: Learner, facts: Mapping[str, Any], phase: str) -> None:
        """Save the weights of a phase that is done, and forget its checkpoints."""
        self.ranks.same(lambda: save_weights(weights, learner.modules(), facts))
        if self.ranks.main:
            self.saver(phase).checkpoints.clear()

    def data(self, split: str) -> Dataset:
        """A split of the data, sized and normalised as the backbone wants."""
        if split not in self._data:
            info = backbone_info(self._vit, stages=self.config.stages, budget=None)
            channels = self._vit.patch_embed.proj.in_channels
            size = tuple(self._vit.patch_embed.img_size)
            context = DataContext(split, self.config.seed, size, info.mean[:channels], info.std[:channels], channels)
            data = registry.build("data", self.config.data, context)
            self._data[split] = data if self.config.on_error == "raise" else Tolerant(data, split, self.left_out)
        return self._data[split]

    @cached_property
    def _vit(self) -> Any:  # timm's attributes are typed Tensor | Module
        """The backbone before training, with a head for the data's classes."""
        torch.manual_seed(self.config.seed)
        kind = registry.load(registry.get("task", self.config.task["name"]).entry)
        outputs = len(self.classes) if getattr(kind, "model_head", True) else 0
        vit = registry.build("model", self.config.model, ModelContext(num_classes=outputs, image_size=None))
        return vit.to(self.device)

    @cached_property
    def described(self) -> Dataset:
        """The data set as it describes itself (classes ...), which needs no model."""
        return registry.build("data", self.config.data, DataContext("train", self.config.seed))

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names of the data."""
        return tuple(self.described.classes)

    def learner(
        self, policy: str | dict[str, Any], *, budget: float | None = None, rule: Any = None, start: bool = True
    ) -> Learner:
        """A fresh copy of the starting backbone, wrapped by a method, and the task on top of it.

        Args:
            start: from the weights of `init`; False where the run's own are loaded next, for what is trained needs no
                other run any more.
        """
        torch.manual_seed(self.config.seed)
        config = self.config
        model = assemble(copy.deepcopy(self._vit), policy, config, budget=budget or config.budget, rule=rule)
        context = TaskContext(self.classes, self._vit.embed_dim, len(self._vit.blocks), self.described, self._vit)
        task = registry.build("task", config.task, context)
        model.taps = task.taps
        learner = Learner(model.to(self.device), task.to(self.device))
        if config.init is not None and start:
            if not Path(config.init).is_file():
                made = Path(config.init).parent.parent
                raise SplitError(
                    f"init={config.init}: there is no such file; train the run that makes it first, e.g. "
                    f"recipe={made.name} run_dir={made}"
                )
            load_weights(Path(config.init), learner.modules(), without=not_shared(model))
        return learner

    def images(
        self, model: SplitViT | Reducer, split: str, batch_size: int, limit: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Images of the first `limit` samples of a split, and the cells of `model` that hold picture; on the device."""
        for batch in evaluation_batches(self.data(split), batch_size, range(limit), workers=self.config.workers):
            batch = to_device(batch, self.device)
            yield batch["image"][:batch_size], valid_of(model, batch)  # images cut into windows make more rows


def accelerator(config: RunConfig) -> Accelerator:
    """Device, precision and process group, as the settings and the environment (RANK, WORLD_SIZE ...) say.

    Raises:
        SplitError: no such device here, or a precision that it cannot do.
    """
    # Accelerate forms a group of processes on a CPU only if it is told so; auto is the CPU where there is nothing else.
    alone = config.device != "auto" or not torch.accelerator.is_available()
    cpu = check_device(config.device).type == "cpu" and alone
    if config.precision == "fp16" and (cpu or not torch.cuda.is_available()):
        raise SplitError("precision=fp16 needs a GPU; use bf16 or no on a CPU")
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=config.patience_s))
    return Accelerator(cpu=cpu, mixed_precision=config.precision, kwargs_handlers=[patience])


def check_device(name: str) -> torch.device:
    """The device of this name ("auto" is the CPU here; Accelerate looks for a better one).

    Raises:
        SplitError: no such device on this machine.
    """
    try:
        device = torch.device("cpu" if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise SplitError(f"device={name}: {reason}. Use auto, cpu, or cuda on a machine with a GPU") from error
    return device


def provenance() -> dict[str, str]:
    """What results say of where they come from: command, commit, machine."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    arguments = shlex.join(sys.argv[1:]) if sys.argv[1:] else ""
    return {
        "command": f"python {Path(sys.argv[0]).parent.name}/{Path(sys.argv[0]).name} {arguments}".strip(),
        "commit": commit or "not a git checkout",
        "machine": machine(),
    }


def machine() -> str:
    """Processor or GPU, threads and torch version, in a few words."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"{where}, torch {torch.__version__}"
