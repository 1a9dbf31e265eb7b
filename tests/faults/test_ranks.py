"""Two processes train and evaluate as one does, and none hangs when the other is lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from faults.ranks import LIMIT, together
from split_core.draws import shared_generator, uniform
from split_core.engine import shard
from split_core.engine.loader import evaluation_batches
from split_core.engine.ranks import Ranks, lost_peer
from split_core.errors import SplitError
from tinyrun import metrics

SECONDS = 600


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Every case, run once."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, together(folder, SECONDS)


@pytest.fixture
def pair(cases: tuple[Path, dict[str, dict[str, Any]]]) -> dict[str, Path]:
    """The same run by one process and by two."""
    folder, results = cases
    for case in ("one", "two"):
        assert set(results[case]["codes"]) == {0}, results[case]["said"]
    return {case: folder / case for case in ("one", "two")}


@pytest.fixture
def divided(cases: tuple[Path, dict[str, dict[str, Any]]]) -> Path:
    """The same run by two processes that divide weights, gradients and moments, lost in its third step and resumed."""
    folder, results = cases
    assert results["divided"]["codes"] == [1, 1], results["divided"]["said"]
    assert results["resumed"]["codes"] == [0, 0], results["resumed"]["said"]
    return folder / "divided"


def test_training_losses_are_those_of_one_process(pair: dict[str, Path]) -> None:
    assert_same_losses(pair["one"], pair["two"])


def test_processes_find_each_other_without_being_told_the_device(pair: dict[str, Path], cases: Any) -> None:
    folder, results = cases
    assert results["auto"]["codes"] == [0, 0], results["auto"]["said"]
    assert_same_losses(pair["one"], folder / "auto")


def test_a_request_to_stop_is_heard_by_all_while_they_evaluate(cases: Any) -> None:
    """Rank 0 has a batch more and would wait for rank 1 for good."""
    folder, results = cases
    assert results["asked"]["codes"] == [1, 1]
    assert all("Stopped: stopped as asked; do=train starts again" in said for said in results["asked"]["said"])
    assert not (folder / "asked" / "results.json").exists()
    assert results["asked"]["waited"] < LIMIT


def test_batches_that_do_not_divide_are_refused_before_anything_is_written(cases: Any) -> None:
    folder, results = cases
    assert results["odd"]["codes"] == [1, 1]
    line = "estimator.batch_size=15 does not divide among 2 processes"
    assert all(line in said for said in results["odd"]["said"])
    assert not (folder / "odd").exists()


def test_divided_weights_train_resume_and_are_saved_whole(pair: dict[str, Path], divided: Path) -> None:
    """FSDP2 (adapt.shard): losses of one process, and weights that any process reads."""
    assert_same_losses(pair["one"], divided)
    for path in sorted((pair["one"] / "models").iterdir()):
        alone, shared = load_file(path), load_file(divided / "models" / path.name)
        assert {key: value.shape for key, value in alone.items()} == {key: v.shape for key, v in shared.items()}
        if path.stem != "xattn":  # learned from samples, of which a near-tie may fall either way
            for key, value in alone.items():
                torch.testing.assert_close(shared[key], value, rtol=1e-3, atol=1e-5)


def test_one_process_reads_what_several_divided(tmp_path: Path) -> None:
    """Checkpoints of divided runs hold names and whole tensors, so that their number may change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}])
    shard.shard(model, Ranks(), "no")

    def step() -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    kept = copy.deepcopy(shard.state(model, optimizer))
    step()
    after = {key: value.clone() for key, value in shard.whole(model).items()}
    step()
    shard.load(model, optimizer, kept)
    step()
    assert all(torch.equal(after[key], value) for key, value in shard.whole(model).items())
    with pytest.raises(SplitError, match=r"adapt\.shard=true needs precision=bf16 or no"):
        shard.shard(model, Ranks(), "fp16")


