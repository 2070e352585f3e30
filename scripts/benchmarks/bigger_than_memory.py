"""Train on a data set larger than memory: python scripts/benchmarks/bigger_than_memory.py --folder DIR --json FILE."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from script import run_script

from cifar_lit.bench.process import as_error, child_environment
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import publish
from cifar_lit.data.batch import Batch
from cifar_lit.data.shapes import shapes
from cifar_lit.errors import Failure, UsageError

if sys.platform != "linux":
    raise SystemExit("bigger_than_memory.py limits memory by Linux's control groups: run it on Linux")

WHAT = (
    "Train on JPEGs of generated shapes whose decoded size is several times a memory limit. A control group enforces "
    "the limit for all processes, including the page cache. The images are decoded and trained on for an epoch; then "
    "a training is killed in the middle of an epoch and resumed. The same is measured without a limit, with the "
    "decoded images in memory. Every batch must be equal bit for bit."
)
CLASSES = 6  # same as in the recipe
RECIPE = "signs_mlp"  # a small net, so that reading dominates
DRAWN_AT_ONCE = 4096  # images
SAMPLE_SECONDS = 0.2  # between two samples of memory use
DECODE = """import sys
from cifar_lit.data.folder import folder
from cifar_lit.data.source_settings import SourceSettings
folder(SourceSettings(root=sys.argv[1], image_size=int(sys.argv[2])), True)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("--folder", default=".", help="folder on a disk with room for all images, decoded and as JPEGs")
    parser.add_argument("--limit-mb", type=int, default=1500, help="memory limit of all processes together")
    parser.add_argument("--times", type=float, default=10.0, help="how many times as large the decoded images are")
    parser.add_argument("--side", type=int, default=128, help="of the images, in pixels")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")


