"""`cifar-lit bench hostile`: files that want to run code or to take memory, each read as a user would, and what came of it."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from cifar_lit.bench.hostile_data import ARCHIVES, CONFIGS, IMAGES, READ
from cifar_lit.bench.hostile_models import CHECKPOINTS, MODELS
from cifar_lit.bench.hostile_room import Room
from cifar_lit.bench.report import environment, headline, settings_of, show, write_figures
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Hostile files, each made anew and read by the command that a user would type, in a process of its own: whether code ran "
    "out of it, the exit code and the line that was printed, seconds (imports not counted), and by how much memory grew."
)

SECONDS, MEGABYTES = 2.0, 512.0  # what a file may take
PATIENCE = 30  # seconds until a reader counts as hanging
ADDRESSES = 32 << 30  # bytes of addresses that a reader may ask for beyond what it starts with
SMALL = """seed_everything: 3
trainer: {accelerator: cpu, max_epochs: 1, precision: 32-true}
model: {net: lenet, lr: 0.05}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 200, val_size: 40, batch_size: 32}
"""
PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen")  # audit events of starting a program

Maker = Callable[[Room], Path]
KINDS: dict[str, dict[str, Maker]] = {
    "checkpoint": CHECKPOINTS,
    "model": MODELS,
    "configuration": CONFIGS,
    "archive": ARCHIVES,
    "image": IMAGES,
}


@dataclass(frozen=True)
class Answer:
    """What one file gave.

    bytes: its length. code: the exit code, None where the reader hung or died. lines: on stderr. megabytes: growth of the
    resident memory at its highest. cpu_seconds: those of the process itself, which other programs do not
    lengthen. ran: what ran out of it, empty when nothing did.
    """

    kind: str
    name: str
    bytes: int
    code: int | None
    lines: list[str]
    seconds: float
    cpu_seconds: float
    megabytes: float
    ran: str

    @property
    def held(self) -> bool:
        """Whether the file was refused in one line, in time, within the memory, and nothing ran."""
        if self.name in READ:
            told = self.code == 0 and not self.lines
        else:
            told = self.code in (1, 2) and len(self.lines) == 1 and self.lines[0].startswith("cifar-lit: ")
        return told and not self.ran and self.cpu_seconds < SECONDS and self.megabytes < MEGABYTES


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--kind", type=str | None, default=None, help=f"only one of {', '.join(KINDS)}")


def run(settings: Namespace) -> None:
    """Makes and reads all files, and reports. Raises Failure when one was not refused as it should be."""
    if settings.kind is not None and settings.kind not in KINDS:
        raise UsageError(f"--kind must be one of {', '.join(KINDS)}, not {settings.kind}")
    kinds = [settings.kind] if settings.kind else list(KINDS)
    answers = list(answers_of([(kind, name) for kind in kinds for name in KINDS[kind]]))
    rows = [
        (
            f"{one.kind}: {one.name}",
            str(one.code),
            f"{one.cpu_seconds:.2f} s of the CPU",
            f"{one.megabytes:.0f} MB",
            one.ran or "–",
            *one.lines[:1],
        )
        for one in answers
    ]
    failed = [one for one in answers if not one.held]
    print("\n".join(" · ".join(row) for row in rows))
    counts = Counter(one.kind for one in answers)
    longest, largest = max(one.cpu_seconds for one in answers), max(one.megabytes for one in answers)
    table = [(kind, str(number), str(sum(one.held for one in answers if one.kind == kind))) for kind, number in counts.items()]
    show(
        "hostile files", ("kind", "files", "refused"), table, f"longest {longest:.2f} s of the CPU · most memory {largest:.0f} MB"
    )
    if settings.json:
        head = headline(("hostile files", len(answers), "files"), ("refused", len(answers) - len(failed), "files"),
                        ("longest, CPU", longest, "s"), ("most memory", largest, "MB"))  # fmt: skip
        values = {"settings": settings_of(settings), "environment": environment(), "answers": [asdict(one) for one in answers]}
        write_figures(Path(settings.json), {"bench": "hostile", **values, **head})
    if failed:
        raise Failure(f"{len(failed)} hostile files were not refused as they should be: {', '.join(one.name for one in failed)}")


def answers_of(wanted: list[tuple[str, str]]) -> Iterator[Answer]:
    """Makes each of the files, named by kind and name, in a folder of its own, and reads it."""
    import cifar_lit.cli.app  # noqa: F401 (here and not in each process, so that imports are not counted)

    with tempfile.TemporaryDirectory(prefix="cifar-lit-hostile-") as temporary:
        genuine = _genuine(Path(temporary))
        for kind, name in wanted:
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                room = Room(Path(folder))
                shutil.copytree(genuine, room.run)
                yield _answer(room, kind, name)


def _genuine(folder: Path) -> Path:
    """A run of a training with its test."""
    (folder / "small.yaml").write_text(SMALL)
    words = ["train", "--recipe", str(folder / "small.yaml"), "--logs", str(folder / "runs")]
    found = _apart(folder, lambda: _typed(words))
    if found["code"] != 0:
        raise Failure(f"the genuine run failed: {' '.join(found['lines'])}")
    return folder / "runs" / "small-1"


def _answer(room: Room, kind: str, name: str) -> Answer:
    path = KINDS[kind][name](room)
    words = _words(room, kind, path)
    length = path.stat().st_size if path.is_file() else 0
    reader = (lambda: _loaded(path)) if kind == "model" else (lambda: _typed(words))
    found = _apart(room.folder, reader)
    traces = ["a trace was left"] * room.trace.exists() + [event for event in found["events"] if event in PROGRAMS]
    return Answer(
        kind,
        name,
        length,
        found["code"],
        [line.replace(f"{room.folder}/", "") for line in found["lines"]],  # a temporary folder, which says nothing
        round(found["seconds"], 3),
        round(found["cpu_seconds"], 3),
        round(found["megabytes"], 1),
        ", ".join(traces),
    )


def _words(room: Room, kind: str, path: Path) -> list[str]:
    """What a user types who has such a file."""
    small = ["--recipe", str(room.folder.parent / "small.yaml"), "--logs", str(room.folder / "runs")]
    if path == room.checkpoint:
        return ["test", "--ckpt_path", str(path), "--logs", str(room.folder / "runs")]
    if kind == "configuration":
        return ["fit", *small, "--config", str(path)]
    if kind == "archive":  # and nowhere to download it from
        return ["fit", *small, "--dataset", "cifar10", "--data-dir", str(room.folder), "--data.url", str(room.folder / "none")]
    good = room.folder / "images" / "b"
    good.mkdir(parents=True)
    for number in range(4):
        (good / f"{number}.png").write_bytes(_plain_image())
    return [
        "fit",
        *small,
        "--dataset",
        "folder",
        "--data-dir",
        str(room.folder / "images"),
        "--data.num_classes=null",
        "--data.val_size=1",
    ]


def _plain_image() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    return file.getvalue()


def _typed(words: list[str]) -> int:
    from cifar_lit.cli import main

    return main(words)


def _loaded(path: Path) -> int:
    """Reads a model as the commands do that use one."""
    from cifar_lit.cli.errors import explain_error
    from cifar_lit.inference.load import load

    try:
        load(path)
    except Exception as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0


def _apart(folder: Path, reader: Callable[[], int]) -> dict[str, Any]:
    """What `reader` gives in a process that is forked off and works in `folder`: code, lines, seconds, megabytes, events."""
    report = folder / "report.json"
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            report.write_text(json.dumps(_watched(folder, reader)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    with _ended(process):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.005)
    if report.exists():
        found: dict[str, Any] = json.loads(report.read_text())
        report.unlink()
        return found
    return {
        "code": None,
        "lines": ["it hung or died"],
        "seconds": PATIENCE,
        "cpu_seconds": PATIENCE,
        "megabytes": 0.0,
        "events": [],
    }


@contextmanager
def _ended(process: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)  # it is still to be waited for, so that the number is its own
        os.waitpid(process, 0)


def _watched(folder: Path, reader: Callable[[], int]) -> dict[str, Any]:
    os.chdir(folder)
    os.environ["CIFAR_LIT_CACHE"] = str(folder / "cache")
    sys.path.insert(0, str(folder))  # the worst case: modules that came with a run can be imported
    torch.set_num_threads(1)
    events: set[str] = set()
    sys.addaudithook(lambda event, _: events.add(event) if event in PROGRAMS else None)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest use so far is forgotten
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ADDRESSES,) * 2)
    out, err = io.StringIO(), io.StringIO()
    began, cpu_began = time.perf_counter(), time.process_time()
    with redirect_stdout(out), redirect_stderr(err):
        code = reader()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("decoding images")]
    grown = (_memory("VmHWM") - before) / 1e6
    return {
        "code": code,
        "lines": lines,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "megabytes": grown,
        "events": sorted(events),
    }


def _memory(name: str) -> int:
    """Bytes of this process's memory as Linux counts them."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
