"""Attacks through the file system: links, pipes, devices and odd sizes in a run, in data and in the cache of decoded images."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from contract.command_line import draw_folder
from security.attack import Attack, harmless
from security.hostile_models import CHECKPOINTS

from cifar_lit.cli import main
from cifar_lit.data.cache import FORMAT
from cifar_lit.files import PART

RESUME = ["train", "--resume", "run"]
REPORT = ["report", "run", "--device", "cpu"]
COMPARE = ["compare", "run", "--plot", "curves.png", "--json", "-"]
CLASSIFY = ["classify", "run", "images", "--device", "cpu"]
EXPORT = ["export", "run", "--to", "safetensors", "--out"]
TEST = ["test", "--recipe", "small.yaml", "--ckpt_path", "run/checkpoints/best.ckpt"]
FIT = ["fit", "--recipe", "small.yaml", "--logs", "logs"]
WEIGHTS = [*FIT, "--model.weights"]
NO_SHAPES = ["--data.image_size=null", "--data.num_classes=null"]
DOWNLOAD = [*FIT, "--dataset", "cifar10", "--data-dir", "data", "--data.url", "mirror.gz", *NO_SHAPES]
DECODE = [*FIT, "--dataset", "folder", "--data-dir", "images", "--data.num_classes=null", "--data.val_size=1"]
TABLE = [*DECODE, "--data-dir"]  # the last of two is what counts
KERNEL = "/proc/kmsg"  # a regular file of size 0, whose reading waits
REDIRECTION = b"HTTP/1.1 301 Moved\r\nContent-Length: " + b"9" * 30 + b"\r\nLocation: /\r\n\r\nx"
LEADS_OUT = "is a symlink pointing outside its run folder"

Prepare = Callable[[Path], object]
Make = Callable[[Path, Path], object]  # is given the folder and the place of the file


def put(name: str, make: Make, ended: bool = False) -> Prepare:
    """Puts what `make` makes in the run's place of `name`; the run is one to resume unless it has `ended`."""

    def prepare(folder: Path) -> None:
        place = folder / "run" / name
        place.unlink(missing_ok=True)
        if not ended:
            (folder / "run/metrics.json").unlink(missing_ok=True)
        place.parent.mkdir(exist_ok=True)
        make(folder, place)

    return prepare


def link(folder: Path, place: Path, target: str = "outside/notes.txt") -> None:
    place.symlink_to(folder / target)


def kernel(folder: Path, place: Path) -> None:
    place.symlink_to(KERNEL)


def second_name(folder: Path, place: Path) -> None:
    """A second name of one of the user's files, as `tar` makes it."""
    place.hardlink_to(folder / "outside/notes.txt")


def pipe(folder: Path, place: Path) -> None:
    """A pipe that nobody writes to."""
    os.mkfifo(place)


def endless(folder: Path, place: Path) -> None:
    """A table of 20 GiB that takes no place on the disk."""
    place.write_text("epoch,step\n0,1\n" if place.stem == "metrics" else "index,label\n")
    os.truncate(place, 20 << 30)


def filled_folder(folder: Path, place: Path) -> None:
    place.mkdir()
    (place / "inner").touch()


def nested_folders(folder: Path, place: Path) -> None:
    """900 levels of folders. From about 1,000 on, Python cannot walk them, nor pytest remove them."""
    outer = os.open(folder / "run", os.O_RDONLY)
    for _ in range(900):
        os.mkdir("d", dir_fd=outer)
        inner = os.open("d", os.O_RDONLY, dir_fd=outer)
        os.close(outer)
        outer = inner
    os.close(outer)


def another_run(folder: Path, last: Path) -> None:
    """The last checkpoint is a link to that of a run of the user's."""
    (folder / "mine/checkpoints").mkdir(parents=True)
    (folder / "mine/config.yaml").write_bytes((folder / "run/config.yaml").read_bytes())
    (folder / "run/checkpoints/best.ckpt").rename(folder / "mine/checkpoints/last.ckpt")
    link(folder, last, "mine/checkpoints/last.ckpt")


def mostly_a_hole(name: str) -> Prepare:
    """Weights of 8 TiB that take no place on the disk."""

    def prepare(folder: Path) -> None:
        (folder / name).write_bytes((folder / "run/model.safetensors").read_bytes())
        os.truncate(folder / name, 1 << 43)

    return prepare


def weights_of_a_bytearray(folder: Path) -> None:
    """Weights whose pickle is a few bytes long and asks for 2 GB."""
    torch.save({}, folder / "weights.pth")
    CHECKPOINTS["a bytearray of 2 GB in the pickle of a zip"](folder / "weights.pth")


