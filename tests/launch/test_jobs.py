"""Background jobs, status and sweeps: what they leave behind, and what they say of files that are not whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import jobs
import run
import sweep
from clusters import ClusterConfig
from split_core.engine.log import RunLog
from split_core.engine.results import read_metrics, read_results, write_json
from split_core.errors import SplitError, Stopped
from split_core.files import append_line, read_records
from status import status

ROW = {"method": "xattn", "token_fraction": 0.5, "error": 0.1, "accuracy": 0.9, "accuracy_se": 0.01}
WRECKS = [b'{"phase": "cut sho', b"\xff\xfe{}", b"[1]", b"3", b'{"step": 1}', b'{"phase": "adapt"}', b""]
WRECKS += [b'{"phase": "adapt", "step": "1"}', b'{"phase": "adapt", "step": 1, "loss": "x"}', b"[" * 9000]


def until(done: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


class Sleeper(jobs.Job):
    """A job that does nothing for a while."""

    def __call__(self) -> None:
        time.sleep(10)


# Nobody waits for a background job: its Popen is let go while it runs, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("setup", [(), ("echo said by setup", "exit 3")])
def test_a_background_job_holds_none_of_the_launchers_pipes(
    setup: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipes stand where our output was: they read as ended while the job still runs."""
    monkeypatch.setattr(jobs, "Job", Sleeper)
    ends = [os.pipe() for _ in range(2)]
    kept = os.dup(1), os.dup(2)
    for number, (_, write) in zip((1, 2), ends, strict=True):
        os.dup2(write, number)
        os.close(write)
    try:
        (record,) = jobs.submit({tmp_path: []}, tmp_path, ClusterConfig(kind="local", setup=setup))
    finally:
        for number, own in zip((1, 2), kept, strict=True):
            os.dup2(own, number)
            os.close(own)
    job = int(record["id"])
    for read, _ in ends:
        os.set_blocking(read, False)
        while os.read(read, 1000):  # BlockingIOError where somebody could still write
            pass
        os.close(read)
    if setup:
        until(lambda: [row["state"] for row in jobs.submitted(tmp_path)] == ["ended"])
        assert (tmp_path / jobs.JOBS / jobs.STARTS).read_text() == "said by setup\n"
    else:
        assert [row["state"] for row in jobs.submitted(tmp_path)] == ["running"]
        assert Path(f"/proc/{job}/fd/0").readlink() == Path(os.devnull)
        os.kill(job, signal.SIGKILL)


def test_a_number_that_was_given_again_is_another_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = {
        "id": str(child.pid),
        "kind": "local",
        "host": socket.gethostname(),
        "started": jobs._started(str(child.pid)),
    }
    assert jobs.state(record) == "running"
    assert jobs.state({**record, "started": "1"}) == "ended"
    assert jobs.state({**record, "host": "elsewhere"}) == "unknown (started on elsewhere)"
    child.communicate(b"\n")
    assert jobs.state(record) == "ended"


def test_a_process_that_ended_and_was_not_waited_for_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    record = {"id": str(child.pid), "kind": "local"}
    until(lambda: jobs.state(record) == "ended")
    assert child.wait() == 0


def test_records_are_read_past_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [{"phase": "adapt", "step": step, "loss": 0.5} for step in range(len(WRECKS) + 1)]
    lines = [json.dumps(row).encode() for row in whole]
    path.write_bytes(b"\n".join(part for pair in zip(lines, [*WRECKS, b""], strict=True) for part in pair))
    assert read_metrics(path) == whole
    assert len(read_records(path)) == len(whole) + 4
    assert "last logged: adapt step 10, loss 0.5" in status_of_a_run(tmp_path)
    RunLog(tmp_path, 1).rewind("adapt", 3)
    assert path.read_bytes().splitlines() == lines[:3]
    path.write_bytes(WRECKS[1])
    assert read_metrics(path) == []
    assert "last logged" not in status_of_a_run(tmp_path)
    assert read_records(tmp_path / "nothing") == []
    with pytest.raises(SplitError, match="cannot be read: Is a directory"):
        read_records(tmp_path)


def status_of_a_run(run_dir: Path) -> str:
    (run_dir / "config.yaml").touch()
    return status(run_dir)


def test_a_line_after_one_that_was_cut_short_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_line(path, '{"a": 1}')
    path.write_bytes(path.read_bytes() + b'{"a": 2')
    append_line(path, '{"a": 3}')
    append_line(path, '{"a": 4}')
    assert read_records(path) == [{"a": 1}, {"a": 3}, {"a": 4}]


def test_jobs_noted_in_half_a_line_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / jobs.JOBS).mkdir()
    whole = json.dumps({"id": "1", "kind": "local", "log": "x.out", "started": "0"})
    (tmp_path / jobs.JOBS / jobs.RECORD).write_text(f'{{"id": "7"}}\n{whole}\n[1]\n{{"id": "12", "ki')
    assert status_of_a_run(tmp_path).splitlines()[1:] == ["  job 1: ended, log x.out"]


def sweep_of(run_dir: Path, *arguments: str) -> list[sweep.Combination]:
    runs = sweep.combinations(arguments, run_dir)
    sweep.note(run_dir, runs)
    return runs


