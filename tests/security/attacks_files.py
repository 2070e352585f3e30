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
from security.attack import Attack
from security.hostile_models import CHECKPOINTS

from cifar_lit.cli import main
from cifar_lit.data.cache import FORMAT
from cifar_lit.files import PART

RESUME = ["train", "--resume", "run"]
REPORT = ["report", "run", "--device", "cpu"]
COMPARE = ["compare", "run", "--plot", "curves.png", "--json", "-"]
FINETUNE = ["fit", "--recipe", "small.yaml", "--logs", "logs"]
KERNEL = "/proc/kmsg"  # a regular file of size 0, whose reading waits
LEADS_OUT = "is a link that leads out of its run"

Prepare = Callable[[Path], object]


def link(name: str, target: str = "outside/notes.txt", unfinished: bool = False) -> Prepare:
    """Puts a link in the run's place of `name` to one of the user's files, or to what `target` says."""

    def prepare(folder: Path) -> None:
        place = folder / "run" / name
        place.unlink(missing_ok=True)
        place.symlink_to(target if target.startswith("/") else folder / target)
        if unfinished:
            (folder / "run/metrics.json").unlink(missing_ok=True)

    return prepare


def second_name(name: str) -> Prepare:
    """Makes the run's `name` a second name of one of the user's files, as `tar` does with what it unpacks."""

    def prepare(folder: Path) -> None:
        (folder / "run/metrics.json").unlink()
        (folder / "run" / name).unlink(missing_ok=True)
        (folder / "run" / name).hardlink_to(folder / "outside/notes.txt")

    return prepare


def owner(record: str) -> Prepare:
    """A run that says who writes it."""

    def prepare(folder: Path) -> None:
        (folder / "run/metrics.json").unlink()
        (folder / "run/.owner").write_text(record)

    return prepare


def pipe(name: str, unfinished: bool = False) -> Prepare:
    """Puts a pipe that nobody writes to in the place of a file."""

    def prepare(folder: Path) -> None:
        if unfinished:
            (folder / "run/metrics.json").unlink()
        (folder / "run" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "run" / name)

    return prepare


def endless(name: str, start: str = "") -> Prepare:
    """A file of 20 GiB that takes no place on the disk."""

    def prepare(folder: Path) -> None:
        (folder / "run" / name).write_text(start)
        os.truncate(folder / "run" / name, 20 << 30)

    return prepare


def folder_in_place(name: str) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / "run/metrics.json").unlink()
        (folder / "run" / name).mkdir()
        (folder / "run" / name / "inner").touch()

    return prepare


def file_as_folder(name: str) -> Prepare:
    """Puts a folder in the place of a file that the run writes at its end."""

    def prepare(folder: Path) -> None:
        (folder / "run" / name).unlink()
        (folder / "run/metrics.json").unlink(missing_ok=True)
        (folder / "run" / name).mkdir()

    return prepare


def nested_folders(folder: Path) -> None:
    """A run with 900 levels of folders in it. From about 1,000 on, Python cannot walk them, nor pytest remove them."""
    (folder / "run/metrics.json").unlink()
    place = os.open(folder / "run", os.O_RDONLY)
    for _ in range(900):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)


def mostly_a_hole(name: str) -> Prepare:
    """Weights of 8 TiB that take no place on the disk."""

    def prepare(folder: Path) -> None:
        (folder / name).write_bytes((folder / "run/model.safetensors").read_bytes())
        os.truncate(folder / name, 1 << 43)

    return prepare


def linked_folder(folder: Path) -> None:
    """A run's checkpoints are a link to where the user keeps others."""
    (folder / "run/metrics.json").unlink()
    (folder / "run/checkpoints").rename(folder / "elsewhere")
    (folder / "run/checkpoints").symlink_to(folder / "elsewhere")


def another_run(folder: Path) -> None:
    """The last checkpoint is a link to that of a run of the user's."""
    (folder / "run/metrics.json").unlink()
    (folder / "mine/checkpoints").mkdir(parents=True)
    (folder / "mine/config.yaml").write_bytes((folder / "run/config.yaml").read_bytes())
    last = folder / "run/checkpoints/last.ckpt"
    last.rename(folder / "mine/checkpoints/last.ckpt")
    last.symlink_to(folder / "mine/checkpoints/last.ckpt")


