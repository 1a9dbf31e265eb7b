"""Every kind of picture file gives the right pixels or an error that names it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from split_core.pictures import is_picture, read_rgb
from split_core.task import DataContext
from split_tasks.configs import ImageFolderConfig
from split_tasks.data.imagefolder import ImageFolder


def centre(path):
    image = read_rgb(path)
    assert image.mode == "RGB"
    return image.getpixel((image.width // 2, image.height // 2))


@pytest.mark.parametrize(
    ("mode", "value", "suffix", "expected", "tolerance"),
    [
        ("L", 100, ".png", (100, 100, 100), 0),
        ("1", 1, ".png", (255, 255, 255), 0),
        ("I;16", 51400, ".png", (200, 200, 200), 0),
        ("I;16", 514, ".tif", (2, 2, 2), 0),
        ("F", 0.5, ".tif", (128, 128, 128), 1),
        ("LA", (0, 0), ".png", (255, 255, 255), 0),
        ("RGBA", (255, 0, 0, 128), ".png", (255, 127, 127), 1),
        ("CMYK", (0, 255, 255, 0), ".jpg", (254, 0, 0), 6),
        ("CMYK", (0, 255, 255, 0), ".tif", (255, 0, 0), 0),
        ("YCbCr", (150, 100, 200), ".jpg", (251, 108, 100), 6),
    ],
)
def test_golden_pixels(tmp_path, mode, value, suffix, expected, tolerance):
    path = tmp_path / f"x{suffix}"
    if mode == "I;16":
        image = Image.fromarray(np.full((8, 8), value, dtype=np.uint16))
    elif mode == "F":
        ramp = np.full((8, 8), value, dtype=np.float32)
        image = Image.fromarray(ramp)
    else:
        image = Image.new(mode, (8, 8), value)
    image.save(path, **({"quality": 100} if suffix == ".jpg" else {}))
    np.testing.assert_allclose(centre(path), expected, atol=tolerance)


def test_a_transparent_palette_is_laid_over_white(tmp_path):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 255, 255, 0, 0] + [0] * 762)
    image.putpixel((0, 0), 0)
    image.save(tmp_path / "p.png", transparency=1)
    assert centre(tmp_path / "p.png") == (255, 255, 255)
    assert read_rgb(tmp_path / "p.png").getpixel((0, 0)) == (0, 0, 255)


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (16, 8), "white")
    image.paste("black", (0, 0, 4, 8))  # a bar on the left, which a quarter turn puts on top
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "o.jpg", exif=exif, quality=100)
    turned = read_rgb(tmp_path / "o.jpg")
    assert turned.size == (8, 16)
    assert turned.getpixel((4, 0))[0] < 60 < 200 < turned.getpixel((4, 12))[0]


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert centre(tmp_path / "a.gif") == (255, 0, 0)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_truncated_file_is_named(tmp_path, suffix):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, {".jpg": "JPEG", ".png": "PNG"}[suffix])
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(buffer.getvalue()[: int(len(buffer.getvalue()) * 0.6)])
    with pytest.raises(ValueError, match=f"cut{suffix} cannot be read"):
        read_rgb(path)


@pytest.mark.parametrize(("name", "data"), [("text.jpg", b"hello"), ("empty.png", b"")])
def test_what_is_no_picture_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is not a picture"):
        read_rgb(tmp_path / name)
    with pytest.raises(ValueError, match=r"no picture .*absent"):
        read_rgb(tmp_path / "absent.png")


def test_names(tmp_path):
    assert is_picture(tmp_path / "A.JPEG")
    assert not is_picture(tmp_path / "._a.jpg")
    assert not is_picture(tmp_path / "notes.txt")


@pytest.fixture
def folders(tmp_path):
    for split in ("train", "val"):
        for k, name in enumerate(("cat", "dog")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (60, 40), (100 * k, 50, 0)).save(folder / "a.png")
            (folder / "notes.txt").write_text("not a picture")
    return tmp_path


CONTEXT = {"image_size": (32, 32), "mean": (0.0,), "std": (1.0,)}


def test_imagefolder_reads_imagenet_layout(folders):
    data = ImageFolder(ImageFolderConfig(root=folders), DataContext("val", **CONTEXT))
    assert (len(data), data.classes) == (2, ("cat", "dog"))
    batch = data.collate([data[0], data[1]])
    assert batch["image"].shape == (2, 3, 32, 32)
    assert batch["target"]["label"].tolist() == [0, 1]
    torch.testing.assert_close(batch["image"][1, :, 5, 5], torch.tensor([100, 50, 0]) / 255)
    assert len(ImageFolder(ImageFolderConfig(root=folders), DataContext("test", **CONTEXT))) == 2


def test_imagefolder_keeps_unequal_sides_and_trains_without_augmentation(folders):
    context = DataContext("train", **{**CONTEXT, "image_size": (24, 48)})
    data = ImageFolder(ImageFolderConfig(root=folders), context)
    assert data[0]["image"].shape == (3, 24, 48)
    assert torch.equal(data[0]["image"], data[0]["image"])
    cropped = ImageFolder(ImageFolderConfig(root=folders, random_resized_crop=0.5, flip=0.5), context)
    assert cropped[0]["image"].shape == (3, 24, 48)


def test_imagefolder_names_what_is_wrong(folders):
    with pytest.raises(ValueError, match="no folder"):
        ImageFolder(ImageFolderConfig(root=folders / "no"), DataContext("val"))
    with pytest.raises(ValueError, match=r"has no val/ \(it has: cat, dog\)"):
        ImageFolder(ImageFolderConfig(root=folders / "train"), DataContext("val"))
    (folders / "val" / "emu").mkdir()
    Image.new("RGB", (8, 8)).save(folders / "val" / "emu" / "e.png")
    with pytest.raises(ValueError, match="not those of train: emu"):
        ImageFolder(ImageFolderConfig(root=folders), DataContext("val"))
