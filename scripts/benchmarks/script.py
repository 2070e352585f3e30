"""Run a measurement of this folder as a program, and trainings in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cifar_lit.bench.commands import run_module
from cifar_lit.bench.process import as_error, started
from cifar_lit.bench.report import Row, figures_of, print_table, spread_text, write_figures
from cifar_lit.cli.errors import explain_error
from cifar_lit.cli.quiet import quieten
from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.orderly_stop import Interrupted


def set_threads(text: str) -> int:
    """Set the number of torch's threads; the type of a flag."""
    torch.set_num_threads(int(text))
    return int(text)


class FinishedTraining(NamedTuple):
    """Result of a training. lines: printed lines, each with the seconds since the start of the process."""

    metrics: dict[str, Any]
    seconds: float
    lines: list[tuple[float, str]]


def train(argv: Sequence[str]) -> FinishedTraining:
    """Run `cifar-lit train` in a process and a temporary folder; raise its UsageError or Failure."""
    if any(word.partition("=")[0] == "--logs" for word in argv):
        raise UsageError("run folders are deleted after the measurement: leave --logs out")
    with (
        tempfile.TemporaryDirectory() as logs,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
    ):
        before = time.perf_counter()
        lines = []
        command = [sys.executable, "-m", "cifar_lit", "train", *argv, "--logs", logs]
        with started(command, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            for text in process.stdout:
                lines.append((time.perf_counter() - before, text.rstrip()))
        seconds = time.perf_counter() - before
        if process.returncode:
            errors.seek(0)
            raise as_error(process.returncode, errors.read(), "the training")
        metrics = [*Path(logs).glob("*/metrics.json")]
        if len(metrics) != 1:
            raise Failure(f"the training left {len(metrics)} results, not 1: leave out flags that shorten or repeat it")
        return FinishedTraining(json.loads(metrics[0].read_text()), seconds, lines)


def publish(
    bench: str, settings: Mapping[str, Any], title: str, rows: Sequence[Row], *lines: str, **more: Any
) -> dict[str, Any]:
    """Print rows as a table with lines below it, and write the figures to the --json file; return them."""
    figures = figures_of(bench, settings, rows, **more)
    if settings["json"]:
        write_figures(Path(settings["json"]), figures)
    table = [(label, spread_text(value, unit)) for label, value, unit in rows]
    columns = ["", "median (quartiles; range if n < 4)"]
    print_table(figures["environment"], f"{bench} · {title}", columns, table, *lines)
    return figures


def run_script() -> int:
    """Run the main module, a measurement as defined in `cifar_lit.bench.commands`; return the exit code."""
    quieten()
    try:
        run_module(f"python scripts/benchmarks/{Path(sys.argv[0]).name}", sys.modules["__main__"], sys.argv[1:])
    except (Exception, Interrupted) as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0
