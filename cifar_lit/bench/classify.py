"""`cifar-lit bench classify`: pictures a second of `classify`, against decoding alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from PIL import Image

from cifar_lit.bench.process import environment as child_environment
from cifar_lit.bench.report import environment, footer, headline, settings_of, show, shown_spread, spread, write_figures
from cifar_lit.data.decode import decode, decode_chunks, decode_files
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.inference.classify import CHUNK, POOL_FROM, ImageFile, classify_files, find_images
from cifar_lit.inference.load import Classifier, load
from cifar_lit.runs.predictions import CsvRows

WHAT = (
    "Images a second of `classify RUN FOLDER --csv`, from the paths to the written rows, against decoding the same files alone, "
    "by turns in one process, the start of the decoding processes included; then once as a user starts it, from the start of "
    "the process to its end, with the peak memory of it and its decoding processes together."
)
POLL_SECONDS = 0.05


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("run", type=str, metavar="RUN", help="a run folder")
    parser.add_argument("folder", type=str, metavar="FOLDER", help="of pictures")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one to warm up")
    parser.add_argument("--enlarge", type=int, default=0, help="enlarge the pictures to this side first, as photographs are")
    parser.add_argument("--device", type=str, default="cpu", help="where the net computes")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 1:
        raise UsageError("a measurement takes at least --rounds 1")
    classifier = load(settings.run, resolve_device(settings.device))
    keep_freed_memory()  # as the command does
    if settings.enlarge:
        with tempfile.TemporaryDirectory() as folder:
            _enlarge(settings.folder, settings.enlarge, Path(folder))
            _measure(settings, classifier, folder)
    else:
        _measure(settings, classifier, settings.folder)


def _enlarge(source: str, side: int, target: Path) -> None:
    """Writes the pictures of a folder as JPEGs of another side, of the quality that cameras write."""
    for number, file in enumerate(find_images([source], sys.stdin.buffer)):
        Image.fromarray(decode(file.path, (side, side))).save(target / f"{number:06}.jpg", quality=90)


def _measure(settings: Namespace, classifier: Classifier, folder: str) -> None:
    files = [file for file in find_images([folder], sys.stdin.buffer) if file.error is None]
    if not files:
        raise UsageError(f"{folder} holds no pictures")
    sides: dict[str, Callable[[], None]] = {
        "classify": lambda: _classify(classifier, files),
        "decoding alone": lambda: _decode(classifier, files),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(settings.rounds + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            if number:
                seconds[name].append(time.perf_counter() - started)
    whole, memory = as_started(settings.run, folder, settings.device)
    figures = _figures(settings, classifier, len(files), seconds, whole, memory)
    if settings.json:
        write_figures(Path(settings.json), figures)
    speeds, ratio = figures["images_per_second"], figures["ratio"]
    show(
        f"bench classify · {classifier.card.net} {'×'.join(map(str, classifier.card.input_shape))} · {len(files):,} files",
        ("", "images/s"),
        [(name, shown_spread(found)) for name, found in speeds.items()],
        f"classify / decoding alone: {shown_spread(ratio, '.2f')} · medians (quartiles) of {settings.rounds} rounds, by turns",
        f"as a user starts it: {whole:.1f} s, {len(files) / whole:,.0f} images/s · peak memory "
        + (f"{memory:,.0f} MB" if memory else "not measured"),
        footer(figures),
    )


def _figures(
    settings: Namespace, classifier: Classifier, count: int, seconds: dict[str, list[float]], whole: float, memory: float | None
) -> dict[str, Any]:
    speeds = {name: spread(count / value for value in values) for name, values in seconds.items()}
    ratio = spread(alone / ours for ours, alone in zip(seconds["classify"], seconds["decoding alone"], strict=True))
    rows = [(name, found, "images/s") for name, found in speeds.items()]
    return {
        "bench": "classify",
        "settings": {**settings_of(settings), "run": Path(settings.run).name, "folder": f"{count} files"},
        "environment": environment(),
        **headline(
            *rows,
            ("classify / decoding alone", ratio, "×"),
            ("from start to end", whole, "s"),
            *([("peak memory", memory, "MB")] if memory else []),
        ),
        "net": classifier.card.net,
        "images_per_second": speeds,
        "ratio": ratio,
        "seconds_as_started": whole,
        "peak_memory_mb": memory,
    }


def _classify(classifier: Classifier, files: list[ImageFile]) -> None:
    with tempfile.TemporaryFile("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = CsvRows(file, min(3, len(classifier.classes)))
        for rows, _ in classify_files(classifier, files):
            writer.write(rows)


def _decode(classifier: Classifier, files: list[ImageFile]) -> None:
    work = partial(decode_files, size=classifier.size, channels=classifier.channels)
    chunks = [[file.path for file in files[start : start + CHUNK]] for start in range(0, len(files), CHUNK)]
    for _ in decode_chunks(work, chunks, all_cores=len(files) >= POOL_FROM):
        pass


def as_started(run: str, pictures: str, device: str) -> tuple[float, float | None]:
    """Seconds of the command as a process of its own, and the sum of the peak memory of it and its children, in MB.

    The memory is None where the system does not tell (Linux does). Raises Failure when the command fails as a whole.
    """
    peaks: dict[int, float] = {}
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        words = [run, pictures, f"--csv={folder}/rows.csv", "--device", device]
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "cifar_lit", "classify", *words], stderr=subprocess.PIPE, text=True, env=child_environment()
        )

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                for pid in (process.pid, *_children(process.pid)):
                    peaks[pid] = max(peaks.get(pid, 0.0), _peak(pid))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        _, said = process.communicate()
        seconds = time.perf_counter() - started
        ended.set()
        watcher.join()
        if process.returncode not in (0, 1) or not (Path(folder) / "rows.csv").is_file():
            raise Failure((said.strip().splitlines() or ["classify failed"])[-1].removeprefix("cifar-lit: "))
    return seconds, sum(peaks.values()) or None


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
