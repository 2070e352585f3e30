"""Attacks through the file system: links, pipes, devices and huge files in a run, a data set or the image cache."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from contract.command_line import draw_folder
from security.attack import Attack, harmless
from security.hostile_models import CHECKPOINTS, kernel_log

from cifar_lit.cli import main
from cifar_lit.files import PART

RESUME = ["train", "--resume", "run"]
REPORT = ["report", "run", "--accelerator", "cpu"]
COMPARE = ["compare", "run", "--plot", "curves.png", "--json", "-"]
CLASSIFY = ["classify", "run", "images", "--accelerator", "cpu"]
EXPORT = ["export", "run", "--to", "safetensors", "--out"]
TEST = ["test", "--recipe", "small.yaml", "--ckpt_path", "run/checkpoints/best.ckpt"]
FIT = ["fit", "--recipe", "small.yaml", "--logs", "logs"]
WEIGHTS = [*FIT, "--weights"]
NO_SHAPES = ["--data.image_size=null", "--data.num_classes=null"]
DOWNLOAD = [*FIT, "--dataset", "cifar10", "--data-dir", "data", "--data.url", "mirror.gz", *NO_SHAPES]
DECODE = [*FIT, "--dataset", "folder", "--data-dir", "images", "--data.num_classes=null", "--data.val_size=1"]
TABLE = [*DECODE, "--data-dir"]  # overrides the first --data-dir
REDIRECTION = b"HTTP/1.1 301 Moved\r\nContent-Length: " + b"9" * 30 + b"\r\nLocation: /\r\n\r\nx"
LEADS_OUT = "is a symlink pointing outside its folder"

Prepare = Callable[[Path], object]
Make = Callable[[Path, Path], object]  # gets the working folder and the path of the file


def put(name: str, make: Make, ended: bool = False) -> Prepare:
    """Replace the run's file `name` with one from `make`. The run can be resumed unless it has `ended`."""

    def prepare(folder: Path) -> None:
        path = folder / "run" / name
        path.unlink(missing_ok=True)
        if not ended:
            (folder / "run/metrics.json").unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        make(folder, path)

    return prepare


def link(folder: Path, path: Path, target: str = "outside/notes.txt") -> None:
    path.symlink_to(folder / target)


def kernel(folder: Path, path: Path) -> None:
    kernel_log(path)


def hard_link(folder: Path, path: Path) -> None:
    """A hard link to one of the user's files; `tar` creates them."""
    path.hardlink_to(folder / "outside/notes.txt")


def pipe(folder: Path, path: Path) -> None:
    """A pipe without a writer."""
    os.mkfifo(path)


def endless(folder: Path, path: Path) -> None:
    """A sparse table of 20 GiB."""
    path.write_text("epoch,step\n0,1\n" if path.stem == "metrics" else "index,label\n")
    os.truncate(path, 20 << 30)


def filled_folder(folder: Path, path: Path) -> None:
    path.mkdir()
    (path / "inner").touch()


def nested_folders(folder: Path, path: Path) -> None:
    """900 levels of folders. Python cannot walk more than about 1,000, and pytest cannot remove them."""
    for levels in range(900):
        path.joinpath(*["d"] * levels).mkdir()


def another_run(folder: Path, last: Path) -> None:
    """The last checkpoint as a link to a checkpoint of the user's own run."""
    (folder / "mine/checkpoints").mkdir(parents=True)
    (folder / "mine/config.yaml").write_bytes((folder / "run/config.yaml").read_bytes())
    (folder / "run/checkpoints/best.ckpt").rename(folder / "mine/checkpoints/last.ckpt")
    link(folder, last, "mine/checkpoints/last.ckpt")


def sparse_weights(name: str) -> Prepare:
    """Sparse weights of 8 TiB."""

    def prepare(folder: Path) -> None:
        (folder / name).write_bytes((folder / "run/model.safetensors").read_bytes())
        os.truncate(folder / name, 1 << 43)

    return prepare


def bytearray_weights(folder: Path) -> None:
    """Weights whose pickle of a few bytes asks for 2 GB."""
    torch.save({}, folder / "weights.pth")
    CHECKPOINTS["a bytearray of 2 GB in the pickle of a zip"](folder / "weights.pth")


def job_record_as_pipe(folder: Path) -> None:
    put(".job", pipe)(folder)
    (folder / "logs").mkdir()
    (folder / "run").rename(folder / "logs/run")