def weights_of_a_bytearray(folder: Path) -> None:
    """Weights whose pickle is a few bytes long and asks for 2 GB."""
    path = folder / "weights.pth"
    torch.save({}, path)
    CHECKPOINTS["a bytearray of 2 GB in the pickle of a zip"](path)


def resume_of_a_job(folder: Path) -> None:
    """A record of a job is a pipe."""
    pipe(".job", unfinished=True)(folder)
    (folder / "logs").mkdir()
    (folder / "run").rename(folder / "logs/run")


def start_job() -> int:
    os.environ["CIFAR_LIT_JOB"] = "night"
    return main(["fit", "--recipe", "small.yaml", "--logs", "logs"])


def data_with(name: str) -> Prepare:
    """A folder of data with a link in it."""

    def prepare(folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / "data" / name).symlink_to(folder / "outside/notes.txt")
        (folder / "mirror.gz").write_bytes(b"what another host gives")

    return prepare


DOWNLOAD = ["fit", "--recipe", "small.yaml", "--dataset", "cifar10", "--data-dir", "data", "--data.url", "mirror.gz"]
DOWNLOAD += ["--data.image_size=null", "--data.num_classes=null"]


def images(folder: Path) -> Path:
    """A folder of images, and the place where the cache will keep them."""
    root = draw_folder(folder.resolve() / "images", {"a": 4, "b": 4})
    key = sha256(json.dumps([FORMAT, str(root), 16, 3]).encode()).hexdigest()[:16]
    (folder / "cache").mkdir()
    return folder / "cache" / f"images-{key}"


def cache_that_is_a_link(folder: Path) -> None:
    images(folder).symlink_to(folder / "outside", target_is_directory=True)


def cache_with(name: str) -> Prepare:
    def prepare(folder: Path) -> None:
        slot = images(folder)
        slot.mkdir()
        (slot / name).symlink_to(folder / "outside/notes.txt")

    return prepare


def cache_with_a_pipe(folder: Path) -> None:
    slot = images(folder)
    slot.mkdir()
    os.mkfifo(slot / "index.json")


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
    rows = ({"path": "a.png", "label": "a"} | dict.fromkeys((f"{start}{key}" for key in range(70_000)), 0) for start in "ab")
    (folder / "keys.jsonl").write_text("\n".join(map(json.dumps, rows)))


def empty_lines(name: str, text: str, count: int = 20_000_000) -> Prepare:
    """A table with these lines, and then empty ones."""
    return lambda folder: (folder / name).write_text(text + "\n" * count)


