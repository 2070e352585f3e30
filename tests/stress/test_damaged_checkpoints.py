"""A checkpoint is damaged in every way that a disk or a copy can: none may be loaded with other contents than it had."""

from __future__ import annotations

import random
import struct
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from stress.compare_runs import comparable, run_in, unequal
from stress.forked import SMALL_TRAINING, Forked

from cifar_lit.cli.errors import explain_error
from cifar_lit.training.checkpoint import read_checkpoint

PAGE = 4096
REFUSED, HARMLESS, HARMFUL = "refused", "loaded with what it held", "loaded with something else"


def classes(path: Path) -> dict[str, list[range]]:
    """The classes of byte positions of a checkpoint, which is a zip archive, each as ranges of positions."""
    content, places = path.read_bytes(), defaultdict(list)
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            sizes = struct.unpack_from("<HH", content, entry.header_offset + 26)  # PKWARE's layout of a local header
            start = entry.header_offset + 30 + sum(sizes)  # the padding is in the extra field
            places["headers of entries"].append(range(entry.header_offset, start))
            inner = entry.filename.partition("/")[2]
            kind = "pickled structure" if inner == "data.pkl" else "tensors" if inner.startswith("data/") else "other entries"
            places[kind].append(range(start, start + entry.file_size))
        end = content.rindex(b"PK\x05\x06")  # the last record, with its comment
        places["directory"], places["last record"] = [range(archive.start_dir, end)], [range(end, len(content))]
    return {name: [part for part in parts if part] for name, parts in places.items() if any(parts)}


def sampled(parts: list[range], count: int, draw: random.Random) -> list[int]:
    """Up to `count` positions of a class: the first and the last of its ranges' ends, and others at random."""
    if sum(map(len, parts)) <= count:
        return [position for part in parts for position in part]
    edges = [parts[0].start, parts[-1].stop - 1]
    return edges + [draw.choice(part) for part in draw.choices(parts, list(map(len, parts)), k=count - len(edges))]


def damaged_contents(path: Path, cuts: int, flips: int, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damaged contents of a checkpoint, each with the way and the class of place."""
    content = path.read_bytes()

    def flipped(position: int) -> bytes:
        return content[:position] + bytes([content[position] ^ 1 << draw.randrange(8)]) + content[position + 1 :]

    for name, parts in classes(path).items():
        for position in sampled(parts, cuts, draw):
            yield f"cut: {name}", content[:position]
        for position in sampled(parts, min(cuts, 20), draw):  # small classes are seldom hit by chance
            yield f"bit flipped: {name}", flipped(position)
    for _ in range(flips):
        yield "bit flipped: anywhere", flipped(draw.randrange(len(content)))
    pages = range(0, len(content), PAGE)
    for start in draw.sample(pages, min(len(pages), cuts)):
        blank = content[:start] + bytes(len(content[start : start + PAGE])) + content[start + PAGE :]
        if blank != content:
            yield "page blanked", blank


def outcome(path: Path, whole: Any) -> str:
    """What reading a file that may be damaged comes to, `whole` being the contents that it had."""
    try:
        contents = read_checkpoint(path)
    except Exception as error:
        line, code = explain_error(error)
        assert code in (1, 2) and "\n" not in line and "Error:" not in line, line
        return REFUSED
    return HARMFUL if unequal(comparable(contents), whole) else HARMLESS


def damage(cuts: int, flips: int, folder: str) -> dict[str, Any]:
    """Counts of outcomes by way and place, of files that torch alone takes, and the seconds of the slowest refusal."""
    place = Path(folder)
    Forked(SMALL_TRAINING, place / "run", place / "log.txt").finish()
    run = run_in(place / "run" / "lightning_logs")
    assert run is not None
    checkpoint, victim = run / "checkpoints" / "last.ckpt", place / "last.ckpt"
    whole = comparable(read_checkpoint(checkpoint))
    counts: dict[str, Counter[str]] = {}
    slowest, torch_takes = 0.0, 0
    for kind, content in damaged_contents(checkpoint, cuts, flips, random.Random(0)):
        victim.write_bytes(content)
        started = time.perf_counter()
        counts.setdefault(kind, Counter())[outcome(victim, whole)] += 1
        slowest = max(slowest, time.perf_counter() - started)
        try:
            torch.load(victim, map_location="cpu", weights_only=True)
            torch_takes += 1
        except Exception:
            continue
    return {"counts": counts, "torch_alone_loads": torch_takes, "slowest_ms": round(1000 * slowest, 1)}


def test_no_damaged_checkpoint_is_loaded_with_other_contents(
    forking: Callable[..., Any], long_form: bool, write_counts: Callable[..., None], tmp_path: Path
) -> None:
    cuts, flips = (100, 1000) if long_form else (5, 60)
    found = forking(damage, cuts=cuts, flips=flips, folder=str(tmp_path))
    counts = found["counts"]
    total = sum((Counter(one) for one in counts.values()), Counter[str]())
    files = total.total()
    headline = {f"damaged checkpoints {name}": total[name] for name in (REFUSED, HARMLESS, HARMFUL)}
    headline["of these torch.load alone takes"] = found["torch_alone_loads"]
    write_counts({**found, "headline": headline, "unit": dict.fromkeys(headline, f"of {files}")})
    assert total[HARMFUL] == 0, {kind: one for kind, one in counts.items() if HARMFUL in one}
    assert counts["bit flipped: tensors"] == {REFUSED: sum(counts["bit flipped: tensors"].values())}
    assert found["torch_alone_loads"] > 0  # so that there was something to detect
    assert {kind.partition(":")[0] for kind in counts} == {"cut", "bit flipped", "page blanked"}