def start_job() -> int:
    os.environ["CIFAR_LIT_JOB"] = "night"
    return main(FIT)


def data_with(name: str) -> Prepare:
    """A data folder that contains a link, and a local mirror."""

    def prepare(folder: Path) -> None:
        (folder / "data").mkdir()
        link(folder, folder / "data" / name)
        (folder / "mirror.gz").write_bytes(b"not the archive")

    return prepare


def images(folder: Path) -> None:
    draw_folder(folder / "images", {"a": 4, "b": 4})


def written(name: str) -> Prepare:
    """Images, and a link in place of an output image."""
    return lambda folder: (images(folder), put(name, link, ended=True)(folder))


def changed_cache(name: str, make: Make, says: str = "") -> Attack:
    """Training on images whose cache is then replaced: by the file `name` in a folder, or by what `make` makes."""

    def train_twice() -> int:
        assert main(DECODE) == 0
        (cache,) = Path("cache").glob("images-*")
        shutil.rmtree(cache)
        if name:
            cache.mkdir()
        make(Path.cwd(), cache / name)
        return main(DECODE)

    return harmless(images, train_twice, says)


def link_to_folder(folder: Path, path: Path) -> None:
    link(folder, path, "outside")


def doubling_links(folder: Path) -> None:
    """Images, and 30 folders with two links each to the next: 2³⁰ paths to the last."""
    images(folder)
    for level in range(30):
        (folder / f"images/a/{level}").mkdir()
        for name in "xy":
            (folder / f"images/a/{level}/{name}").symlink_to(f"../{level + 1}")


def table_of_pipes(folder: Path) -> None:
    """A table whose images are pipes without a writer."""
    rows = ["path,label"]
    for number in range(8):
        os.mkfifo(folder / f"{number}.png")
        rows.append(f"{number}.png,{'ab'[number % 2]}")
    (folder / "pipes.csv").write_text("\n".join(rows))


def keys_of_rows(folder: Path) -> None:
    """A JSONL table of two rows with 70,000 different keys each."""
    row = {"path": "a.png", "label": "a"}
    rows = (row | dict.fromkeys((f"{start}{key}" for key in range(70_000)), 0) for start in "ab")
    (folder / "keys.jsonl").write_text("\n".join(map(json.dumps, rows)))


def empty_lines(name: str, text: str) -> Prepare:
    """A table of `text` and 20 million empty lines."""
    return lambda folder: (folder / name).write_text(text + "\n" * 20_000_000)


def answered(data: bytes) -> Callable[[], int]:
    """Download from a server that repeats `data` until the client disconnects."""

    def download() -> int:
        server = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            while True:
                with suppress(OSError), server.accept()[0] as connection:
                    while True:
                        connection.sendall(data * 50)

        threading.Thread(target=answer, daemon=True).start()
        return main([*DOWNLOAD, "--data.url", f"http://127.0.0.1:{server.getsockname()[1]}/"])

    return download


def from_kernel(name: str, line: list[str], says: str = "") -> Attack:
    return Attack(put(name, kernel, ended=True), line, says=says)


def replaced(name: str, make: Make, line: list[str], says: str = "") -> Attack:
    """Return a harmless attack on a finished run, one file of which is replaced."""
    return harmless(put(name, make, ended=True), line, says)