def endless_continue() -> int:
    """Downloads from a server that answers "100 Continue" for as long as somebody listens."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError), server.accept()[0] as connection:
            while True:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 50)

    threading.Thread(target=answer, daemon=True).start()
    return main([*DOWNLOAD, "--data.url", f"http://127.0.0.1:{server.getsockname()[1]}/"])


CLASSIFY = ["classify", "run", "--device", "cpu"]
DECODE = ["fit", "--recipe", "small.yaml", "--dataset", "folder", "--data-dir", "images", "--data.num_classes=null"]
DECODE += ["--data.val_size=1", "--logs", "logs"]
TABLE = [*DECODE, "--data-dir"]  # the last of two is what counts

# The names of what is half written, as they could once be foreseen; and of what is written, or read, in place.
PARTS = (
    "config.yaml",
    "metrics.csv",
    "model.safetensors",
    "predictions.csv",
    "probabilities.npy",
    "metrics.json",
    "checkpoints/last.ckpt",
)
RESUMED = (
    "metrics.csv",
    ".lock",
    ".owner",
    "events.out.tfevents.1.node.7.0",
    "report.html",
    "hparams.yaml",
    "checkpoints/best.ckpt",
)

ATTACKS: dict[str, Attack] = {
    # what is half written
    "a link for the half-written report": Attack(link(f"report.html{PART}"), REPORT, refused=False),
    "a link for the half-written record of a run's owner": Attack(link(f".owner{PART}", unfinished=True), RESUME, says=LEADS_OUT),
    **{
        f"a link for the half-written {name}": Attack(link(f"{name}{PART}", unfinished=True), RESUME, says=LEADS_OUT)
        for name in PARTS
    },
    "a link for a half-written export": Attack(
        link(f"copy.safetensors{PART}"), ["export", "run", "--to", "safetensors", "--out", "run/copy.safetensors"], refused=False
    ),
    "a link for a half-written comparison": Attack(
        link(f"runs.csv{PART}"), ["compare", "run", "--csv", "run/runs.csv"], refused=False
    ),
    "a link for a half-written picture of curves": Attack(
        link(f"curves.png{PART}"), ["compare", "run", "--plot", "run/curves.png"], refused=False
    ),
    "a link for a contact sheet": Attack(
        lambda folder: (images(folder), link("sheet.png")(folder)),
        ["classify", "run", "images", "--sheet", "run/sheet.png"],
        refused=False,
    ),
    "a link for a picture of what a net looked at": Attack(
        lambda folder: (images(folder), (folder / "run/maps").mkdir(), link("maps/00000-0.png")(folder)),
        ["classify", "run", "images", "--explain", "run/maps"],
        refused=False,
    ),
    "a folder that is called as what is half written": Attack(folder_in_place(f"x{PART}"), RESUME, refused=False),
    # what is written in place, or through a folder
    **{
        f"a link for {name} of a run to go on with": Attack(link(name, unfinished=True), RESUME, says=LEADS_OUT)
        for name in RESUMED
    },
    **{
        f"a folder in the place of {name} of a run to go on with": Attack(
            file_as_folder(name),
            RESUME,
            says="is a folder, where a file is to be written",
        )
        for name in ("model.safetensors", "metrics.json")
    },
    "900 levels of folders in a run to go on with": Attack(nested_folders, RESUME, says="nested deeper than 50 levels"),
    "weights of 8 TiB, most of it a hole": Attack(
        mostly_a_hole("weights.safetensors"), [*FINETUNE, "--model.weights", "weights.safetensors"], says="than the memory"
    ),
    "a model of 8 TiB, most of it a hole": Attack(
        mostly_a_hole("run/model.safetensors"),
        ["export", "run", "--to", "safetensors", "--out", "x.safetensors"],
        says="than the memory",
    ),
    "a link for the folder of checkpoints": Attack(linked_folder, RESUME, says=LEADS_OUT),
    "a link for the last checkpoint to that of another run": Attack(another_run, RESUME, says=LEADS_OUT),
    "a link that leads nowhere": Attack(link("metrics.csv", "outside/new.csv", unfinished=True), RESUME, says=LEADS_OUT),
    "a link that leads to itself": Attack(link("loop", "run/loop", unfinished=True), RESUME, refused=False),
    "a link for the report to a file of the user's": Attack(link("report.html"), REPORT, refused=False),
    "a second name of a file of the user's for the lock": Attack(second_name(".lock"), RESUME, refused=False),
    "a second name of a file of the user's for the record of the owner": Attack(second_name(".owner"), RESUME, refused=False),
    "a record of the owner that names an owner of another kind": Attack(
        owner("filelock/2\npid=1\nhost=node-7\nmode=exclusive\n"), RESUME, says="process 1 on node-7 is writing"
    ),
    "a record of the owner with a terminal's commands in it": Attack(
        owner("filelock/2\npid=1\nhost=\x1b]0;x\x07\nmode=exclusive\n"), RESUME, refused=False
    ),
    "a second name of a file of the user's for the curves": Attack(second_name("metrics.csv"), RESUME, refused=False),
    "a second name of a file of the user's for the last figures": Attack(second_name("metrics.json"), RESUME, refused=False),
    # what is read
    "figures from an endless device": Attack(link("metrics.json", "/dev/zero"), COMPARE, refused=False, says="cannot be read"),
    "curves from an endless device": Attack(link("metrics.csv", "/dev/zero"), COMPARE),
    "predictions from an endless device": Attack(link("predictions.csv", "/dev/zero"), REPORT, refused=False),
    "figures from a pipe": Attack(pipe("metrics.json"), COMPARE, refused=False, says="cannot be read"),
    "curves from a pipe": Attack(pipe("metrics.csv"), REPORT, refused=False),
    "curves from a pipe, of a run to go on with": Attack(pipe("metrics.csv", unfinished=True), RESUME, says="move it away"),
    "predictions from a pipe": Attack(pipe("predictions.csv"), REPORT, refused=False),
    "a configuration from a pipe": Attack(pipe("config.yaml"), COMPARE, refused=False, says="config.yaml is missing or damaged"),
    "a record of the owner from a pipe": Attack(pipe(".owner", unfinished=True), RESUME, refused=False),
    "a record of a job from a pipe": Attack(resume_of_a_job, start_job, refused=False),
    "figures from the kernel's messages": Attack(link("metrics.json", KERNEL), COMPARE, refused=False, says="cannot be read"),
    "curves from the kernel's messages": Attack(link("metrics.csv", KERNEL), COMPARE),
    "predictions from the kernel's messages": Attack(link("predictions.csv", KERNEL), REPORT, refused=False),
    "a configuration from the kernel's messages": Attack(link("config.yaml", KERNEL), COMPARE, refused=False),
    "a checkpoint from the kernel's messages": Attack(
        link("checkpoints/best.ckpt", KERNEL),
        ["test", "--recipe", "small.yaml", "--ckpt_path", "run/checkpoints/best.ckpt"],
        says="cannot be read (the file is empty)",
    ),
    "weights from the kernel's messages": Attack(
        link("weights.pth", KERNEL), [*FINETUNE, "--model.weights", "run/weights.pth"], says="cannot be read (the file is empty)"
    ),
    "the same, as safetensors": Attack(
        link("weights.safetensors", KERNEL), [*FINETUNE, "--model.weights", "run/weights.safetensors"], says="the file is empty"
    ),
    "weights of a bytearray of 2 GB": Attack(
        weights_of_a_bytearray, [*FINETUNE, "--model.weights", "weights.pth"], says="it asks for memory that it does not fill"
    ),
    "a table of images from the kernel's messages": Attack(
        link("table.csv", KERNEL),
        ["fit", "--recipe", "small.yaml", "--dataset", "folder", "--data-dir", "run/table.csv", "--data.num_classes=null"],
        says="cannot be read: the file is empty",
    ),
    "figures of 20 GiB": Attack(endless("metrics.json"), COMPARE, refused=False, says="cannot be read"),
    "curves of 20 GiB": Attack(endless("metrics.csv", "epoch,step\n0,1\n"), COMPARE),
    "predictions of 20 GiB": Attack(endless("predictions.csv", "index,label\n"), REPORT, refused=False),
    # data and their cache
    "a link for a broken download": Attack(data_with("cifar-10-python.tar.gz.part"), DOWNLOAD, refused=False, says="wrong md5"),
    "a link for the lock of a download": Attack(data_with("cifar-10-batches-py.lock"), DOWNLOAD),
    "a server that announces its answer without end": Attack(data_with("x"), endless_continue, says="without end"),
    "a link for the cache of a folder": Attack(cache_that_is_a_link, DECODE, refused=False, says="is a link"),
    "a link for the index of a cache": Attack(cache_with("index.json"), DECODE, refused=False),
    "a link for the half-written index of a cache": Attack(cache_with(f"index.json{PART}"), DECODE, refused=False),
    "a link for the lock of a cache": Attack(cache_with("lock"), DECODE, refused=False, says="nothing is cached"),
    "folders of links that double at every level": Attack(doubling_links, DECODE, refused=False),
    "the same, to classify": Attack(doubling_links, [*CLASSIFY, "images"], refused=False),
    "the same, to classify by a pattern": Attack(doubling_links, [*CLASSIFY, "images/**/*.png"], refused=False),
    "a table whose images are a pipe": Attack(
        table_of_pipes,
        [word.replace("images", "pipes.csv") for word in DECODE] + ["--data.image_size=null"],
        says="it is a pipe or a device",
    ),
    "a table of rows with 70,000 keys": Attack(keys_of_rows, [*TABLE, "keys.jsonl"], says="are not there"),
    "a table of 20 million empty lines": Attack(empty_lines("t.csv", "path,label\n"), [*TABLE, "t.csv"], says="empty lines"),
    "the same, as JSON lines": Attack(empty_lines("t.jsonl", ""), [*TABLE, "t.jsonl"], says="empty lines"),
    "an index of a cache from a pipe": Attack(cache_with_a_pipe, DECODE, refused=False),
}
