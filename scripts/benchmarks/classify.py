"""Throughput and memory of `cifar-lit classify`: python scripts/benchmarks/classify.py RUN FOLDER FOLDER."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from PIL import Image
from script import run_script

import cifar_lit
from cifar_lit.bench.process import as_error, started
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.formats import IMAGES
from cifar_lit.errors import UsageError
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Run `classify RUN FOLDER --csv` as a user does, on one or more folders. Measure seconds from the start of the "
    "process to its end, images/s, and the peak memory of the process and its decoding workers."
)
POLL_SECONDS = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="+", help="folder of pictures, such as one of 32 pixels and one of photos"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one that warms up")
    parser.add_argument("--device", default="cpu", help="device of the net")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.rounds < 1:
        raise UsageError("--rounds must be at least 1")
    card = cifar_lit.load(settings.run).card
    net = " ".join(
        [card.net, *(f"{name} {value}" for name, value in card.options.items()), "×".join(map(str, card.input_shape))]
    )
    folders = {name_of(Path(folder)): Path(folder) for folder in settings.folders}
    rounds: dict[str, list[tuple[int, float, float]]] = {name: [] for name in folders}
    progress = Progress(settings.rounds + 1, "round")
    with suppress(Interrupted):
        for number in range(settings.rounds + 1):
            for name, folder in folders.items():
                one = classify(settings.run, folder, settings.device)
                rounds[name] += [one] if number else []
            progress.advance(number + 1)
    rows: list[Row] = []
    for name, same in rounds.items():
        if same:
            rows.append((f"{name}: classify", spread(images / seconds for images, seconds, _ in same), "images/s"))
            rows.append((f"{name}: from start to end", spread(seconds for _, seconds, _ in same), "s"))
            rows.append((f"{name}: peak memory", spread(memory for *_, memory in same), "MB"))
    if rows:
        own = {**vars(settings), "run": Path(settings.run).name, "folders": list(folders), "net": net}
        publish("classify", own, f"{net} · on {settings.device}", rows, f"of up to {settings.rounds} rounds, in turn")


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures in a folder and its subfolders, sorted; raise UsageError if there are none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not files:
        raise UsageError(f"there are no pictures in {folder}: name another folder")
    return files


def name_of(folder: Path) -> str:
    """Describe a folder by the number and the median size of its pictures."""
    files, sizes = pictures_in(folder), []
    for file in files[:: max(1, len(files) // 200)]:
        with Image.open(file) as image:
            sizes.append(image.size)
    width, height = (round(statistics.median(sides)) for sides in zip(*sizes, strict=True))
    return f"{len(files):,} files of {width}×{height}"


def classify(run: str, pictures: Path, device: str) -> tuple[int, float, float]:
    """Return images, seconds, and the summed peak memory of the command and its children in MB (0 without /proc)."""
    peaks: dict[int, float] = {}
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cifar_lit", "classify", run, str(pictures), f"--csv={folder}/rows.csv"]
        before = time.perf_counter()
        with started([*command, "--accelerator", device], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:

            def watch() -> None:
                while not ended.wait(POLL_SECONDS):
                    for pid in (process.pid, *_children(process.pid)):
                        peaks[pid] = max(peaks.get(pid, 0.0), _peak(pid))

            watcher = threading.Thread(target=watch, daemon=True)
            watcher.start()
            _, stderr = process.communicate()
        seconds = time.perf_counter() - before
        ended.set()
        watcher.join()
        rows = Path(folder) / "rows.csv"
        if process.returncode not in (0, 1) or not rows.is_file():  # 1: a file is not an image
            raise as_error(process.returncode, stderr, "classify")
        return len(rows.read_text().splitlines()) - 1, seconds, sum(peaks.values())


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]
    except OSError:
        return []


def _peak(pid: int) -> float:
    """Return the peak memory of a process in MB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    raise SystemExit(run_script())