ATTACKS: dict[str, Attack] = {
    # temporary files
    "a link for the half-written report": replaced(f"report.html{PART}", link, REPORT),
    "a link for the half-written configuration": Attack(put(f"config.yaml{PART}", link), RESUME, says=LEADS_OUT),
    "a link for the half-written record of a run's owner": Attack(put(f".owner{PART}", link), RESUME, says=LEADS_OUT),
    "a link for a half-written export": replaced(f"x.safetensors{PART}", link, [*EXPORT, "run/x.safetensors"]),
    "a link for a half-written comparison": replaced(f"runs.csv{PART}", link, [*COMPARE[:2], "--csv", "run/runs.csv"]),
    "a link for a half-written plot": replaced(f"curves.png{PART}", link, [*COMPARE[:2], "--plot", "run/curves.png"]),
    "a folder with the name of a temporary file": harmless(put(f"x{PART}", filled_folder), RESUME),
    # files written in place
    "a link for the lock": Attack(put(".lock", link), RESUME, says=LEADS_OUT),
    "a folder in place of the model": Attack(
        put("model.safetensors", filled_folder), RESUME, says="is a folder, where a file is to be written"
    ),
    "900 levels of folders": Attack(put("d", nested_folders), RESUME, says="nested deeper than 50 levels"),
    "sparse weights of 8 TiB": Attack(
        sparse_weights("weights.safetensors"), [*WEIGHTS, "weights.safetensors"], says="than the memory"
    ),
    "a sparse model of 8 TiB": Attack(
        sparse_weights("run/model.safetensors"), [*EXPORT, "x.safetensors"], says="than the memory"
    ),
    "a last checkpoint that links to one of another run": Attack(
        put("checkpoints/last.ckpt", another_run), RESUME, says=LEADS_OUT
    ),
    "a link from the report to a file of the user": replaced("report.html", link, REPORT),
    **{
        f"a hard link from {name} to a file of the user": harmless(put(name, hard_link), RESUME)
        for name in (".lock", ".owner", "metrics.csv")
    },
    # files that are read
    "metrics from a pipe": replaced("metrics.json", pipe, COMPARE, "cannot be read"),
    "curves from a pipe": Attack(put("metrics.csv", pipe), RESUME, says="move it away"),
    "a record of the owner from a pipe": harmless(put(".owner", pipe), RESUME),
    "a record of a job from a pipe": harmless(job_record_as_pipe, start_job),
    "metrics of 20 GiB": replaced("metrics.json", endless, COMPARE, "cannot be read"),
    "curves of 20 GiB": Attack(put("metrics.csv", endless, ended=True), COMPARE),
    "predictions of 20 GiB": replaced("predictions.csv", endless, REPORT),
    "metrics from the kernel log": replaced("metrics.json", kernel, COMPARE, "cannot be read"),
    "curves from the kernel log": from_kernel("metrics.csv", COMPARE),
    "predictions from the kernel log": replaced("predictions.csv", kernel, REPORT),
    "a configuration from the kernel log": replaced("config.yaml", kernel, COMPARE, "missing or damaged"),
    "a checkpoint from the kernel log": from_kernel("checkpoints/best.ckpt", TEST, "the file is empty"),
    **{
        f"weights from the kernel log as {name}": from_kernel(name, [*WEIGHTS, f"run/{name}"], "the file is empty")
        for name in ("w.pth", "w.safetensors")
    },
    "a table of images from the kernel log": from_kernel("t.csv", [*TABLE, "run/t.csv"], "the file is empty"),
    "weights of a bytearray of 2 GB": Attack(bytearray_weights, [*WEIGHTS, "weights.pth"], says="would execute code"),
    # data sets and their cache
    "a link for a broken download": harmless(data_with("cifar-10-python.tar.gz.part"), DOWNLOAD, "wrong md5"),
    "a link for the lock of a download": Attack(data_with("cifar-10-batches-py.lock"), DOWNLOAD),
    "a server that sends 100 Continue without end": Attack(
        data_with("x"), answered(b"HTTP/1.1 100 Continue\r\n\r\n"), says="without end"
    ),
    "a redirect with an enormous content length": Attack(
        data_with("x"), answered(REDIRECTION), says="could not be downloaded"
    ),
    "a link for the cache of a folder": changed_cache("", link_to_folder, "is a link"),
    "a link for the index of a cache": changed_cache("index.json", link),
    "a link for the lock of a cache": changed_cache("lock", link, "nothing is cached"),
    "an index of a cache from a pipe": changed_cache("index.json", pipe),
    "links that double the paths at every level": harmless(doubling_links, DECODE),
    "the same for classify": harmless(doubling_links, CLASSIFY),
    "a table whose images are a pipe": Attack(
        table_of_pipes, [*TABLE, "pipes.csv", "--data.image_size=null"], says="it is a pipe or a device"
    ),
    "a table of rows with 70,000 keys": Attack(keys_of_rows, [*TABLE, "keys.jsonl"], says="do not exist"),
    "a table of 20 million empty lines": Attack(
        empty_lines("t.csv", "path,label\n"), [*TABLE, "t.csv"], says="empty lines"
    ),
    "the same, as JSON lines": Attack(empty_lines("t.jsonl", ""), [*TABLE, "t.jsonl"], says="empty lines"),
}
