"""Command lines typed in this process, with what they change in it put back, and in processes of their own."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from PIL import Image

from cifar_lit.cli import main

SMALL = """# small — a net and a data set that train in a moment
seed_everything: 3
trainer:
  accelerator: cpu
  max_epochs: 2
  precision: 32-true
model:
  net: lenet
  lr: 0.05
  momentum: 0.9
  schedule: cosine
data:
  dataset: shapes
  image_size: 16
  num_classes: 4
  count: 200
  val_size: 40
  batch_size: 32
"""


class Typed(NamedTuple):
    """What a command line answered."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """Lines on stderr, but for those that say how far a preparation has come."""
        return [line for line in self.err.splitlines() if not line.startswith("decoding images: ")]


def typed(*words: object, default: str = "train") -> Typed:
    """Runs a command line here; what it sets for the whole process is as before afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment, precision, threads = dict(os.environ), torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)  # so small are the trainings here
    os.environ["CIFAR_LIT_CACHE"] = str(Path.cwd() / "cache")
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a process of its own shows which are left, see test_quiet.py
            code = main([str(word) for word in words], default)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
    return Typed(code, out.getvalue(), err.getvalue())


def started(*words: object, seconds: float = 60) -> Typed:
    """Runs `python …` in a process of its own, in the working folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )
    return Typed(done.returncode, done.stdout, done.stderr)


def matches(pattern: str, line: str) -> bool:
    """Whether a line is as expected, where … stands for anything."""
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("…")), line) is not None


def refused(answer: Typed, line: str, code: int) -> None:
    """Asserts that a command line was answered with nothing but this line and exit code."""
    assert [matches(line, said) for said in answer.complaints] == [True], answer.err
    assert answer.code == code
    assert answer.out == ""


def draw_folder(root: Path, counts: dict[str, int], size: int = 16) -> Path:
    """Writes images of one colour each below `root`: `counts` from a folder such as train/cat to how many."""
    for shade, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (size, size), (40 * shade, 10 * number, 90)).save(root / folder / f"{number}.png")
    return root


def metrics_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.json").read_text())


def config_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def files_of(run: Path) -> list[str]:
    """The files of a run; TensorBoard's, of which there may be several, as one."""
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return sorted({"events.out.tfevents.*" if name.startswith("events.out.tfevents.") else name for name in names})
