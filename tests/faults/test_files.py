"""Damaged files, wrong tables and odd settings: the right value, or one line that names the thing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import run
import sweep
from clusters import ClusterConfig, read_cluster
from faults.damage import FORMATS, damaged, picture_bytes
from split_core import registry, resolve
from split_core.engine import check
from split_core.engine.loader import evaluation_batches, training_batches
from split_core.engine.tolerance import LeftOut, Tolerant
from split_core.errors import SplitError
from split_core.pictures import PictureError, read_picture, read_rgb
from split_core.task import DataContext
from split_tasks.configs import ImageFolderConfig
from split_tasks.data.imagefolder import ImageFolder
from split_tasks.data.index import in_one_line, read_index

CONTEXT: dict[str, Any] = {"image_size": (16, 16), "mean": (0.0,), "std": (1.0,)}
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def one_line(error: BaseException, part: str = "") -> None:
    """The error is one line that holds `part`."""
    assert len(str(error).splitlines()) == 1
    assert part in str(error)


@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged_pictures_give_pixels_or_a_line_that_names_them(suffix: str, tmp_path: Path) -> None:
    content = picture_bytes(suffix)
    path = tmp_path / f"x{suffix}"
    refused = 0
    for seed in range(60):
        path.write_bytes(damaged(content, seed))
        try:
            image = read_rgb(path, max_pixels=10_000)
        except PictureError as error:
            refused += 1
            one_line(error, str(path))
        else:
            assert image.mode == "RGB"
            assert image.width * image.height <= 10_000
    assert refused > 0
    path.write_bytes(content)
    assert read_picture(path).image.size == (24, 24)


def bomb(path: Path, side: int) -> Path:
    """A small png that claims side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize("side", [1_001, 1_400, 100_000])
