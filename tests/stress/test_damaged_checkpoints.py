"""`cifar-lit drill checkpoint`: a checkpoint is damaged in every way that a disk or a copy can; none may be loaded."""

from __future__ import annotations

import random
import struct
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from cifar_lit.bench.report import environment, footer, headline, settings_of, show, write_figures
from cifar_lit.drills.forked import Forked, warm
from cifar_lit.drills.kill import TRAINING
from cifar_lit.drills.survivors import run_in
from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.checkpoint import COMMENT, DIGEST, END_SIZE, Damaged, read_checkpoint

WHAT = (
    "Cuts the last checkpoint of a small training at every class of place, flips its bits, and blanks its pages. Each time "
    "loading must fail with one line; how many of the same files torch.load alone takes for whole is said beside it."
)
PAGE = 4096


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this drill."""
    parser.add_argument("--cuts", type=int, default=100, help="cuts in each class of place, at most")
    parser.add_argument("--flips", type=int, default=1000, help="single bits flipped anywhere, and as many pages blanked in all")
    parser.add_argument("--seed", type=int, default=0, help="of the places")


SHORT = {"cuts": 5, "flips": 60}


def classes(path: Path) -> dict[str, list[range]]:
    """The classes of byte positions of a checkpoint, which is a zip archive with our comment, each as ranges of positions."""
    size = path.stat().st_size
    found: dict[str, list[range]] = {name: [] for name in ("headers of entries", "pickled structure", "tensors", "other entries")}
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name_size, extra_size = struct.unpack_from("<HH", content, entry.header_offset + 26)
            start = (
                entry.header_offset + 30 + name_size + extra_size
            )  # PKWARE's layout of a local header; the padding is in extra
            found["headers of entries"].append(range(entry.header_offset, start))
            inner = entry.filename.partition("/")[2]
            kind = "pickled structure" if inner == "data.pkl" else "tensors" if inner.startswith("data/") else "other entries"
            found[kind].append(range(start, start + entry.file_size))
        directory = archive.start_dir
    found["directory"] = [range(directory, size - COMMENT - END_SIZE)]
    found["last record"] = [range(size - COMMENT - END_SIZE, size - COMMENT)]
    found["mark of the checksum"] = [range(size - COMMENT, size - DIGEST)]
    found["checksum"] = [range(size - DIGEST, size)]
    return {name: [part for part in parts if part] for name, parts in found.items() if any(parts)}


def sampled(parts: list[range], count: int, draw: random.Random) -> list[int]:
    """Up to `count` positions of a class: the first and the last of its ranges' ends, and others at random."""
    every = [position for part in parts for position in part] if sum(map(len, parts)) <= count else None
    if every is not None:
        return every
    edges = [parts[0].start, parts[-1].stop - 1]
    weights = [len(part) for part in parts]
    return edges + [draw.choice(part) for part in draw.choices(parts, weights, k=count - len(edges))]


def damaged_files(path: Path, cuts: int, flips: int, draw: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """Damaged contents of a checkpoint, with the way and the class of place: `cut`, `bit flipped`, `page blanked`."""
    content = path.read_bytes()
    places = classes(path)
    for name, parts in places.items():
        for position in sampled(parts, cuts, draw):
            yield "cut", name, content[:position]
    owner = [(part, name) for name, parts in places.items() for part in parts]
    for _ in range(flips):
        position = draw.randrange(len(content))
        name = next((name for part, name in owner if position in part), "padding")
        yield "bit flipped", name, _flipped(content, position, draw)
    for name, parts in places.items():  # small classes are seldom hit by chance
        for position in sampled(parts, min(cuts, 20), draw):
            yield "bit flipped", name, _flipped(content, position, draw)
    pages = range(0, len(content), PAGE)
    for start in draw.sample(pages, min(len(pages), cuts)):
        blank = content[:start] + bytes(len(content[start : start + PAGE])) + content[start + PAGE :]
        if blank != content:
            yield "page blanked", "anywhere", blank


def _flipped(content: bytes, position: int, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << draw.randrange(8)
    return bytes(changed)


def run(settings: Namespace) -> None:
    """Drills and reports; raises Failure when a damaged file was loaded, or refused in another way than by one line."""
    if settings.cuts < 2 or settings.flips < 1:
        raise UsageError("a drill takes at least --cuts 2 and --flips 1")
    warm()
    draw = random.Random(settings.seed)
    rows: dict[tuple[str, str], list[int]] = {}
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="cifar-lit-drill-") as name:
        folder = Path(name)
        training = Forked(TRAINING, folder / "run", folder / "log.txt")
        if any(training.wait()):
            raise Failure(f"the training failed: {training.log.read_text()[-500:]}")
        run_folder = run_in(folder / "run" / "lightning_logs")
        assert run_folder is not None
        whole = run_folder / "checkpoints" / "last.ckpt"
        read_checkpoint(whole)
        size = whole.stat().st_size
        victim = folder / "last.ckpt"
        for way, place, content in damaged_files(whole, settings.cuts, settings.flips, draw):
            victim.write_bytes(content)
            counts = rows.setdefault((way, place), [0, 0, 0])
            counts[0] += 1
            started = time.perf_counter()
            counts[1] += _detected(victim)
            slowest = max(slowest, time.perf_counter() - started)
            counts[2] += _loads_in_torch(victim)
    report(settings, rows, size, slowest)


def _detected(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except Damaged as error:
        return "\n" not in str(error)
    return False


def _loads_in_torch(path: Path) -> bool:
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def report(settings: Namespace, rows: dict[tuple[str, str], list[int]], size: int, slowest: float) -> None:
    """Prints what was done and found, and writes the figures; raises Failure when something was not detected."""
    made, detected, silent = (sum(counts[column] for counts in rows.values()) for column in range(3))
    figures: dict[str, Any] = {
        "bench": "checkpoint",
        "command": "drill checkpoint",
        "settings": settings_of(settings),
        "bytes": size,
        "damaged": [
            {"way": way, "place": place, "files": counts[0], "detected": counts[1], "torch_alone_loads": counts[2]}
            for (way, place), counts in rows.items()
        ],
        "slowest_ms": round(1000 * slowest, 1),
        **headline(
            ("damaged checkpoints refused", detected, f"of {made}"),
            ("of these torch.load alone would have taken", silent, ""),
        ),
        "environment": environment(),
    }
    if settings.json:
        write_figures(Path(settings.json), figures)
    shown = [[f"{way}: {place}", *(f"{count:,}" for count in counts)] for (way, place), counts in rows.items()]
    total = ["all", *(f"{count:,}" for count in (made, detected, silent))]
    title = f"a checkpoint of {size:,} bytes, damaged {made:,} times; the slowest refusal took {1000 * slowest:.0f} ms"
    show(title, ("", "files", "refused", "torch.load alone takes"), [*shown, total], footer(figures))
    if detected < made:
        raise Failure(f"{made - detected} damaged checkpoints were loaded, or not refused by one line")