def resume_of_a_job(folder: Path) -> None:
    """A record of a job is a pipe."""
    put(".job", pipe)(folder)
    (folder / "logs").mkdir()
    (folder / "run").rename(folder / "logs/run")


def start_job() -> int:
    os.environ["CIFAR_LIT_JOB"] = "night"
    return main(FIT)


def data_with(name: str) -> Prepare:
    """A folder of data with a link in it."""

    def prepare(folder: Path) -> None:
        (folder / "data").mkdir()
        link(folder, folder / "data" / name)
        (folder / "mirror.gz").write_bytes(b"what another host gives")

    return prepare


def images(folder: Path) -> Path:
    """A folder of images, and the place where the cache will keep them."""
    root = draw_folder(folder.resolve() / "images", {"a": 4, "b": 4})
    key = sha256(json.dumps([FORMAT, str(root), 16, 3]).encode()).hexdigest()[:16]
    (folder / "cache").mkdir()
    return folder / "cache" / f"images-{key}"


def written(name: str) -> Prepare:
    """Images, and a link in the run's place of a picture that is written."""
    return lambda folder: (images(folder), put(name, link, ended=True)(folder))


def cache_that_is_a_link(folder: Path) -> None:
    link(folder, images(folder), "outside")


def cache_with(name: str, make: Make = link) -> Prepare:
    def prepare(folder: Path) -> None:
        slot = images(folder)
        slot.mkdir()
        make(folder, slot / name)

    return prepare


def doubling_links(folder: Path) -> None:
    """Images, and beside them folders of which each has two links to the next, by which 2³⁰ paths lead to the last."""
    images(folder)
    for level in range(30):
        (folder / f"images/a/{level}").mkdir()
        for name in "xy":
            (folder / f"images/a/{level}/{name}").symlink_to(f"../{level + 1}")


def table_of_pipes(folder: Path) -> None:
    """A table whose images are a pipe that nobody writes to."""
    os.mkfifo(folder / "0.png")
    (folder / "pipes.csv").write_text("path,label\n" + "".join(f"{'./' * n}0.png,{'ab'[n % 2]}\n" for n in range(8)))


def keys_of_rows(folder: Path) -> None:
    """A table in JSON lines whose second row has 70,000 keys, and others than the first."""
    row = {"path": "a.png", "label": "a"}
    rows = (row | dict.fromkeys((f"{start}{key}" for key in range(70_000)), 0) for start in "ab")
    (folder / "keys.jsonl").write_text("\n".join(map(json.dumps, rows)))


def empty_lines(name: str, text: str) -> Prepare:
    """A table with these lines, and then 20 million empty ones."""
    return lambda folder: (folder / name).write_text(text + "\n" * 20_000_000)


def answered(data: bytes) -> Callable[[], int]:
    """Downloads from a server that answers with these bytes, for as long as somebody listens."""

    def typed() -> int:
        server = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            while True:
                with suppress(OSError), server.accept()[0] as connection:
                    while True:
                        connection.sendall(data * 50)

        threading.Thread(target=answer, daemon=True).start()
        return main([*DOWNLOAD, "--data.url", f"http://127.0.0.1:{server.getsockname()[1]}/"])

    return typed


def from_kernel(name: str, line: list[str], says: str, refused: bool = True) -> Attack:
    return Attack(put(name, kernel, ended=True), line, refused, says)