@pytest.mark.parametrize(
    "damage", ["", "[1]", "{}", '{"runs": []}', '{"runs": [1]}', '{"runs": [{"run_dir": "x", "values": {}}]}', "\udcff"]
)
def test_a_damaged_list_of_a_sweeps_runs_is_one_line(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / sweep.SWEEP_FILE).write_text(damage, errors="surrogateescape")
    assert run.main(["do=status", f"run_dir={tmp_path}"]) == 2
    assert run.main(["do=sweep", f"run_dir={tmp_path}", "seed=0,1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(f"{tmp_path}/sweep.json is damaged: it names no runs" in line for line in said)
    assert (tmp_path / sweep.SWEEP_FILE).read_text(errors="surrogateescape") == damage


@pytest.mark.parametrize(
    "damage", ["", '{"rows": [', '{"rows": 3}', '{"rows": [3]}', '{"rows": [{"method": "a", "error": "b"}]}']
)
def test_one_damaged_result_is_the_state_of_its_run_alone(damage: str, tmp_path: Path) -> None:
    good, bad = sweep_of(tmp_path, "seed=0,1")
    write_json(good.run_dir / "results.json", {"rows": [ROW]})
    bad.run_dir.mkdir()
    (bad.run_dir / "results.json").write_text(damage)
    _, _, first, second = status(tmp_path).splitlines()
    assert "finished" in first
    assert "0.900 ± 0.010" in first
    assert "results damaged" in second
    assert "finished" not in second
    if '"error"' not in damage:
        with pytest.raises(SplitError, match=r"results\.json (cannot be read|holds no results)"):
            read_results(bad.run_dir / "results.json", hint="train")


def test_a_second_sweep_in_a_folder_adds_to_the_table_or_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_of(tmp_path, "policy=xattn,entropy", "seed=0,1")
    sweep_of(tmp_path, "seed=1,2", "policy=xattn,entropy")  # the order of the keys is no other sweep
    sweep_of(tmp_path, "policy=xattn,entropy", "seed=1,2")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in status(tmp_path).splitlines()]
    assert [tuple(row[:2]) for row in rows[2:6]] == [(p, s) for p in ("xattn", "entropy") for s in "01"]
    assert {tuple(row[:2]) for row in rows[2:]} == {(p, s) for p in ("xattn", "entropy") for s in "012"}
    before = (tmp_path / sweep.SWEEP_FILE).read_bytes()
    assert run.main(["do=sweep", f"run_dir={tmp_path}", "budget=0.3,0.5"]) == 2
    said = capsys.readouterr().err
    assert "holds a sweep over other settings (policy, seed there, budget here); choose another run_dir" in said
    assert said.count("\n") == 1
    assert (tmp_path / sweep.SWEEP_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


CHILD = """\
import pathlib, signal, sys, time
place = pathlib.Path(next(a for a in sys.argv if a.startswith("run_dir="))[8:])
place.mkdir(parents=True)
def save(number, frame):
    time.sleep(0.3)
    (place / "saved").write_text(str(number))
    sys.exit({code})
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, {handler})
(place / "runs").touch()
time.sleep({seconds})
"""


@pytest.mark.parametrize(
    ("number", "handler", "code"),
    [
        (signal.SIGTERM, "save", 143),
        (signal.SIGUSR2, "save", 75),
        (signal.SIGTERM, "save", 2),  # what the run itself ends with, whatever it is
        (signal.SIGTERM, "save", 0),  # at its very end: the sweep is not done all the same
        (signal.SIGTERM, "signal.SIG_DFL", 143),  # before it listens
    ],
)
def test_a_sweep_told_to_stop_waits_until_its_run_has_saved(
    number: signal.Signals, handler: str, code: int, tmp_path: Path
) -> None:
    launcher = tmp_path / "child.py"
    launcher.write_text(CHILD.format(code=code, handler=handler, seconds=60))
    first, second = sweep.combinations(["seed=0,1"], tmp_path)

    def tell() -> None:
        until((first.run_dir / "runs").is_file)
        os.kill(os.getpid(), number)

    teller = threading.Thread(target=tell)
    before = signal.getsignal(number)
    teller.start()
    if handler == "save" and code:
        assert sweep.run_here([first, second], launcher) == code
    else:
        with pytest.raises(Stopped, match="stopped as asked in run 1 of 2") as stop:
            sweep.run_here([first, second], launcher)
        assert not stop.value.again
    teller.join()
    assert handler != "save" or (first.run_dir / "saved").read_text() == str(int(number))
    assert not second.run_dir.exists()
    assert signal.getsignal(number) == before


def test_ctrl_c_of_a_sweep_leaves_no_run_behind(tmp_path: Path) -> None:
    launcher = tmp_path / "child.py"
    launcher.write_text(CHILD.format(code=143, handler="save", seconds=60))
    first, second = sweep.combinations(["seed=0,1"], tmp_path)

    def tell() -> None:
        until((first.run_dir / "runs").is_file)
        os.kill(os.getpid(), signal.SIGINT)

    teller = threading.Thread(target=tell)
    teller.start()
    with pytest.raises(KeyboardInterrupt):
        sweep.run_here([first, second], launcher)
    teller.join()
    assert (first.run_dir / "saved").is_file()
    assert not second.run_dir.exists()


def test_a_failing_run_of_a_sweep_stops_no_other_and_gives_its_code(tmp_path: Path) -> None:
    launcher = tmp_path / "child.py"
    launcher.write_text("import sys; sys.exit({'seed=0': 0, 'seed=1': 3, 'seed=2': 4}[sys.argv[1]])")
    assert sweep.run_here(sweep.combinations(["seed=0,1,2"], tmp_path), launcher) == 3
