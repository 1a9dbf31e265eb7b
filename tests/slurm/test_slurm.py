"""On a real Slurm: two tasks, told to stop, queued again or preempted, and finished as a straight run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import run
from faults.tiny_run import arguments
from tinyrun import metrics

HERE = Path(__file__).parent
pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm for these tests, as the environment that reaches it."""
    missing = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)")
    if os.getuid() != 0:
        pytest.skip("starting a Slurm of one's own needs root")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # munge refuses a socket below a private folder
    started = subprocess.run(["sh", HERE / "start.sh", folder], capture_output=True, text=True, check=False)
    try:
        assert started.returncode == 0, started.stderr
        yield {
            **os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }  # fmt: skip
    finally:
        subprocess.run(["sh", HERE / "stop.sh", folder], check=False)


def launch(environment: dict[str, str], *line: str) -> str:
    done = subprocess.run(
        [sys.executable, run.__file__, *line], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(done: Callable[[], bool], seconds: float, folder: Path) -> None:
    end = time.monotonic() + seconds
    while not done():
        logs = list(folder.rglob("*_log.*"))
        assert time.monotonic() < end, "\n".join(f"{path}\n{path.read_text()[-1500:]}" for path in logs)
        time.sleep(0.3)


CLUSTER = ["cluster=slurm", "cluster.tasks_per_node=2", "cluster.cpus_per_task=1", "cluster.mem_gb=2"]


def assert_same_losses(run_dir: Path, straight: Path) -> None:
    """Steps and losses of two processes are those of one that ran straight through."""
    mine, theirs = metrics(run_dir), metrics(straight)
    assert [(row["phase"], row["step"]) for row in mine] == [(row["phase"], row["step"]) for row in theirs]
    for ours, other in zip(mine, theirs, strict=True):
        # one process and two add in different orders, so a sampled split may fall the other way at a near-tie
        for key, spread in (("loss", 1e-3), ("error", 1e-3), ("token_fraction", 1e-2)):
            if key in other:
                assert ours[key] == pytest.approx(other[key], rel=spread), (ours["phase"], ours["step"], key)


LONG = {"adapt": {"images": 400}, "checkpoint": {"every_steps": 1000}}  # being told to stop alone makes it save


@pytest.fixture(scope="module")
def straight(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs, by one process."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    assert subprocess.run([sys.executable, run.__file__, *arguments(run_dir, **LONG)], check=False).returncode == 0
    return run_dir


def steps_logged(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


def test_two_tasks_told_to_stop_are_queued_again_and_end_as_a_straight_run(
    slurm: dict[str, str], straight: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    said = launch(slurm, *arguments(run_dir, **LONG), *CLUSTER)
    found = re.search(r"job (\d+)  log (\S+)", said)
    assert found
    job, log = found[1], Path(found[2])
    assert "policy:\n  name: xattn" in said
    until(lambda: steps_logged(run_dir) > 3, 500, tmp_path)
    assert "running, by process" in launch(slurm, "do=status", f"run_dir={run_dir}")
    subprocess.run(["scancel", "--signal=USR2", job], env=slurm, check=True)
    until(lambda: "Requeued job" in log.read_text(), 300, tmp_path)
    until((run_dir / "results.json").is_file, 500, tmp_path)
    assert "stopped as asked after step" in log.with_suffix(".err").read_text()
    assert_same_losses(run_dir, straight)
    until(lambda: "completed" in launch(slurm, "do=status", f"run_dir={run_dir}"), 300, tmp_path)
    assert f"{run_dir}: finished" in launch(slurm, "do=status", f"run_dir={run_dir}")


def test_two_nodes_preempted_by_the_scheduler_end_as_a_straight_run(
    slurm: dict[str, str], straight: Path, tmp_path: Path
) -> None:
    """A job that is worth more takes both nodes; Slurm itself puts the run back in the queue (PreemptMode=REQUEUE)."""
    run_dir = tmp_path / "run"
    two_nodes = ["cluster=slurm", "cluster.nodes=2", "cluster.cpus_per_task=1", "cluster.mem_gb=2"]
    found = re.search(r"job (\d+)  log (\S+)", launch(slurm, *arguments(run_dir, **LONG), *two_nodes))
    assert found
    job, log = found[1], Path(found[2])

    def fact(name: str) -> str:
        shown = subprocess.run(
            ["scontrol", "-o", "show", "job", job], env=slurm, capture_output=True, text=True, check=True
        )
        return re.search(rf"\b{name}=(\S+)", shown.stdout)[1]  # type: ignore[index]

    until(lambda: steps_logged(run_dir) > 3, 500, tmp_path)
    assert fact("NumNodes") == "2"
    urgent = ["sbatch", "-p", "urgent", "-N", "2", "-o", os.devnull, "--mem=100", "--wrap", "sleep 1"]
    subprocess.run(urgent, env=slurm, capture_output=True, check=True)
    until(lambda: fact("Restarts") == "1", 300, tmp_path)
    until((run_dir / "results.json").is_file, 500, tmp_path)
    assert fact("Restarts") == "1"
    assert "stopped as asked after step" in log.with_suffix(".err").read_text()
    assert_same_losses(run_dir, straight)


def test_a_sweep_is_an_array_with_one_table_and_a_failing_rank_ends_its_job(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "sweep"
    recipe, _ = arguments(tmp_path / "run")
    small = ["policy=entropy", "eval.methods=[]"]
    said = launch(slurm, "do=sweep", recipe, f"run_dir={run_dir}", *small, "seed=0,1", *CLUSTER[:1], *CLUSTER[2:])
    jobs = re.findall(r"job (\d+)_(\d)  seed=(\d)", said)
    assert [(task, seed) for _, task, seed in jobs] == [("0", "0"), ("1", "1")]
    until(lambda: len(list(run_dir.glob("*/results.json"))) == 2, 500, tmp_path)
    until(lambda: launch(slurm, "do=status", f"run_dir={run_dir}").count("finished") == 2, 300, tmp_path)
    rows = [line for line in (run_dir / "sweep.md").read_text().splitlines() if "entropy" in line]
    assert len(rows) == 2
    refused = tmp_path / "refused"
    (refused / "models").mkdir(parents=True)  # of no known run
    job = re.search(r"job (\d+)", launch(slurm, recipe, f"run_dir={refused}", *CLUSTER))
    assert job
    until(lambda: "failed" in launch(slurm, "do=status", f"run_dir={refused}"), 500, tmp_path)
    assert "error: " in "".join(path.read_text() for path in refused.rglob("*_log.err"))


def test_what_slurm_refuses_is_one_line(slurm: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, run.__file__, *arguments(tmp_path / "run"), *CLUSTER, "cluster.partition=nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, env=slurm, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "Slurm refuses the job: " in done.stderr
    assert "invalid partition" in done.stderr.lower()