ATTACKS: dict[str, Attack] = {
    # what is half written
    "a link for the half-written report": harmless(put(f"report.html{PART}", link, ended=True), REPORT),
    "a link for the half-written configuration": Attack(put(f"config.yaml{PART}", link), RESUME, says=LEADS_OUT),
    "a link for the half-written record of a run's owner": Attack(put(f".owner{PART}", link), RESUME, says=LEADS_OUT),
    "a link for a half-written export": harmless(
        put(f"x.safetensors{PART}", link, ended=True), [*EXPORT, "run/x.safetensors"]
    ),
    "a link for a half-written comparison": harmless(
        put(f"runs.csv{PART}", link, ended=True), ["compare", "run", "--csv", "run/runs.csv"]
    ),
    "a link for a half-written picture of curves": harmless(
        put(f"curves.png{PART}", link, ended=True), ["compare", "run", "--plot", "run/curves.png"]
    ),
    "a link for a contact sheet": harmless(written("sheet.png"), [*CLASSIFY, "--sheet", "run/sheet.png"]),
    "a link for a picture of what a net looked at": harmless(
        written("maps/00000-0.png"), [*CLASSIFY, "--explain", "run/maps"]
    ),
    "a folder that is called as what is half written": harmless(put(f"x{PART}", filled_folder), RESUME),
    # what is written in place, or through a folder
    "a link for the lock": Attack(put(".lock", link), RESUME, says=LEADS_OUT),
    "a folder in the place of the model": Attack(
        put("model.safetensors", filled_folder), RESUME, says="is a folder, where a file is to be written"
    ),
    "900 levels of folders": Attack(put("d", nested_folders), RESUME, says="nested deeper than 50 levels"),
    "weights of 8 TiB, most of it a hole": Attack(
        mostly_a_hole("weights.safetensors"), [*WEIGHTS, "weights.safetensors"], says="than the memory"
    ),
    "a model of 8 TiB, most of it a hole": Attack(
        mostly_a_hole("run/model.safetensors"), [*EXPORT, "x.safetensors"], says="than the memory"
    ),
    "a link for the last checkpoint to that of another run": Attack(
        put("checkpoints/last.ckpt", another_run), RESUME, says=LEADS_OUT
    ),
    "a link for the report to a file of the user's": harmless(put("report.html", link, ended=True), REPORT),
    **{
        f"a second name of a file of the user's for {name}": harmless(put(name, second_name), RESUME)
        for name in (".lock", ".owner", "metrics.csv")
    },
    # what is read
    "figures from a pipe": harmless(put("metrics.json", pipe, ended=True), COMPARE, "cannot be read"),
    "curves from a pipe": Attack(put("metrics.csv", pipe), RESUME, says="move it away"),
    "a record of the owner from a pipe": harmless(put(".owner", pipe), RESUME),
    "a record of a job from a pipe": harmless(resume_of_a_job, start_job),
    "figures of 20 GiB": harmless(put("metrics.json", endless, ended=True), COMPARE, "cannot be read"),
    "curves of 20 GiB": Attack(put("metrics.csv", endless, ended=True), COMPARE),
    "predictions of 20 GiB": harmless(put("predictions.csv", endless, ended=True), REPORT),
    "figures from the kernel's messages": from_kernel("metrics.json", COMPARE, "cannot be read", refused=False),
    "curves from the kernel's messages": from_kernel("metrics.csv", COMPARE, ""),
    "predictions from the kernel's messages": from_kernel("predictions.csv", REPORT, "", refused=False),
    "a configuration from the kernel's messages": from_kernel(
        "config.yaml", COMPARE, "missing or damaged", refused=False
    ),
    "a checkpoint from the kernel's messages": from_kernel("checkpoints/best.ckpt", TEST, "the file is empty"),
    **{
        f"weights from the kernel's messages as {name}": from_kernel(
            name, [*WEIGHTS, f"run/{name}"], "the file is empty"
        )
        for name in ("w.pth", "w.safetensors")
    },
    "a table of images from the kernel's messages": from_kernel("t.csv", [*TABLE, "run/t.csv"], "the file is empty"),
    "weights of a bytearray of 2 GB": Attack(
        weights_of_a_bytearray, [*WEIGHTS, "weights.pth"], says="it asks for memory that it does not fill"
    ),
    # data and their cache
    "a link for a broken download": harmless(data_with("cifar-10-python.tar.gz.part"), DOWNLOAD, "wrong md5"),
    "a link for the lock of a download": Attack(data_with("cifar-10-batches-py.lock"), DOWNLOAD),
    "a server that announces its answer without end": Attack(
        data_with("x"), answered(b"HTTP/1.1 100 Continue\r\n\r\n"), says="without end"
    ),
    "a redirection of endless length": Attack(data_with("x"), answered(REDIRECTION), says="could not be downloaded"),
    "a link for the cache of a folder": harmless(cache_that_is_a_link, DECODE, "is a link"),
    "a link for the index of a cache": harmless(cache_with("index.json"), DECODE),
    "a link for the lock of a cache": harmless(cache_with("lock"), DECODE, "nothing is cached"),
    "an index of a cache from a pipe": harmless(cache_with("index.json", pipe), DECODE),
    "folders of links that double at every level": harmless(doubling_links, DECODE),
    "the same, to classify": harmless(doubling_links, CLASSIFY),
    "a table whose images are a pipe": Attack(
        table_of_pipes, [*TABLE, "pipes.csv", "--data.image_size=null"], says="it is a pipe or a device"
    ),
    "a table of rows with 70,000 keys": Attack(keys_of_rows, [*TABLE, "keys.jsonl"], says="do not exist"),
    "a table of 20 million empty lines": Attack(
        empty_lines("t.csv", "path,label\n"), [*TABLE, "t.csv"], says="empty lines"
    ),
    "the same, as JSON lines": Attack(empty_lines("t.jsonl", ""), [*TABLE, "t.jsonl"], says="empty lines"),
}
