"""What a run has written survives kills, full disks, and other runs."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import run
from faults.kills import kill_and_resume
from faults.tiny_run import arguments, configure
from split_core import resolve
from split_core.engine import session as sessions
from split_core.engine import train
from split_core.engine.checkpoint import Checkpoints
from split_core.engine.interrupt import Interrupt
from split_core.engine.lock import RunLock, holder
from split_core.engine.log import RunLog
from split_core.engine.ranks import Ranks
from split_core.engine.saver import Saver
from split_core.errors import SplitError, Stopped
from split_core.files import append_line, write_whole

KILLS = 20


def test_killed_at_random_moments_every_resume_ends_as_the_straight_run(tmp_path: Path) -> None:
    result = kill_and_resume(tmp_path, KILLS, seed=0, seconds=400)
    assert result["kills"] == KILLS
    assert result["differences"] == [[]] * result["runs"]
    assert len(set(result["phases"])) >= 2, "the kills fell into one phase only"


def test_two_runs_in_one_folder_are_one_line_and_the_first_goes_on(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert str(holder(tmp_path)).startswith(f"process {os.getpid()} on ")
    with pytest.raises(SplitError, match=rf"in use by process {os.getpid()} on "):
        train.main(configure(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    lock.release()
    assert holder(tmp_path) is None
    RunLock(tmp_path).release()


def test_a_dead_process_leaves_no_lock(tmp_path: Path) -> None:
    code = "import os, pathlib, sys\nfrom split_core.engine.lock import RunLock\n"
    code += "lock = RunLock(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".lock").read_text()
    assert holder(tmp_path) is None
    RunLock(tmp_path).release()


def test_a_failed_run_lets_the_folder_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(train, "adapt", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        train.main(configure(tmp_path))
    assert holder(tmp_path) is None


def test_a_checkpoint_of_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    mine = Checkpoints(tmp_path, 2, resolve.settings_of(configure(tmp_path, seed=1)))
    mine.save(3, {"value": torch.ones(2)})
    other = Checkpoints(tmp_path, 2, resolve.settings_of(configure(tmp_path, seed=2, workers=3)))
    with pytest.raises(SplitError, match=r"00000003 was made with other settings \(seed: 1 there, 2 here\)"):
        other.newest()
    assert mine.newest() == 3


def test_weights_without_a_config_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(SplitError, match=r"holds models/ of a run but no config\.yaml"):
        train.main(configure(tmp_path))
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("damage", ["cut", "bit", "facts", "absent"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2):
        kept.save(step, {"value": torch.tensor(step)})
    state = tmp_path / "00000002" / "state.pt"
    content = bytearray(state.read_bytes())
    if damage == "cut":
        state.write_bytes(content[:-1])
    elif damage == "bit":
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
    elif damage == "facts":
        (tmp_path / "00000002" / "facts.json").write_text('{"step": 2, "sha')
    else:
        state.unlink()
    assert kept.newest() == 1
    assert kept.load(1)["value"] == 1
    assert "00000002 cannot be used" in caplog.text


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep_last=1)
    kept.save(1, {"value": Path("x")})
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        kept.load(1)


def test_drafts_of_killed_saves_are_dropped_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".00000001.99").mkdir()
    Checkpoints(tmp_path, keep_last=1).save(2, {})
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def limited(run_dir: Path, most: int, **changes: object) -> subprocess.CompletedProcess[str]:
    """The run in a process that may write no file larger than `most` bytes: the kernel refuses in mid-write."""
    return subprocess.run(
        [sys.executable, run.__file__, *arguments(run_dir, **changes)], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )  # fmt: skip


def test_a_disk_that_takes_no_more_is_one_line_and_the_last_checkpoint_stands(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = limited(run_dir, 20_000)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {run_dir}/")
    assert "cannot be written: File too large; what was there before still stands" in done.stderr
    assert not list(run_dir.rglob("*.tmp"))
    assert not list((run_dir / "checkpoints").rglob(".0*"))


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EROFS])
def test_a_fault_of_the_disk_leaves_the_old_file(full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_whole(path, "old")

    def refuse(handle: int) -> None:
        raise OSError(full, os.strerror(full))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SplitError, match=f"results.json cannot be written: {os.strerror(full)}"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_that_is_full_is_one_line() -> None:
    with pytest.raises(SplitError, match="/dev/full cannot be written: No space left on device"):
        append_line(Path("/dev/full"), "x")


def test_a_read_only_run_dir_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def refuse(self: Path, mode: str = "r", *rest: object, **more: object) -> object:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return real(self, mode, *rest, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SplitError, match=f"run_dir={tmp_path} cannot be written: Read-only file system"):
        train.main(configure(tmp_path))


def test_an_error_of_the_disk_anywhere_in_a_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train, "adapt", refuse)
    with pytest.raises(SplitError, match="cannot be written: No space left on device"):
        train.main(configure(tmp_path))


def saver(folder: Path, interrupt: Interrupt, scaler: object = None) -> Saver:
    return Saver(Checkpoints(folder, 2), Ranks(), every=2, interrupt=interrupt, scaler=scaler)


def test_the_scaler_of_fp16_is_part_of_the_state(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaler.scale(torch.ones(1))  # makes its tensors
    scaler.update(512.0)
    saver(tmp_path, Interrupt(), scaler).offer(2, 9, lambda: {"value": 1})
    fresh = torch.amp.GradScaler("cpu")
    resumed = saver(tmp_path, Interrupt(), fresh).resume()
    assert resumed is not None
    assert resumed[0] == 2
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 512.0


def test_a_signal_is_noted_and_acted_on_between_steps_once(tmp_path: Path) -> None:
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGUSR2)
    interrupt.watch()
    try:
        offered = saver(tmp_path, interrupt)
        offered.offer(1, 9, lambda: {"value": 1})
        assert offered.resume() is None
        os.kill(os.getpid(), signal.SIGUSR2)

        def state() -> dict[str, int]:
            os.kill(os.getpid(), signal.SIGUSR2)  # a second one during the save
            return {"value": 3}

        with pytest.raises(Stopped, match="after step 3 of 9"):
            offered.offer(3, 9, state)
    finally:
        interrupt.restore()
    assert offered.resume() == (3, {"value": 3, "scaler": None})
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_run_told_to_stop_says_where_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    write = RunLog.write

    def write_and_signal(log: RunLog, phase: str, step: int, numbers: dict[str, float]) -> None:
        write(log, phase, step, numbers)
        if (phase, step) == ("adapt_xattn_warmstart", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunLog, "write", write_and_signal)
    assert run.main(arguments(run_dir)) == run.ENDED
    assert capsys.readouterr().err == (
        "stopped as asked after step 3 of 6 of adapt_xattn_warmstart; the same command goes on from there\n"
    )
    facts = json.loads((run_dir / "checkpoints/adapt_xattn_warmstart/00000003/facts.json").read_text())
    assert facts["step"] == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 is possible here")
def test_an_impossible_precision_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SplitError, match="precision=fp16 needs a GPU; use bf16 or no on a CPU"):
        sessions.Session(configure(tmp_path, precision="fp16"))


def test_somebody_who_looks_keeps_no_run_from_starting(tmp_path: Path) -> None:
    """A look at the lock takes it for a moment; a run that starts then waits for that moment and no longer."""
    code = "import pathlib, sys\nfrom split_core.engine.lock import holder\n"
    code += "print(flush=True)\nwhile True: holder(pathlib.Path(sys.argv[1]))"
    RunLock(tmp_path).release()
    watcher = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert watcher.stdout
        watcher.stdout.readline()
        for _ in range(300):
            RunLock(tmp_path).release()
    finally:
        watcher.kill()
        watcher.communicate()


@pytest.mark.parametrize("damage", ["[1]", "", b"\xff", "null"])
def test_a_holder_whose_name_cannot_be_read_is_another_process(damage: str | bytes, tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    (tmp_path / ".lock").write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    assert holder(tmp_path) == "another process"
    lock.release()
