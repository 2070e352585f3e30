"""Real processes killed in their first seconds, which are spent in imports: what they leave must not stop the next start."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import cifar_lit
from cifar_lit.drills.forked import STRANGE
from cifar_lit.drills.survivors import differences, run_in
from cifar_lit.errors import Failure

LIMIT = 120.0  # seconds after which a process counts as frozen


class Start(NamedTuple):
    """A kill that hit. seconds: after the start. imports: whether there was no run folder yet."""

    seconds: float
    imports: bool


class Real:
    """`python -m cifar_lit WORDS` in `folder`, which takes its temporary files and what it prints too."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in STRANGE}
        paths = [str(Path(cifar_lit.__file__).parent.parent), environment.get("PYTHONPATH", "")]
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        line = [sys.executable, "-m", "cifar_lit", *words]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(line, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.started = time.monotonic()

    @property
    def run_folders(self) -> list[Path]:
        """What there is of runs, whole or not."""
        return list((self.folder / "lightning_logs").glob("*"))

    def wait(self) -> int:
        """The exit code; raises Failure for a process that does not end in time. Nothing of its group is left."""
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Failure(f"a command did not end within {LIMIT:.0f} s; it said: {self.log.read_text()[-2000:]}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills it with all it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def seconds_to_start(words: Sequence[str], folder: Path) -> float:
    """How long a command takes until it has a run folder with a place for checkpoints, when its training begins."""
    real = Real(words, folder)
    try:
        while not any((run / "checkpoints").exists() for run in real.run_folders):
            if real.process.poll() is not None or time.monotonic() - real.started > LIMIT:
                raise Failure(f"a command made no run folder; it said: {real.log.read_text()[-2000:]}")
            time.sleep(0.005)
        return time.monotonic() - real.started
    finally:
        real.kill()


def drill_starts(words: Sequence[str], count: int, expected: Path, draw: random.Random, folder: Path) -> dict[str, Any]:
    """Kills `count` starts of a training at random moments until its first step, and starts each again, which must end well.

    expected: the run of the same training that nothing happened to. Returns figures; raises Failure when a second start
    fails, its run is not the same to the last bit, or something is left of the first one that nobody will remove.
    """
    first_step = seconds_to_start(words, folder / "timed")
    hits, unfinished = [], 0
    for number in range(count):
        place = folder / f"start-{number}"
        attempt = Real(words, place)
        with suppress(subprocess.TimeoutExpired):
            attempt.process.wait(draw.uniform(0.0, first_step))
        if attempt.process.poll() is not None:
            raise Failure(f"a command ended by itself: {attempt.log.read_text()[-800:]}")
        hits.append(Start(time.monotonic() - attempt.started, not attempt.run_folders))
        attempt.kill()
        again = Real(words, place)
        if again.wait():
            raise Failure(
                f"killed {hits[-1].seconds:.2f} s after its start, it does not start again: {again.log.read_text()[-800:]}"
            )
        run = run_in(place / "lightning_logs")
        wrong = differences(run, expected) if run else ["no run"]
        wrong += [f"{path.relative_to(place)} is left" for path in left_behind(place)]
        if wrong:
            raise Failure(f"killed {hits[-1].seconds:.2f} s after its start and started again: {', '.join(wrong[:5])}")
        unfinished += len(again.run_folders) - 1
        shutil.rmtree(place)
    return {
        "kills": len(hits),
        "within_seconds": round(first_step, 2),
        "in_imports": sum(hit.imports for hit in hits),
        "run_folders_without_a_checkpoint": unfinished,
        "identical": len(hits),
    }


def left_behind(place: Path) -> list[Path]:
    """What commands left in their folder beside runs and what they printed, and in their folder for temporary files."""
    beside = [path for path in place.iterdir() if path.name not in ("lightning_logs", "log.txt", "tmp")]
    return beside + [path for path in (place / "tmp").rglob("*") if path.is_file()]