def run(settings: argparse.Namespace) -> None:
    """Measure and report; raise Failure if batches differ or no control group can be created."""
    count = round(settings.times * settings.limit_mb * 1e6 / (3 * settings.side**2))
    if count < 4 * settings.batch_size:
        raise UsageError(f"{count} images are too few: raise --times or --limit-mb")
    settings.interval = max(1, count // settings.batch_size // 10)  # steps between two checkpoints
    with tempfile.TemporaryDirectory(dir=settings.folder) as name:
        place = Path(name)
        os.environ["CIFAR_LIT_CACHE"] = str(place / "cache")
        write_jpegs(place / "images", count, settings.side)
        group = MemoryGroup(settings.limit_mb * 10**6)
        try:
            started = time.perf_counter()
            Child([sys.executable, "-c", DECODE, str(place / "images"), str(settings.side)], group).end()
            decoding = count / (time.perf_counter() - started), group.peak
            limited, limited_record = train(place, "limited", settings, group, "host")
            tenths = speeds_of(place / "limited.txt", settings.batch_size)
            killed_record = train_with_kill(place, settings, group)
            peak, peak_with_pages, kills = group.peak, group.peak_with_pages, group.kills
        finally:
            group.remove()
        for file in (place / "cache").glob("*/*.u8"):
            with file.open("rb") as opened:  # into the page cache
                while opened.read(1 << 24):
                    pass
        free, free_record = train(place, "free", settings, None, "device")
    if not limited_record == killed_record == free_record:
        raise Failure("the batches of these trainings differ: this is a bug")
    speeds = limited["images_per_second"], free["images_per_second"]
    rows = [
        ("decoded images", count * 3 * settings.side**2 / 1e6, "MB"),
        ("limit for all processes, with the pages of files", settings.limit_mb, "MB"),
        ("most memory, with the pages of files", peak_with_pages / 1e6, "MB"),
        ("most memory of the processes' own", peak / 1e6, "MB"),
        ("of that while decoding", decoding[1] / 1e6, "MB"),
        ("processes ended for want of memory", kills, ""),
        ("decoding within the limit", decoding[0], "images/s"),
        ("training within the limit", speeds[0], "images/s"),
        ("of that the slowest tenth of the epoch", min(tenths), "images/s"),
        ("and the fastest tenth", max(tenths), "images/s"),
        ("training with all in memory", speeds[1], "images/s"),
        ("within the limit / in memory", speeds[0] / speeds[1], "×"),
        ("batches compared, equal to the bit, also after a kill", len(free_record), ""),
    ]
    own = {name: value for name, value in vars(settings).items() if name != "folder"}
    publish(
        "bigger than memory", own, f"{count:,} images of {settings.side}×{settings.side}", [(*row,) for row in rows]
    )


def write_jpegs(root: Path, count: int, side: int) -> None:
    """Write `count` JPEGs of generated shapes to train/, and some to test/, on all cores."""
    for part in ("train", "test"):
        for number in range(CLASSES):
            (root / part / str(number)).mkdir(parents=True)
    plans = [
        (root / "train", start, min(DRAWN_AT_ONCE, count - start), side) for start in range(0, count, DRAWN_AT_ONCE)
    ]
    plans.append((root / "test", count, 64 * CLASSES, side))
    progress = Progress(len(plans), "drawing part")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for number, _ in enumerate(pool.map(write_some, *zip(*plans, strict=True))):
            progress.advance(number + 1)


def write_some(folder: Path, first: int, count: int, side: int) -> None:
    """Generate images with the seed `first`; write them to the folders of their classes, numbered from `first`."""
    drawn = shapes(True, image_size=side, channels=3, num_classes=CLASSES, count=count, seed=first)
    for number, (image, label) in enumerate(zip(drawn.images.numpy(), drawn.labels.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{first + number}.jpg", quality=90)


# ---- trainings


class BatchRecord(pl.Callback):
    """Write step, checksum and time of each batch. The checksum covers the bit sum, label and row of every image."""

    def __init__(self, file: str) -> None:
        self.file = Path(file).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open until the process ends)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        """Append a line."""
        sums = batch.images.permute(0, 2, 3, 1).contiguous().view(torch.int32).sum((1, 2, 3))
        digest = hashlib.sha256(torch.stack([sums, batch.labels, batch.indices]).numpy().tobytes())
        self.file.write(f"{trainer.global_step} {digest.hexdigest()} {time.monotonic():.3f}\n")


def read_record(file: Path) -> dict[int, str]:
    """Return the checksum of each step; raise Failure if a step was repeated with another batch."""
    steps: dict[int, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        step, digest, *_ = line.split(" ")
        if len(digest) == 64 and steps.setdefault(int(step), digest) != digest:
            raise Failure(f"step {step} was repeated with another batch: this is a bug")
    return steps


def speeds_of(file: Path, batch_size: int) -> list[float]:
    """Return images/s in each tenth of a training."""
    times = [float(line.split(" ")[2]) for line in file.read_text(encoding="utf-8").splitlines()]
    ends = [times[round(part * (len(times) - 1) / 10)] for part in range(11)]
    return [batch_size * (len(times) - 1) / 10 / (end - begin) for begin, end in pairwise(ends)]


def command(place: Path, name: str, settings: argparse.Namespace, placement: str) -> list[str]:
    """Return the command of a training of one epoch."""
    record = json.dumps(
        {"class_path": "bigger_than_memory.BatchRecord", "init_args": {"file": str(place / f"{name}.txt")}}
    )
    return [
        *(sys.executable, "-m", "cifar_lit", "train", "--recipe", RECIPE, "--epochs", "1", "--accelerator", "cpu"),
        *(
            "--precision",
            "32-true",
            "--dataset",
            "folder",
            "--data-dir",
            str(place / "images"),
            "--logs",
            str(place / name),
        ),
        *(
            "--data.image_size",
            str(settings.side),
            "--data.mean",
            "null",
            "--data.std",
            "null",
            "--data.placement",
            placement,
        ),
        *(
            "--batch-size",
            str(settings.batch_size),
            "--data.eval_batch_size",
            str(settings.batch_size),
            "--data.workers",
            "1",
        ),
        *("--checkpoint-every", str(settings.interval), f"--trainer.callbacks=[{record}]"),
    ]


def train(
    place: Path, name: str, settings: argparse.Namespace, group: MemoryGroup | None, placement: str
) -> tuple[Mapping[str, Any], dict[int, str]]:
    """Run a training without a kill; return its metrics and the checksums of its batches."""
    Child(command(place, name, settings, placement), group).end()
    (metrics,) = (place / name).glob("*/metrics.json")
    return json.loads(metrics.read_text()), read_record(place / f"{name}.txt")


def train_with_kill(place: Path, settings: argparse.Namespace, group: MemoryGroup) -> dict[int, str]:
    """Kill a training in the middle and resume it; return the checksums of its batches."""
    record, line = place / "killed.txt", command(place, "killed", settings, "host")
    steps = len(read_record(place / "limited.txt"))
    child = Child(line, group)
    child.watch(lambda: record.is_file() and len(record.read_bytes().splitlines()) > steps // 2)
    if child.process.poll() is not None:
        raise as_error(child.process.returncode, child.errors(), "the training that was to be killed")
    child.kill()
    (run_dir,) = (place / "killed").iterdir()
    Child([*line[:4], "--resume", str(run_dir)], group).end()
    return read_record(record)


class Child:
    """A process, in a memory group if there is one, whose memory use is sampled."""

    def __init__(self, argv: Sequence[str], group: MemoryGroup | None) -> None:
        self.what = " ".join(argv[2:5])
        self.group, self._errors = group, tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed with this object)
        environment = child_environment()
        environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
        if group:
            group.forget_pages(Path(environment["CIFAR_LIT_CACHE"]))
        self.process = subprocess.Popen(
            argv, stdout=subprocess.DEVNULL, stderr=self._errors, env=environment, start_new_session=True,
            preexec_fn=group.enter if group else None,
        )  # fmt: skip

    def kill(self) -> None:
        """Kill the process with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def watch(self, until: Callable[[], bool] = lambda: False) -> None:
        """Sample memory use until the process ends or `until` returns True."""
        try:
            while self.process.poll() is None and not until():
                if self.group:
                    self.group.look()
                time.sleep(SAMPLE_SECONDS)
        except BaseException:  # including Ctrl-C
            self.kill()
            raise

    def errors(self) -> str:
        """Return the text on stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        """Wait for the process; raise the error that it printed if it failed."""
        self.watch()
        if self.process.returncode:
            raise as_error(self.process.returncode, self.errors(), f"`{self.what}`, under the memory limit,")


# ---- memory


class MemoryGroup:
    """A Linux control group (version 1 or 2) that limits its processes and their page cache to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        first = Path("/sys/fs/cgroup/memory")
        self.version = 1 if first.is_dir() else 2
        self.path = (first if self.version == 1 else Path("/sys/fs/cgroup")) / f"cifar-lit-{os.getpid()}"
        self.peak = 0  # bytes, without page cache
        try:
            self.path.mkdir()
            (self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            with suppress(OSError):
                self.path.rmdir()
            reason = f"{error.strerror}: run this as root with a writable /sys/fs/cgroup"
            raise Failure(f"cannot create a control group with a memory limit ({reason})") from None

    def enter(self) -> None:
        """Add this process and its future children to the group."""
        (self.path / "cgroup.procs").write_text("0")

    def look(self) -> None:
        """Update the peak memory use."""
        self.peak = max(self.peak, self._number("memory.stat", "total_rss" if self.version == 1 else "anon"))

    @property
    def peak_with_pages(self) -> int:
        """Peak bytes including page cache, as counted by the kernel."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())

    @property
    def kills(self) -> int:
        """Number of processes killed by the kernel for lack of memory."""
        return self._number("memory.oom_control" if self.version == 1 else "memory.events", "oom_kill")

    @staticmethod
    def forget_pages(folder: Path) -> None:
        """Drop the files from the page cache, so that the next reader is charged for them."""
        for file in folder.glob("*/*.u8"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self) -> None:
        """Remove the group after its processes have ended."""
        with suppress(OSError):
            self.path.rmdir()

    def _number(self, file: str, name: str) -> int:
        words = (line.split() for line in (self.path / file).read_text().splitlines())
        return int(next(value for word, value in words if word == name))


if __name__ == "__main__":
    raise SystemExit(run_script())
