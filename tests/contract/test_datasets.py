"""The data sets: downloads that fail, folders of one's own images, drawn shapes, and how images are split."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from .command_line import (
    OWN_IMAGES,
    SMALL,
    Answer,
    Training,
    assert_refused,
    config_of,
    contents_of,
    draw_folder,
    metrics_of,
    rows_of,
    run_command,
)

NO_SHAPES = ("--data.num_classes", "null", "--data.image_size", "null")
TRY_OUT = ("--trainer.fast_dev_run", "true")  # one batch, and no run folder


# ---- downloads


@pytest.mark.parametrize(
    ("dataset", "archive"),
    [
        ("cifar10", "cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python.tar.gz"),
        ("fashion_mnist", "train-images-idx3-ubyte.gz"),
    ],
)
def test_without_network_each_sources_reason_is_told_and_where_to_put_the_archive(dataset: str, archive: str) -> None:
    answer = run_command(*SMALL, "--dataset", dataset, *NO_SHAPES)
    line = answer.error_lines[-1]
    assert answer.code == 1
    assert "Traceback" not in answer.err
    for part in (archive, "refused", "data", "md5", "--data.url", "--recipe quickstart", "no download"):
        assert part in line, part
    hosts = re.findall(r"[\w-]+(?:\.[\w-]+)+: \S", line)
    assert len({host.split(":")[0] for host in hosts}) >= 2, line
    assert not Path("lightning_logs").exists()


def test_cifar10_is_the_default_and_has_its_original_host_and_zenodo_among_its_mirrors() -> None:
    answer = run_command("--accelerator", "cpu")
    assert answer.code == 1
    for part in ("cifar-10-python.tar.gz", "toronto.edu", "zenodo.org"):
        assert part in answer.error_lines[-1]


def test_labels_that_a_data_set_does_not_have_are_refused_before_any_download() -> None:
    for dataset, kind, remedy in (("cifar10", "coarse", "leave data.labels out"), ("cifar100", "rough", "use fine or coarse")):
        answer = run_command("--accelerator", "cpu", "--dataset", dataset, "--data.labels", kind)
        assert_refused(answer, 2, f"{dataset} has no labels called '{kind}': {remedy}")


def test_a_data_set_of_one_size_refuses_ways_of_resizing_before_any_download() -> None:
    answer = run_command("--accelerator", "cpu", "--dataset", "cifar10", "--data.resize", "letterbox")
    assert_refused(answer, 2, "the images of cifar10 have one size: leave data.resize out")


@pytest.fixture
def archive() -> bytes:
    """An archive that is whole, but not the one that is expected."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        entry = tarfile.TarInfo("cifar-10-batches-py/batches.meta")
        entry.size = 200_000
        tar.addfile(entry, io.BytesIO(bytes(range(256)) * 782))
    return packed.getvalue() + gzip.compress(bytes(100_000), 0)


def test_an_archive_put_there_by_hand_is_used_and_one_that_is_damaged_is_named_and_kept(archive: bytes) -> None:
    by_hand = Path("own/cifar-10-python.tar.gz")
    by_hand.parent.mkdir()
    by_hand.write_bytes(archive)
    answer = run_command(*SMALL, "--dataset", "cifar10", "--data-dir", "own", *NO_SHAPES)
    assert_refused(answer, 1, str(by_hand), "damaged", "md5")  # and no word of a download
    assert by_hand.read_bytes() == archive
    assert not Path("lightning_logs").exists()


@contextmanager
def serving(content: bytes, breaks_after: int) -> Iterator[tuple[str, list[int]]]:
    """Serves `content` from this machine; the first request breaks off. Yields the address and the first byte of each request."""
    first_bytes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = int(re.sub(r"\D", "", self.headers.get("Range", "bytes=0-").partition("-")[0]))
            first_bytes.append(first)
            self.send_response(206 if first else 200)
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - first))
            self.end_headers()
            self.wfile.write(content[first:breaks_after] if len(first_bytes) == 1 else content[first:])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: it would stand on stderr among the program's lines."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/cifar.tar.gz", first_bytes
    finally:
        server.shutdown()
        server.server_close()


