"""Run K. Jordan's own program on a CPU: python scripts/benchmarks/airbench.py airbench94_muon.py."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from progress import Progress
from script import run_script
from torch import Tensor, nn

from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import UsageError
from cifar_lit.memory import keep_freed_memory
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Run airbench94_muon.py (github.com/KellerJordan/cifar10-airbench; not part of this project) unchanged on the "
    "CPU. Its CUDA calls are redirected to the CPU, and its half precision is bfloat16. Nothing is compiled. Freed "
    "memory is kept, as in our trainings. The time is measured by its own clock, without the last test with views."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("file", metavar="airbench94_muon.py", help="path of the program")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", default="cifar10", help="shapes for a trial run")
    parser.add_argument("--runs", type=int, default=1, help="number of seeds")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    path = Path(settings.file).resolve()
    if not path.is_file() or settings.runs < 1:
        raise UsageError(f"there is no program {settings.file}" if settings.runs > 0 else "--runs must be at least 1")
    data = ImageData(settings.dataset, root=settings.root, val_size=0)
    keep_freed_memory()
    results: list[dict[str, Any]] = []
    progress = Progress(8 * settings.runs, "epoch")
    original_folder = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, suppress(Interrupted):
        (Path(folder) / "cifar10").mkdir()
        for part, images in (("train", data.train_images), ("test", data.test_images)):
            contents = {"images": images.images, "labels": images.labels, "classes": list(images.classes)}
            torch.save(contents, Path(folder) / f"cifar10/{part}.pt")
        redirect_cuda_to_cpu()
        os.chdir(folder)
        try:
            program = load(path)
            for seed in range(settings.runs):
                torch.manual_seed(seed)
                results.append(train(program, progress, seed))
        finally:
            os.chdir(original_folder)
    names = {"val_acc": "accuracy", "tta_val_acc": "accuracy with views"}
    rows: list[Row] = [
        (text, spread(100 * one[name] for one in results), "%") for name, text in names.items() if results
    ]
    if results:
        rows.append(("training", spread(one["time_seconds"] for one in results), "s"))
        publish("airbench", {**vars(settings), "file": path.name}, f"{path.name} on this CPU", rows)


def train(program: ModuleType, progress: Progress, seed: int) -> dict[str, Any]:
    """Train once; return the values that the program reports after each epoch and at its end."""
    reported: dict[str, Any] = {}

    def note_details(variables: dict[str, Any], is_final_entry: bool) -> None:
        names = ("tta_val_acc",) if is_final_entry else ("val_acc", "time_seconds")
        reported.update({name: variables[name] for name in names})
        if not is_final_entry:
            progress.advance(8 * seed + variables["epoch"] + 1, f"{100 * variables['val_acc']:.2f} %")

    program.print_training_details = note_details  # type: ignore[attr-defined]
    net = program.CifarNet().to(memory_format=torch.channels_last)
    with Path(os.devnull).open("w", encoding="utf-8") as devnull, redirect_stdout(devnull):
        program.main(seed, net)
    return reported


def load(path: Path) -> ModuleType:
    """Import the program. It reads its own source through `sys.argv[0]`."""
    spec = spec_from_file_location("airbench_program", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python program")
    program, argv = module_from_spec(spec), sys.argv
    sys.argv = [str(path)]
    try:
        spec.loader.exec_module(program)
    finally:
        sys.argv = argv
    return program


class Event:
    """Replacement for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        """Store the current time."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`."""
        return 1e3 * (end.time - self.time)


def redirect_cuda_to_cpu() -> None:
    """Replace the CUDA functions that the program calls by equivalents for the CPU."""
    load_file = torch.load
    changes: list[tuple[Any, str, Any]] = [
        (torch, "load", lambda file, map_location: load_file(file)),
        (torch, "compile", lambda function: function),
        (torch.cuda, "Event", Event),
        (torch.cuda, "synchronize", lambda: None),
        (nn.Module, "half", nn.Module.bfloat16),
        (Tensor, "half", Tensor.bfloat16),
    ]
    for place, name, value in changes:
        setattr(place, name, value)


if __name__ == "__main__":
    raise SystemExit(run_script())