def test_a_picture_past_the_limit_is_refused_before_it_is_unpacked(side: int, tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS
    path = bomb(tmp_path / "bomb.png", side)
    with pytest.raises(PictureError, match=r"bomb\.png has more than the 1000000 pixels that max_pixels allows"):
        read_picture(path, max_pixels=1_000_000)
    assert before == Image.MAX_IMAGE_PIXELS


def test_transparency_is_kept_when_asked_for(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (10, 20, 30, 40)).save(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png", alpha=True).image.getpixel((0, 0)) == (10, 20, 30, 40)
    Image.new("RGB", (4, 4)).save(tmp_path / "b.png")
    with pytest.raises(PictureError, match=r"b\.png has no transparency"):
        read_picture(tmp_path / "b.png", alpha=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (20, 20), (60 * index, 0, 0)).save(folder / f"{index}.png")
    return tmp_path


def folder(root: Path, split: str = "val") -> ImageFolder:
    return ImageFolder(ImageFolderConfig(root=root), DataContext(split, **CONTEXT))


def test_an_animation_is_said_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    for name in ("a", "b"):
        frames[0].save(root / "val" / "cat" / f"{name}.gif", save_all=True, append_images=frames[1:])
    data = folder(root)
    for index in range(len(data)):
        data[index]
    assert caplog.text.count("is animated: its first frame is taken") == 1
    assert [problem.kind for problem in data.problems()] == ["animated, of which the first frame is taken"] * 2


def test_damaged_pictures_are_left_out_never_replaced_and_counted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = root / "val" / "dog" / "2.png"
    broken.write_bytes(broken.read_bytes()[:40])
    left_out = LeftOut(named=True)
    data = Tolerant(folder(root), "val", left_out)
    for _ in range(2):  # met twice, counted once
        labels = torch.cat([b["target"]["label"] for b in evaluation_batches(data, 4, range(99))])
        assert sorted(labels.tolist()) == [0, 0, 0, 0, 1, 1, 1]
    assert caplog.text.count("left out: ") == 1
    assert str(left_out.summary()).startswith("1 pictures could not be read and were left out: ")
    assert str(broken) in str(left_out.summary())
    with pytest.raises(PictureError, match=str(broken)):
        list(evaluation_batches(folder(root), 4, range(99)))


def test_a_batch_without_a_whole_picture_is_passed_over_or_ends_training(root: Path) -> None:
    for path in (root / "val" / "cat").glob("*.png"):
        path.write_bytes(b"")
    data = Tolerant(folder(root), "val", LeftOut(named=False))
    batches = list(evaluation_batches(data, 1, range(99), gaps=True))
    assert sorted(len(batch.get("image", ())) for batch in batches) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert batches.count({}) == len(data.left_out.lines) == 4
    assert [len(batch["image"]) for batch in evaluation_batches(data, 1, range(99))] == [1, 1, 1, 1]
    with pytest.raises(SplitError, match=r"no picture of the batch of step \d can be read"):
        list(training_batches(Tolerant(folder(root), "val", LeftOut(named=False)), 1, range(40), seed=0))


def test_augmentation_is_that_of_a_run_that_tolerates_nothing(root: Path) -> None:
    class Noisy:
        classes = ("a",)

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"image": torch.rand(1), "target": {}}

        def collate(self, samples: Any) -> dict[str, Any]:
            return {"image": torch.stack([sample["image"] for sample in samples])}

    tolerant = Tolerant(Noisy(), "train", LeftOut(named=False))
    for (_, plain), (_, other) in zip(
        training_batches(Noisy(), 4, range(3), seed=1), training_batches(tolerant, 4, range(3), seed=1), strict=True
    ):
        assert torch.equal(plain["image"], other["image"])


def test_processes_that_load_data_do_not_hear_the_request_to_stop() -> None:
    config = DataContext("train", 0, (40, 40), (0.5,), (0.5,), 1)
    data = registry.build("data", {"name": "digits", "train": 64}, config)
    batches = training_batches(data, 4, range(6), seed=0, workers=1)
    seen = 0
    for _ in batches:  # at its start, and while it works
        for child in multiprocessing.active_children():
            for number in (signal.SIGUSR2, signal.SIGTERM):
                os.kill(child.pid, number)
        seen += 1
    assert seen == 6


def test_do_check_says_everything_in_one_go(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    (root / "val" / "dog" / "0.png").write_bytes((root / "val" / "dog" / "0.png").read_bytes()[:50])
    line = ["do=check", f"data.root={root}", "data=imagefolder", "model=digits_vit", "policy=entropy"]
    config = run.configure(resolve.parse_arguments([*line, f"run_dir={root / 'run'}"]))
    with pytest.raises(SplitError, match="the data has 3 faults"):  # test is val here
        check.main(config)
    said = capsys.readouterr().out
    assert "train: 8 images, 2 classes\n  1 unreadable\n" in said
    assert str(root / "train" / "cat" / "1.png") in said
    assert str(root / "val" / "dog" / "0.png") in said
    assert not (root / "run").exists()


def test_do_check_goes_on_past_what_a_run_would_refuse(root: Path) -> None:
    (root / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    indexed(root, "train", "train/cat/0.png,cat", "train/cat/0.png,cat", "gone.png,cat", "train/cat/1.png,cat")
    data = ImageFolder(ImageFolderConfig(root=root), DataContext("train", strict=False))
    assert [problem.kind for problem in data.problems()] == ["listed more than once", "missing", "unreadable"]
    assert len(data) == 2


def indexed(root: Path, split: str, *lines: str) -> None:
    (root / f"{split}.csv").write_text("\n".join(["path,label", *lines]))


def test_a_split_can_be_a_table(root: Path) -> None:
    indexed(root, "train", "train/cat/0.png,cat", "train/dog/1.png,dog")
    indexed(root, "val", "val/dog/3.png,dog")
    data = folder(root)
    assert (len(data), data.classes) == (1, ("cat", "dog"))
    assert data[0]["target"]["label"] == 1
    assert len(folder(root, "test")) == 1


def test_all_that_is_wrong_with_a_table_is_said_in_one_line(root: Path) -> None:
    indexed(root, "train", "train/cat/0.png,cat")
    rows = ["val/cat/0.png,cat", "val/cat/0.png,cat", "val/no.png,cat", "val/dog/1.png,dgo"]
    indexed(root, "val", *rows)
    with pytest.raises(SplitError) as caught:
        folder(root)
    line = str(caught.value)
    assert (
        "1 listed more than once: val/cat/0.png; 1 missing: val/no.png; 1 label that train does not have: dgo" in line
    )
    assert "\n" not in line


@SHARED_FOLDER
@given(
    st.one_of(st.text(), st.binary().map(lambda b: b.decode("latin-1")), st.from_regex(r"path,label\n(\w+,\w*\n?)*"))
)
def test_any_table_is_rows_or_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        rows = read_index(path)
    except SplitError as error:
        one_line(error, str(path))
    else:
        assert all(name and label for name, label in rows)
        in_one_line([("odd", name) for name, _ in rows])


KEYS = st.sampled_from(
    ["task", "data", "policy", "budget", "adapt.images", "estimator.dual", "seed", "a.b", "eval.methods"]
)


@given(st.lists(st.one_of(st.text(), st.builds("{}={}".format, KEYS, st.text())), max_size=4))
def test_any_command_line_is_a_configuration_or_one_line(arguments: list[str]) -> None:
    arguments = [a for a in arguments if not a.startswith(("run_dir", "recipe"))]
    try:
        run.configure(resolve.parse_arguments(arguments))
    except SplitError as error:
        one_line(error)


@SHARED_FOLDER
@given(st.one_of(st.text(), st.from_regex(r"(seed|data|budget|defaults): [\[\]{}\w]*\n")))
def test_any_recipe_file_is_settings_or_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        resolve.load(resolve.read_recipe(path))
    except SplitError as error:
        one_line(error)


def test_values_of_a_sweep_are_separated_by_commas_outside_brackets() -> None:
    assert sweep.split_values("0,1,2") == ["0", "1", "2"]
    assert sweep.split_values("[0.3,0.9],null") == ["[0.3,0.9]", "null"]
    assert sweep.split_values("'a,b',c") == ["'a,b'", "c"]
    runs = sweep.combinations(["policy=xattn,entropy", "budget=0.5", "seed=0,1"], Path("s"))
    assert [run.run_dir.name for run in runs] == [
        f"policy={policy},seed={seed}" for policy in ("xattn", "entropy") for seed in (0, 1)
    ]
    assert runs[1].arguments == ["budget=0.5", "policy=xattn", "seed=1", "do=train", "run_dir=s/policy=xattn,seed=1"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["do=sweep", "seed=0"], "do=sweep needs a setting with several values"),
        (["do=sweep", "seed=0,0"], "a sweep's values should differ"),
        (["do=sweep", "sed=0,1"], "sed: no such setting. Did you mean seed?"),
        (["cluster=h20"], "cluster: no cluster is called 'h20'. Did you mean h200?"),
        (["cluster=local", "cluster.node=2"], "cluster.node: no such setting. Did you mean cluster.nodes?"),
        (["cluster=local", "cluster.nodes=2"], "cluster=local is one machine"),
        (["cluster=local", "cluster.timeout_min=x"], "cluster.timeout_min=x: should be a valid integer"),
        (["cluster=local", "cluster.gpus_per_node=h200"], "should be a number or type:number, such as h200:8"),
        (["cluster=local", "cluster.gpus_per_node=-1"], "cluster.gpus_per_node=-1: should be a number or type:number"),
        (["cluster=local", "cluster.gpus_per_node=h200:-1"], "should be a number or type:number, such as h200:8"),
        (["cluster=local", "cluster.gpus_per_node=true"], "cluster.gpus_per_node=True: should be a number or"),
        (["cluster=local", "cluster.gpus_per_node=1.5"], "cluster.gpus_per_node=1.5: should be a number or"),
        (["cluster=local", "cluster.timeout_min=1", "cluster.signal_delay_s=600"], "should be less than the 60 s of"),
        (["cluster=local", "cluster.timeout_min=1", "cluster.signal_delay_s=60"], "should be less than the 60 s of"),
        (["cluster=local", "cluster.mem_gb=1e400"], "cluster.mem_gb=inf: should be a finite number"),
        (["cluster=local", "cluster.mem_gb=.nan"], "cluster.mem_gb=nan: should be"),
        (["cluster=local", "cluster.mem_gb=1.0e-9"], "cluster.mem_gb=1e-09: should be greater than or equal to 0.001"),
        (["do=status"], "do=status needs run_dir=FOLDER"),
        (["do=status", "run_dir=nosuch"], "run_dir=nosuch holds neither a run nor a sweep"),
        (["do=status", "run_dir=x", "seed=1"], "do=status takes run_dir alone, but got seed"),
    ],
)
def test_mistakes_with_clusters_and_sweeps_are_one_line_and_touch_nothing(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert line in said
    assert list(tmp_path.iterdir()) == []


def test_every_cluster_file_loads_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    for path in Path(run.__file__).parent.joinpath("clusters").glob("*.yaml"):
        assert path.read_text().startswith("# ")
        cluster = read_cluster(path.stem)
        assert cluster.tasks == (cluster.gpus or 1)
    assert ClusterConfig(gpus_per_node="h200:8").tasks == 8
