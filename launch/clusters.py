"""Where a command runs: files under launch/clusters, `cluster=NAME` picks one and `cluster.KEY=VALUE` overrides it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from split_core import resolve
from split_core.errors import SplitError, nearest, unknown
from split_core.plugins import PluginConfig

CLUSTERS = Path(__file__).parent / "clusters"


class ClusterConfig(PluginConfig):
    """Settings of a cluster file.

    Attributes:
        kind: slurm, or local for background processes on this machine.
        partition, account, qos, constraint: as sbatch takes them; null leaves the site's default.
        nodes: nodes of a job.
        gpus_per_node: a number, or type:number such as h200:8; one process runs per GPU.
        tasks_per_node: processes on each node; null is one per GPU, or one.
        cpus_per_task: CPU cores of each process.
        mem_gb: memory of a node in GB.
        timeout_min: minutes after which Slurm stops a job; it is then queued again and goes on.
        max_timeouts: how many times it is queued again after a time-out.
        signal_delay_s: seconds before the end at which the run is told to save; fewer than timeout_min has.
        setup: shell lines that run first on the node.
        array_parallelism: runs of a sweep at one time.
    """

    kind: Literal["slurm", "local"] = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int = Field(1, ge=1)
    gpus_per_node: int | str | None = None
    tasks_per_node: int | None = Field(None, ge=1)
    cpus_per_task: int | None = Field(None, ge=1)
    mem_gb: float | None = Field(None, ge=0.001, allow_inf_nan=False)  # Slurm takes 0M for all there is
    timeout_min: int = Field(1440, ge=1)
    max_timeouts: int = Field(100, ge=0)
    signal_delay_s: int = Field(120, ge=1)
    setup: tuple[str, ...] = ()
    array_parallelism: int = Field(8, ge=1)

    @field_validator("gpus_per_node", mode="before")
    @classmethod
    def _counted(cls, value: object) -> object:
        if value is not None and not re.fullmatch(r"([\w.-]+:)?[0-9]{1,4}", str(value)):
            raise ValueError("should be a number or type:number, such as h200:8")
        return value

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return int(str(self.gpus_per_node).rpartition(":")[2]) if self.gpus_per_node else 0

    @property
    def tasks(self) -> int:
        """Processes of a node."""
        return self.tasks_per_node or self.gpus or 1


def clusters() -> dict[str, Path]:
    """Cluster files by name."""
    return resolve.recipes(CLUSTERS)


def read_cluster(chosen: str | Mapping[str, Any]) -> ClusterConfig:
    """A cluster by name (or the path of a yaml file), with what was typed over it.

    Raises:
        SplitError: no such cluster, key or value, or Slurm's commands are not on this machine.
    """
    typed = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    name = str(typed.pop("name", "slurm"))
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise SplitError(f"cluster={name}: there is no such file")
    elif name in clusters():
        path = clusters()[name]
    else:
        raise SplitError(f"cluster: {unknown('cluster', name, clusters())}")
    try:
        config = ClusterConfig.model_validate({**resolve.read_recipe(path), **typed})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        close = nearest(key, ClusterConfig.model_fields)
        if fault["type"] == "extra_forbidden":
            raise SplitError(f"cluster.{key}: no such setting." + (f" Did you mean cluster.{close}?" if close else ""))  # noqa: B904
        what = re.sub(r"^(Input|Value error,) ", "", fault["msg"])
        raise SplitError(f"cluster.{key}={fault['input']}: {what}") from None
    if config.signal_delay_s >= 60 * config.timeout_min:
        raise SplitError(
            f"cluster.signal_delay_s={config.signal_delay_s}: should be less than the {60 * config.timeout_min} s of"
            f" cluster.timeout_min={config.timeout_min}"
        )
    if config.kind == "slurm" and shutil.which("sbatch") is None:
        raise SplitError(f"cluster={name}: sbatch is not on this machine; use a login node, or cluster=local")
    if config.kind == "local" and config.nodes > 1:
        raise SplitError("cluster.nodes: cluster=local is one machine")
    return config
