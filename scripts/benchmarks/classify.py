"""Pictures a second of `cifar-lit classify`, and its memory: python scripts/benchmarks/classify.py RUN FOLDER."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from script import run_script

from cifar_lit.bench.process import as_error, child_environment
from cifar_lit.bench.report import publish, spread
from cifar_lit.errors import UsageError

WHAT = (
    "`classify RUN FOLDER --csv` as a user starts it, from the start of the process to its end: seconds, images a second, and "
    "the peak memory of it and its decoding processes together."
)
POLL_SECONDS = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("folder", metavar="FOLDER", help="of pictures")
    parser.add_argument("--rounds", type=int, default=5, help="how often, after one to warm up")
    parser.add_argument("--device", default="cpu", help="where the net computes")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 1:
        raise UsageError("a measurement takes at least --rounds 1")
    folder = Path(settings.folder)
    rounds = [classify(settings.run, folder, settings.device) for _ in range(settings.rounds + 1)][1:]
    images = rounds[0][0]
    seconds = spread(seconds for _, seconds, _ in rounds)
    speed = spread(images / seconds for _, seconds, _ in rounds)
    memory = max(memory for _, _, memory in rounds)
    publish(
        "classify",
        {**vars(settings), "run": Path(settings.run).name, "folder": f"{images} files"},
        f"{Path(settings.run).name} · {images:,} files",
        [("classify", speed, "images/s"), ("from start to end", seconds, "s"), ("peak memory", memory, "MB")],
        f"of {settings.rounds} rounds",
    )


def classify(run: str, pictures: Path, device: str) -> tuple[int, float, float]:
    """Images, seconds, and the sum of the peak memory of the command and its children in MB (0 without /proc)."""
    peaks: dict[int, float] = {}
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cifar_lit", "classify", run, str(pictures), f"--csv={folder}/rows.csv"]
        started = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--device", device], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=child_environment()
        )

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                for pid in (process.pid, *_children(process.pid)):
                    peaks[pid] = max(peaks.get(pid, 0.0), _peak(pid))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        _, stderr = process.communicate()
        seconds = time.perf_counter() - started
        ended.set()
        watcher.join()
        rows = Path(folder) / "rows.csv"
        if process.returncode not in (0, 1) or not rows.is_file():  # 1: some file is no image
            raise as_error(process.returncode, stderr, "classify")
        return len(rows.read_text().splitlines()) - 1, seconds, sum(peaks.values())


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _peak(pid: int) -> float:
    """The most memory that a process has had so far, in MB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    raise SystemExit(run_script())
