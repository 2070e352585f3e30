"""Run command lines, in this process or in another, and read the files that they write."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse._common import parsing_settings
from PIL import Image

from cifar_lit.base import trust
from cifar_lit.base.signals import REQUEUE, STOP_SIGNALS
from cifar_lit.cli import main

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
TIME_LIMIT = 300.0  # seconds after which a process counts as hanging

RECIPE = """# small — a net and a data set that train in a moment
seed_everything: 3
trainer:
  accelerator: cpu
  max_epochs: 2
  precision: 32-true
model:
  net: lenet
  lr: 0.05
  optimizer_options: {momentum: 0.9}
  schedule: cosine
data:
  dataset: shapes
  val_size: 40
  batch_size: 32
  images: {image_size: 16, num_classes: 4, count: 200}
"""
SMALL = ("--recipe", "small.yaml")
NO_SHAPES = ("--data.num_classes", "null", "--data.image_size", "null")  # unset the recipe's options of shapes
OWN_IMAGES = ("--dataset", "folder", *NO_SHAPES)

# Variables of another run, of a scheduler around the tests, and of proxies.
FOREIGN_VARIABLES = re.compile(
    r"((LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT))$|(CIFAR_LIT|SLURM|TORCHELASTIC)_|.*_proxy$",
    re.IGNORECASE,
)


class Answer(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def error_lines(self) -> list[str]:
        """The lines on stderr without the progress of downloading and decoding."""
        return [line for line in self.err.splitlines() if not re.match(r"decoding images|.* from .*MB/s", line)]


class Training(NamedTuple):
    """A training followed by its test: the run folder (read-only) and the output."""

    run_dir: Path
    answer: Answer


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of a command: without foreign variables, with a cache in `folder`, and offline."""
    own = {name: value for name, value in os.environ.items() if not FOREIGN_VARIABLES.match(name)}
    proxy = "http://127.0.0.1:9"  # the discard port refuses connections
    offline = {"http_proxy": proxy, "https_proxy": proxy, "ftp_proxy": proxy, "no_proxy": "127.0.0.1,localhost"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    local = {"CIFAR_LIT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return {**own, **offline, **local, **more}


@contextmanager
def undone() -> Iterator[None]:
    """Undo a command's changes to this process."""
    handlers = {number: signal.getsignal(number) for number in filter(None, (*STOP_SIGNALS, REQUEUE))}
    loggers = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.profilers")
    levels = {name: logging.getLogger(name).level for name in loggers}
    variables = dict(os.environ)
    argv = sys.argv
    path = [*sys.path]
    typed = {*trust._typed}
    parsing = dict(parsing_settings)
    precision = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = argv
        sys.path[:] = path
        trust._typed.clear()
        trust._typed.update(typed)
        parsing_settings.update(parsing)
        urllib.request.install_opener(None)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def run_command(*words: object, default: str = "train", **variables: str) -> Answer:
    """Run a command line in this process and undo its changes to the process.

    default: the command if `words` name none. variables: additional environment variables.
    """
    variables_of_command = environment(Path.cwd(), **variables)
    out, err = io.StringIO(), io.StringIO()
    with undone(), redirect_stdout(out), redirect_stderr(err):
        os.environ.clear()
        os.environ.update(variables_of_command)
        sys.argv = ["cifar-lit"]
        torch.set_num_threads(1)  # a second thread slows nets this small down
        urllib.request.install_opener(None)  # a cached opener has the proxies of an earlier command
        warnings.simplefilter("ignore")
        code = main([str(word) for word in words], default)
    return Answer(code, out.getvalue(), err.getvalue())


def run_process(words: Sequence[object], folder: Path, **variables: str) -> Answer:
    """Run a program in another process, in `folder`."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment(folder, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


class Started:
    """A command line in another process, which writes its output to the files NAME-stdout.txt and NAME-stderr.txt."""

    def __init__(self, words: Sequence[object], folder: Path, name: str, **variables: str) -> None:
        self.out = folder / f"{name}-stdout.txt"
        self.err = folder / f"{name}-stderr.txt"
        command = [sys.executable, "-m", "cifar_lit", *map(str, words)]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment(folder, **variables), stdout=out, stderr=err
            )

    def answer(self) -> Answer:
        """Wait for its end; kill it after TIME_LIMIT."""
        try:
            code = self.process.wait(TIME_LIMIT)
        finally:
            self.process.kill()
        return Answer(code, self.out.read_text(), self.err.read_text())


def assert_refused(answer: Answer, code: int, *parts: str) -> None:
    """Assert this exit code, one line on stderr that contains all `parts`, and nothing on stdout."""
    assert len(answer.error_lines) == 1, answer.err
    line = answer.error_lines[0]
    assert line.startswith("cifar-lit: ")
    assert [part for part in parts if part not in line] == [], line
    assert answer.code == code, line
    assert answer.out == ""


# ---- files


def metrics_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "metrics.json").read_text())


def config_of(run_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((run_dir / "config.yaml").read_text())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table_rows(out: str) -> list[list[str]]:
    """Return the cells of printed tables, without the header."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def files_of(run_dir: Path) -> set[str]:
    """Return the files of a run folder, with all event files of TensorBoard as one name."""
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    return {re.sub(r"^events\.out\.tfevents\..*", "events.out.tfevents.*", name) for name in names}


def contents_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and the bytes of every file below `folder`."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def checkpoint_of(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def copy_run(run_dir: Path) -> Path:
    """Copy a run into lightning_logs/ of the working folder."""
    copy = Path("lightning_logs") / run_dir.name
    shutil.copytree(run_dir, copy)
    return copy


def draw_folder(root: Path, counts: Mapping[str, int], size: int = 16) -> Path:
    """Write images of one colour each below `root`; `counts` maps folders such as train/cat to numbers of images."""
    for shade, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", (size, size), (40 * shade % 256, 10 * number % 256, 90))
            image.save(root / folder / f"{number}.png")
    return root