def test_data_url_names_a_source_whose_broken_transfer_is_resumed_with_speed_and_source_shown(archive: bytes) -> None:
    half = len(archive) // 2
    with serving(archive, breaks_after=half) as (url, first_bytes):
        answer = run_command(*SMALL, "--dataset", "cifar10", "--data.url", url, *NO_SHAPES)
    line, source = answer.error_lines[-1], url.split("/")[2]
    assert answer.code == 1  # its md5 is not the expected one
    assert source in line and "md5" in line and "toronto" not in line
    assert first_bytes[:2] == [0, half]
    assert any(source in line and "MB/s" in line for line in answer.err.splitlines()), answer.err
    assert not Path("data/cifar-10-python.tar.gz").exists()  # what is not the archive never takes its place


# ---- folders


FOLDERS = {"train/cat": 4, "train/dog": 4, "test/cat": 2, "test/dog": 2}


def own(*more: object) -> Answer:
    return run_command(*SMALL, *OWN_IMAGES, "--data-dir", "own", "--data.val_size", "0", *more)


def draw_every_format(folder: Path) -> int:
    """Writes images of all kinds that are read, of many modes and sizes; returns how many."""
    folder.mkdir(parents=True)
    kinds = [
        ("L", "a.png"), ("RGBA", "b.png"), ("P", "c.png"), ("1", "d.png"), ("LA", "e.png"), ("I;16", "f.png"),
        ("RGB", "g.jpg"), ("CMYK", "h.jpeg"), ("RGB", "i.webp"), ("RGB", "j.bmp"), ("P", "k.gif"),
    ]  # fmt: skip
    for number, (mode, name) in enumerate(kinds):
        Image.new(mode, (20 + 3 * number, 40 - number)).save(folder / name)
    frames = [Image.new("P", (30, 30), color) for color in (1, 2)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    return len(kinds) + 1


def test_a_folder_takes_every_format_mode_and_size_and_scales_to_32_where_they_differ(working_folder: Path) -> None:
    images = draw_every_format(working_folder / "own/train/cat")
    draw_folder(working_folder / "own", {"train/dog": 6, "test/cat": 4, "test/dog": 5}, size=24)
    before = contents_of(working_folder / "own")
    answer = run_command(*SMALL, *OWN_IMAGES, "--data-dir", "own", "--epochs", "1", "--data.val_size", "0.3")
    assert answer.code == 0, answer.err
    assert "32×32" in answer.out
    assert sum(map(int, re.findall(r"\b(?:train|validation) (\d+)", answer.out)[:2])) == images + 6
    assert contents_of(working_folder / "own") == before  # the cache lies elsewhere
    run_dir = Path("lightning_logs/small-1")
    assert metrics_of(run_dir)["test"]["images"] == 9
    assert list(metrics_of(run_dir)["test"]["per_class"]) == ["cat", "dog"]
    labels = [row["label"] for row in rows_of(run_dir / "predictions.csv")]
    assert labels == ["cat"] * 4 + ["dog"] * 5
    assert config_of(run_dir)["data"]["root"] == "own"


@pytest.mark.parametrize("name", ["val", "valid"])
def test_val_is_the_validation_set_and_the_test_set_too_where_there_is_no_test(name: str) -> None:
    draw_folder(Path("own"), {"train/cat": 6, "train/dog": 6, f"{name}/cat": 3, f"{name}/dog": 4})
    words = [*SMALL, *OWN_IMAGES, "--data-dir", "own", "--epochs", "1", "--data.val_size", "0.5"]
    assert run_command(*words).code == 0
    assert metrics_of(Path("lightning_logs/small-1"))["test"]["images"] == 7
    draw_folder(Path("own/test"), {"cat": 2, "dog": 2})
    answer = run_command(*words)
    assert re.search(r"\btrain 12\b.*\bvalidation 7\b", answer.out), answer.out
    assert metrics_of(Path("lightning_logs/small-2"))["test"]["images"] == 4


def test_a_folder_of_classes_alone_is_split_by_seed_and_keeps_a_size_that_all_share() -> None:
    draw_folder(Path("own"), {"cat": 10, "dog": 20}, size=18)
    answer = own("--epochs", "1")
    assert answer.code == 0, answer.err
    assert "18×18" in answer.out
    labels = [row["label"] for row in rows_of(Path("lightning_logs/small-1/predictions.csv"))]
    assert sorted(labels) == ["cat"] * 2 + ["dog"] * 4  # a fifth of each


def test_images_are_scaled_to_image_size_and_decoded_again_only_when_a_file_has_changed() -> None:
    draw_folder(Path("own"), FOLDERS)
    first, second = (own(*TRY_OUT, "--data.image_size", "20") for _ in range(2))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "20×20" in first.out
    Image.new("RGB", (16, 16), "red").save("own/train/dog/another.png")
    third = own(*TRY_OUT, "--data.image_size", "20")
    assert ["decoding" in answer.err for answer in (first, second, third)] == [True, False, True]


def test_a_damaged_image_is_named_and_skip_bad_goes_on_without_it_and_counts() -> None:
    damaged = draw_folder(Path("own"), FOLDERS) / "train/dog/1.png"
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert_refused(own(*TRY_OUT), 1, "train/dog/1.png", "--data.skip_bad")
    skipped = own(*TRY_OUT, "--data.skip_bad", "true")
    assert skipped.code == 0
    assert re.search(r"\b1 of \d+ .*train/dog/1\.png", skipped.err), skipped.err


@pytest.mark.parametrize(
    ("folders", "parts"),
    [
        ({}, ["no class folders", "train/<class>"]),
        ({"cat": 3}, ["one class only", "cat"]),
        ({"train/cat": 2, "train/dog": 2, "test/cat": 2, "test/cow": 2}, ["differ", "dog", "cow"]),
        ({"train/cat": 2, "train/dog": 2, "test/cat": 2, "test/dog": 0}, ["test", "dog", "no JPEG"]),
    ],
    ids=["empty", "one class", "classes differ", "empty class"],
)
def test_a_folder_that_is_no_data_set_is_refused(folders: dict[str, int], parts: list[str]) -> None:
    Path("own").mkdir()
    draw_folder(Path("own"), folders)
    assert_refused(own(), 2, "own", *parts)
    assert not Path("lightning_logs").exists()


def test_folder_needs_a_data_dir_that_is_there() -> None:
    assert_refused(run_command(*SMALL, *OWN_IMAGES), 2, "--data-dir", "train/<class>")
    assert_refused(own(), 2, "own", "does not exist")


# ---- shapes, splits


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--data.image_size", "20", "--data.channels", "1", "--data.num_classes", "7"], ["1×20×20", "7 classes"]),
        (NO_SHAPES, ["10 classes"]),
    ],
)
def test_shapes_come_in_the_size_channels_and_classes_that_are_asked_for_else_ten(words: list[str], facts: list[str]) -> None:
    answer = run_command(*SMALL, *words, *TRY_OUT)
    assert (answer.code, answer.err) == (0, "")
    assert [fact for fact in facts if fact not in answer.out] == []


def test_train_validation_and_test_are_three_things(training: Training) -> None:
    assert re.search(r"\b160\b.*\b40\b", training.answer.out)  # 40 of the 200 are held out
    metrics = metrics_of(training.run_dir)
    assert metrics["test"]["images"] == 40
    assert metrics["val"] != {name: metrics["test"][name] for name in ("accuracy", "loss")}


@pytest.mark.parametrize(
    ("value", "part"),
    [("200", "train on"), ("0.001", "none"), ("-1", "val_size")],
)
def test_a_validation_part_that_leaves_nothing_is_refused(value: str, part: str) -> None:
    assert_refused(run_command(*SMALL, f"--data.val_size={value}"), 2, "data.val_size", part)