def assert_same_losses(alone_in: Path, shared_in: Path) -> None:
    one, two = metrics(alone_in), metrics(shared_in)
    assert [(row["phase"], row["step"]) for row in one] == [(row["phase"], row["step"]) for row in two]
    for alone, shared in zip(one, two, strict=True):
        for key in ("loss", "error", "token_fraction", "imitation", "lambda", "tau"):
            if key in alone:
                assert shared[key] == pytest.approx(alone[key], rel=2e-3, abs=1e-4), (
                    alone["phase"],
                    alone["step"],
                    key,
                )


def test_evaluation_numbers_are_those_of_one_process(pair: dict[str, Path]) -> None:
    one, two = (np.load(folder / "per_image.npz") for folder in pair.values())
    assert set(one.files) == set(two.files)
    for key in one.files:
        assert one[key].shape == two[key].shape == (20,)
    # of the backbone that both trained alike; the policy's rare near-ties may fall either way
    assert two["random/error"] == pytest.approx(one["random/error"], rel=5e-3)
    rows = [json.loads((folder / "results.json").read_text())["rows"] for folder in pair.values()]
    for alone, shared in zip(*rows, strict=True):
        assert shared["images"] == alone["images"]
        assert shared["token_fraction"] == pytest.approx(alone["token_fraction"], abs=0.02)


def test_one_process_alone_writes(pair: dict[str, Path]) -> None:
    one, two = ({str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in pair.values())
    without = {path for path in two if "tfevents" not in path}
    assert without == {path for path in one if "tfevents" not in path}


def test_a_batch_that_does_not_divide_is_one_line_on_every_rank(cases: Any) -> None:
    result = cases[1]["uneven"]
    assert result["codes"] == [1, 1]
    for said in result["said"]:
        assert "SplitError: adapt.batch_size=15 does not divide among 2 processes" in said


@pytest.mark.parametrize(("case", "code"), [("raises", 1), ("dies", -9)])
def test_no_process_waits_for_one_that_is_lost(case: str, code: int, cases: Any) -> None:
    result = cases[1][case]
    assert result["codes"] == [1, code], result["said"]
    assert result["waited"] < LIMIT
    assert "rank 0: another process of this run is gone" in result["said"][0]
    if case == "raises":
        assert "a fault of rank 1" in result["said"][1]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_sample_is_evaluated_once_whatever_the_number_of_processes(world: int) -> None:
    class Numbers:
        classes = ("number",)

        def __len__(self) -> int:
            return 19

        def __getitem__(self, index: int) -> int:
            return index

        def collate(self, samples: list[int]) -> dict[str, Any]:
            return {"image": samples, "target": {}}

    seen = [
        [batch["image"] for batch in evaluation_batches(Numbers(), 4, range(100), rank=rank, world=world)]
        for rank in range(world)
    ]
    assert sorted(number for share in seen for batch in share for number in batch) == list(range(19))
    alone = list(evaluation_batches(Numbers(), 4, range(100)))
    assert [seen[index % world][index // world] for index in range(len(alone))] == [b["image"] for b in alone]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_processes_draw_is_what_one_draws(world: int) -> None:
    batch, rollouts, cells = 8, 3, 5
    whole = uniform((rollouts * batch, cells), torch.Generator().manual_seed(7), "cpu").view(rollouts, batch, cells)
    share = batch // world
    parts = []
    for rank in range(world):
        generator = shared_generator(7, start=rank * share, count=share, total=batch)
        parts.append(uniform((rollouts * share, cells), generator, "cpu").view(rollouts, share, cells))
    assert torch.equal(torch.cat(parts, 1), whole)


def test_alone_nothing_is_sent() -> None:
    ranks = Ranks()
    assert (ranks.main, ranks.any(True), ranks.any(False), ranks.mean(2.5)) == (True, True, False, 2.5)
    assert ranks.same(lambda: 3) == 3
    assert ranks.gather("a") == ["a"]
    ranks.wait()
    with pytest.raises(SplitError, match="batch=5 does not divide among 2 processes"):
        Ranks(0, 2).share("batch", 5)


def test_lost_peers_are_told_from_faults_of_our_own() -> None:
    assert lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"))
    assert not lost_peer(RuntimeError("shapes do not match"))
    assert not lost_peer(ValueError("Timed out"))
