"""Runs as jobs of submitit: one process per GPU, saved and queued again when Slurm says that time is up."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clusters import ClusterConfig
from split_core.errors import SplitError
from split_core.files import append_line, read_records

JOBS, RECORD, STARTS = "jobs", "submitted.jsonl", "starts.log"
QUEUED_AGAIN_S = 120
"""Seconds that the other ranks wait for Slurm to end them after rank 0 has queued the job again."""


class Job:
    """A command line, as submitit calls it on every rank.

    Args:
        arguments: of the command line.
        folder: where launch/run.py is; it is not on a node's path.
    """

    def __init__(self, arguments: Sequence[str], folder: str) -> None:
        self.arguments, self.folder = list(arguments), folder

    def __call__(self) -> None:
        import submitit

        handler = signal.getsignal(signal.SIGUSR2)  # submitit's, which queues the job again; the run notes the signal
        if submitit.JobEnvironment().num_tasks > 1:
            # each process sees all GPUs of its node and takes the one of its local rank
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        sys.path.insert(0, self.folder)
        import run

        code = run.main(self.arguments)
        if callable(handler) and (code == run.STOPPED or (code == run.ENDED and preempted())):
            handler(signal.SIGUSR2, None)  # on rank 0 this queues the job and ends the process
            time.sleep(QUEUED_AGAIN_S)
        if code:
            raise RuntimeError(f"the run ended with exit code {code}; the line above says why")

    def checkpoint(self) -> Any:
        """What to run when the job starts again: the same, for the run resumes by itself."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def preempted() -> bool:
    """Whether Slurm is taking this job's nodes for another.

    In a partition's GraceTime it says so by SIGTERM alone, and a job that ends by itself before that time is over
    counts as failed and is not queued again.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return False
    command = ["scontrol", "-o", "show", "job", os.environ["SLURM_JOB_ID"]]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "JobState=RUNNING" in shown and re.search(r"\bPreemptTime=\d", shown) is not None


def submit(commands: Mapping[Path, Sequence[str]], folder: Path, cluster: ClusterConfig) -> list[dict[str, Any]]:
    """Submit one job for each run_dir, as an array when there are several.

    Returns: for each, {"id", "kind", "run_dir", "log"}, which is also noted in FOLDER/jobs/submitted.jsonl.

    Raises:
        SplitError: submitit is not installed, or Slurm refuses.
    """
    try:
        import cloudpickle
        import submitit
    except ModuleNotFoundError as error:
        raise SplitError(f"cluster= needs {error.name}; pip install 'split-core[slurm]' brings it") from error
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a node imports nothing to read the job
    place = (folder / JOBS).absolute()
    launch = str(Path(__file__).parent.absolute())
    try:
        place.mkdir(parents=True, exist_ok=True)
        executor = _executor(submitit, place, cluster)
        jobs = [Job(arguments, launch) for arguments in commands.values()]
        with _told_to(place / STARTS):
            if len(jobs) == 1:
                started = [executor.submit(jobs[0])]
            else:
                with executor.batch():
                    started = [executor.submit(job) for job in jobs]
    except OSError as error:
        raise SplitError(f"{place} cannot be written: {error.strerror or error}") from error
    except submitit.core.utils.FailedJobError as error:
        raise SplitError(f"Slurm refuses the job: {_last_line(error)}") from error
    records = [
        {"id": job.job_id, "kind": cluster.kind, "run_dir": str(run_dir), "log": str(job.paths.stdout)}
        for run_dir, job in zip(commands, started, strict=True)
    ]
    if cluster.kind == "local":  # what makes the number mean this process and no later one
        here = socket.gethostname()
        records = [{**record, "host": here, "started": _started(record["id"])} for record in records]
    for record in records:
        append_line(place / RECORD, json.dumps(record))
    return records


@contextmanager
def _told_to(log: Path) -> Iterator[None]:
    """What is started within has `log` as its output and no input: a background job that held our pipes would keep
    their readers (``| tail``, ``$(...)``) waiting until it ends. What cluster.setup and submitit print is in `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in range(3)]
    try:
        with Path(os.devnull).open("rb") as nothing, log.open("ab") as file:
            for number, other in enumerate((nothing, file, file)):
                os.dup2(other.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, own in enumerate(kept):
            os.dup2(own, number)
            os.close(own)


def _executor(submitit: Any, place: Path, cluster: ClusterConfig) -> Any:
    if cluster.kind == "local":
        executor = submitit.LocalExecutor(place / "%j")
        executor.update_parameters(
            tasks_per_node=cluster.tasks, gpus_per_node=cluster.gpus, timeout_min=cluster.timeout_min,
            signal_delay_s=cluster.signal_delay_s, setup=list(cluster.setup),
        )  # fmt: skip
        return executor
    executor = submitit.SlurmExecutor(place / "%j", max_num_timeout=cluster.max_timeouts)
    # Where one rank fails the others would wait for it: srun ends them. It no longer hands sbatch's cores down.
    srun = ["--kill-on-bad-exit=1"]
    srun += ["--cpus-per-task", str(cluster.cpus_per_task)] if cluster.cpus_per_task else []
    given = {
        "partition": cluster.partition, "account": cluster.account, "qos": cluster.qos,
        "constraint": cluster.constraint, "gpus_per_node": cluster.gpus_per_node,
        "cpus_per_task": cluster.cpus_per_task, "setup": list(cluster.setup) or None,
        "mem": None if cluster.mem_gb is None else f"{round(cluster.mem_gb * 1024)}M",
    }  # fmt: skip
    executor.update_parameters(
        job_name="split", nodes=cluster.nodes, ntasks_per_node=cluster.tasks, time=cluster.timeout_min,
        signal_delay_s=cluster.signal_delay_s, array_parallelism=cluster.array_parallelism, srun_args=srun,
        additional_parameters={"requeue": True},
        **{key: value for key, value in given.items() if value is not None},
    )  # fmt: skip
    return executor


def submitted(folder: Path) -> list[dict[str, Any]]:
    """The jobs that were submitted for a run or a sweep, oldest first, each with its "state"."""
    rows = read_records(folder / JOBS / RECORD)
    whole = [row for row in rows if all(isinstance(row.get(key), str) for key in ("id", "kind", "log"))]
    return [{**row, "state": state(row)} for row in whole]


def state(record: Mapping[str, Any]) -> str:
    """What Slurm, or the process table of the machine that a local job runs on, says of a job."""
    if record["kind"] == "local":
        host = record.get("host", socket.gethostname())
        if host != socket.gethostname():
            return f"unknown (started on {host})"
        started = _started(record["id"])
        return "running" if started is not None and record.get("started", started) == started else "ended"
    command = ["squeue", "-h", "-t", "all", "-o", "%T", "-j", str(record["id"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown (squeue does not answer)"
    return done.stdout.split()[0].lower() if done.stdout.split() else "no longer in the queue"


def _started(pid: str) -> str | None:
    """When the living process of this number was started, in the system's own words; None where there is none.

    Numbers are given again, so the number alone does not say that it is the same process. A system without /proc
    says no more than that there is one.
    """
    if not Path("/proc/self/stat").exists():
        return "" if subprocess.run(["ps", "-p", pid], capture_output=True, check=False).returncode == 0 else None
    try:
        facts = Path(f"/proc/{int(pid)}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if facts[0] in "ZX" else facts[19]  # proc(5): the third and the 22nd field


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
