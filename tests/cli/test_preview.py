"""`cifar-lit preview`: the contact sheet of augmented images, and invalid requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from contract.command_line import assert_refused, draw_folder, run_command
from PIL import Image

from cifar_lit.runs.figures import CAPTION_PIXELS


@pytest.fixture(autouse=True)
def photos(tmp_path: Path) -> Path:
    """Create photos/ with two images of 20 pixels."""
    return draw_folder(tmp_path / "photos", {"some": 2}, size=20)


def tiles(path: str, side: int) -> np.ndarray:
    """Return the images of a sheet: (rows, columns, side, side, 3)."""
    sheet = np.array(Image.open(path))
    pitch = side + CAPTION_PIXELS + 4
    rows, columns = sheet.shape[0] // pitch, sheet.shape[1] // (side + 4)
    return np.array(
        [[sheet[4 + y * pitch :, 4 + x * (side + 4) :][:side, :side] for x in range(columns)] for y in range(rows)]
    )


def test_each_row_shows_the_original_image_and_its_augmentation_in_seven_epochs() -> None:
    answer = run_command("preview", "photos", "--data.augment.brightness", "0.5", "--data.augment.hue=0.1")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "2 images, original and augmented in 7 epochs: preview.png\n"
    images = tiles("preview.png", 100)  # scaled 5×
    assert images.shape[:2] == (2, 8)
    for number, row in enumerate(images):
        assert np.array_equal(row[0][::5, ::5], np.array(Image.open(f"photos/some/{number}.png")))
        assert len({tuple(image[50, 50]) for image in row}) > 6
        assert all((image == image[0, 0]).all() for image in row)  # still a single colour


def test_settings_come_from_the_recipe_and_flags_override_them() -> None:
    data = "{dataset: folder, image_size: 32, augment: {erasing: 1.0, hue: 0.5}}"
    Path("mine.yaml").write_text(f"model: {{net: lenet}}\ndata: {data}\n")
    line = "preview photos/some/1.png --recipe mine.yaml --out some/sheet.png --data.augment.hue 0"
    answer = run_command(*line.split())
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "1 image, original and augmented in 7 epochs: some/sheet.png\n"
    (row,) = tiles("some/sheet.png", 96)
    colour = np.array(Image.open("photos/some/1.png"))[0, 0]
    # Erasing fills with the mean colour, which is the only colour of this image.
    assert all((np.abs(image.astype(int) - colour) <= 1).all() for image in row)
    first = Path("some/sheet.png").read_bytes()
    assert run_command(*line.split()).code == 0
    assert Path("some/sheet.png").read_bytes() == first


def test_the_finetune_recipe_uses_the_image_size_and_mean_of_the_pretraining() -> None:
    pytest.importorskip("timm")
    answer = run_command("preview", "photos", "--recipe", "finetune", "--data.augment.erasing", "1")
    assert (answer.code, answer.err) == (0, "")
    images = tiles("preview.png", 256)
    assert images.shape[:2] == (2, 8)
    for row in images:
        assert all((image == 128).all(2).any() for image in row[1:])  # erased with 0.5, not with the mean of the photos


def test_no_photo_is_overwritten_and_a_file_that_is_not_an_image_is_named() -> None:
    draw_folder(Path("many"), {"some": 30}, size=20)
    for number in range(3):  # the sheet shows ten of the thirty
        answer = run_command("preview", "many", "--out", f"many/some/{number}.png")
        assert_refused(answer, 2, "is one of the images: choose another file")
    Path("notes.png").write_text("no image")
    assert_refused(run_command("preview", "notes.png"), 1, "notes.png cannot be read as an image")


def test_missing_augmentation_is_reported_and_a_large_folder_is_sampled() -> None:
    answer = run_command("preview", draw_folder(Path("many"), {"a": 20, "b": 10}, size=8))
    assert answer.code == 0 and "these settings do not augment" in answer.err
    assert answer.out.startswith("10 of 30 images, original")


def test_images_are_resized_as_in_training() -> None:
    words = ("preview", "photos/some/0.png", "--data.image_size", "100x140", "--data.resize")
    colour = Image.open("photos/some/0.png").getpixel((0, 0))
    for resize, corner in (("letterbox", (128, 128, 128)), ("squash", colour)):
        assert run_command(*words, resize).code == 0
        sheet = Image.open("preview.png")
        assert sheet.size == (8 * 144 + 4, 100 + CAPTION_PIXELS + 2 * 4) and sheet.getpixel((4, 4)) == corner


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("photos --out sheet.txt", ["--out sheet.txt: give an image file, such as preview.png"]),
        ("photos/some/1.png --out photos/some/1.png", ["--out photos/some/1.png is one of the images"]),
        ("photos --recipe wrong.yaml", ["no setting is called data.flop."]),
        ("photos --data.augment.flop random", ["--data.augment.flop", "Did you mean --data.augment.flip?"]),
    ],
)
def test_invalid_requests_are_refused(words: str, parts: list[str]) -> None:
    Path("wrong.yaml").write_text("data: {flop: random}\n")
    before = Path("photos/some/1.png").read_bytes()
    assert_refused(run_command("preview", *words.split()), 2, *parts)
    assert Path("photos/some/1.png").read_bytes() == before and not Path("preview.png").exists()
