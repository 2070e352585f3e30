"""`cifar-lit drill ranks`: one of two processes is lost; the run must end soon, and go on as if nothing had been."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from rich.markup import escape

from cifar_lit.bench.report import environment, footer, headline, settings_of, show, write_figures
from cifar_lit.distributed.network import free_port
from cifar_lit.drills.forked import STRANGE
from cifar_lit.drills.kill import TRAINING as KILLED
from cifar_lit.drills.machines import TwoMachines, why_not
from cifar_lit.drills.signs import CRASH, FREEZE, HANG, KILL, VARIABLE
from cifar_lit.drills.survivors import differences, finished, run_in
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Trains in two processes, started by the Trainer, by torchrun, and on two machines (network namespaces, which take root). "
    "One of them crashes, is killed, frozen or cut off from the network, or the disk runs full. Measures how soon the whole run "
    "ends, looks for processes that are left, and goes on with it: the result must be that of an undisturbed run, bit for bit."
)
CUT, FULL = "network cut", "full disk"
OWN, TORCHRUN, MACHINES = "--devices 2", "torchrun", "two machines"
FAULTS = {OWN: (CRASH, KILL, FREEZE, HANG, FULL), TORCHRUN: (CRASH, KILL, FREEZE), MACHINES: (CRASH, KILL, FREEZE, CUT)}
TRAINING = [word.replace("phases.Announce", "signs.Signs") for word in KILLED]
EPOCHS = 3
START = 120.0  # seconds within which a training must be in its second epoch
MARK = "CIFAR_LIT_DRILL_RUN"  # in the environment of all that a case starts, to find what is left of it
AFTER = 5.0  # seconds after the end in which whatever is left may still go
DISK = 3 << 20  # bytes of the disk that runs full


class Case(NamedTuple):
    """way: how the two processes are started. fault, rank: what happens, and to which."""

    way: str
    fault: str
    rank: int


class Outcome(NamedTuple):
    """seconds: to the end of the last process that was started. codes: of those. left: processes that had to be killed.

    said: the lines on stderr that are ours. missed: in what the run that was gone on with differs from an undisturbed one.
    """

    seconds: float
    codes: list[int]
    left: int
    said: str
    missed: list[str]


class Started:
    """A training in two processes, from the outside."""

    def __init__(self, way: str, words: list[str], folder: Path, machines: TwoMachines | None, signs: Path | None) -> None:
        self.mark = uuid.uuid4().hex
        self.log = folder / "err.txt"
        own = {**_clean(), "OMP_NUM_THREADS": "1", MARK: self.mark, **({VARIABLE: str(signs)} if signs else {})}
        module = ["-m", "cifar_lit", *words]
        lines: list[tuple[list[str], dict[str, str]]]
        if way == MACHINES:
            assert machines is not None
            meet = {"MASTER_ADDR": machines.address(0), "MASTER_PORT": str(free_port())}
            flags = ["--nodes", "2", "--devices", "1"]
            lines = [
                ([*machines.within(node), sys.executable, *module, *flags], {**meet, "NODE_RANK": str(node)}) for node in (0, 1)
            ]
        elif way == TORCHRUN:
            lines = [([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *module], {})]
        else:
            lines = [([sys.executable, *module, "--devices", "2"], {})]
        with self.log.open("a") as log:
            self.processes = [
                subprocess.Popen(line, cwd=folder, env={**own, **more}, stdout=log, stderr=log, start_new_session=True)
                for line, more in lines
            ]

    def codes(self, limit: float) -> list[int]:
        """The exit codes; raises Failure when the processes do not end in time."""
        deadline = time.monotonic() + limit
        try:
            return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.clear(0.0)
            raise Failure(f"a training did not end within {limit:.0f} s; it said: {self.log.read_text()[-2000:]}") from None

    def clear(self, seconds: float) -> int:
        """Waits that long for everything that was started to be gone, kills the rest and returns how many processes it was."""
        deadline = time.monotonic() + seconds
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
        return len(left)


def marked(mark: str) -> list[int]:
    """The processes with this mark in their environment that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            alive = entry.name.isdecimal() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def carry_out(case: Case, folder: Path, machines: TwoMachines | None, expected: Path, limit: float) -> Outcome:
    """A training that meets a fault, and is gone on with; raises Failure when one does not end, or does not get so far."""
    signs = folder / "signs"
    signs.mkdir(parents=True)
    with _disk(folder / "lightning_logs", case.fault == FULL):
        words = [*TRAINING, "--epochs", str(EPOCHS), "--rank-timeout", str(limit)]
        training = Started(case.way, words, folder, machines, signs)
        deadline = time.monotonic() + START
        while not all((signs / f"ready-{rank}").exists() for rank in (0, 1)):
            if time.monotonic() > deadline or any(process.poll() is not None for process in training.processes):
                training.clear(0.0)
                raise Failure(f"a training did not begin: {training.log.read_text()[-2000:]}")
            time.sleep(0.02)
        started = time.monotonic()
        if case.fault == CUT:
            assert machines is not None
            machines.unplug(case.rank)
        elif case.fault == FULL:
            _fill(folder / "lightning_logs" / "filler")
        else:
            (signs / "new").write_text(case.fault)
            (signs / "new").rename(signs / f"fault-{case.rank}")
        codes = training.codes(2 * limit + START)
        seconds = time.monotonic() - started
        left = training.clear(AFTER)
        said = training.log.read_text()
        if case.fault == CUT:
            assert machines is not None
            machines.plug(case.rank)
        (folder / "lightning_logs" / "filler").unlink(missing_ok=True)
        again = Started(case.way, ["train", "--resume"], folder, machines, None)
        ended = again.codes(START)
        again.clear(AFTER)
        run = run_in(folder / "lightning_logs")
        missed = differences(run, expected) if run is not None and finished(run) else [f"ended with {ended}: {_last(again.log)}"]
        return Outcome(round(seconds, 2), codes, left, _ours(said), missed)


def _last(log: Path) -> str:
    return log.read_text().strip().rpartition("\n")[2]


def _ours(text: str) -> str:
    """What our ranks said of the fault: their lines, in one."""
    lines = [line for line in text.splitlines() if "cifar-lit: " in line]
    return " | ".join(dict.fromkeys(lines))


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in STRANGE}


@contextmanager
def _disk(folder: Path, small: bool) -> Iterator[None]:
    """A small disk of its own at `folder`, if it is wanted."""
    if not small:
        yield
        return
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _fill(filler: Path) -> None:
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this drill."""
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of silence after which a rank counts as lost")
    parser.add_argument("--ways", type=list[str], default=list(FAULTS), help="how the processes are started")
    parser.add_argument("--cases", type=int | None, default=None, help="only so many, spread over all")


SHORT: dict[str, Any] = {"limit": 3.0, "ways": [OWN], "cases": 2}


def chosen(ways: list[str], count: int | None, root: bool) -> list[Case]:
    """The cases of a drill; without root no disk can be made to run full. Who writes nothing does not feel a full disk."""
    every = [Case(way, fault, rank) for way in ways for fault in FAULTS[way] for rank in (1, 0)]
    every = [case for case in every if case.fault != FULL or (root and case.rank == 0)]
    if count is None or count >= len(every):
        return every
    return [every[round((number + 0.5) * len(every) / count)] for number in range(count)]


def run(settings: Namespace) -> None:
    """Drills and reports; raises Failure when a run did not end, was not gone on with, or left processes behind."""
    if not sys.platform.startswith("linux"):
        raise UsageError("this drill reads /proc: run it on Linux")
    if unknown := [way for way in settings.ways if way not in FAULTS]:
        raise UsageError(f"no way to start is called {unknown[0]!r}: there are {', '.join(FAULTS)}")
    root = os.geteuid() == 0
    lacking = {MACHINES: why_not()} if MACHINES in settings.ways else {}
    ways = [way for way in settings.ways if not lacking.get(way)]
    outcomes: dict[Case, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="cifar-lit-drill-") as name:
        expected = _undisturbed(Path(name) / "whole")
        for number, case in enumerate(chosen(ways, settings.cases, root)):
            folder = Path(name) / str(number)
            if case.way == MACHINES:
                with TwoMachines() as machines:
                    outcomes[case] = carry_out(case, folder, machines, expected, settings.limit)
            else:
                outcomes[case] = carry_out(case, folder, None, expected, settings.limit)
            shutil.rmtree(folder, ignore_errors=True)
    skipped = [f"not tried: {way}, as {why}" for way, why in lacking.items() if why]
    if OWN in ways and not root:
        skipped.append(f"not tried: {FULL}, as a disk of its own takes root")
    report(settings, outcomes, skipped)


def _undisturbed(folder: Path) -> Path:
    folder.mkdir()
    training = Started(OWN, [*TRAINING, "--epochs", str(EPOCHS)], folder, None, None)
    codes = training.codes(START)
    found = run_in(folder / "lightning_logs")
    if any(codes) or found is None:
        raise Failure(f"an undisturbed training failed: {training.log.read_text()[-2000:]}")
    return found


def report(settings: Namespace, outcomes: dict[Case, Outcome], skipped: list[str]) -> None:
    """Prints a row a case, and writes the figures; raises Failure for what should not have been."""
    slowest = max(outcome.seconds for outcome in outcomes.values())
    left = sum(outcome.left for outcome in outcomes.values())
    resumed = sum(not outcome.missed for outcome in outcomes.values())
    figures: dict[str, Any] = {
        "bench": "ranks",
        "command": "drill ranks",
        "settings": settings_of(settings),
        "cases": [{**case._asdict(), **outcome._asdict()} for case, outcome in outcomes.items()],
        "skipped": skipped,
        **headline(
            ("slowest end of a run that lost a rank", slowest, "s"),
            ("processes left behind", left, ""),
            ("runs gone on with, identical to the last bit", resumed, f"of {len(outcomes)}"),
        ),
        "environment": environment(),
    }
    if settings.json:
        write_figures(Path(settings.json), figures)
    rows = [
        [
            *(case.way, case.fault, str(case.rank), f"{outcome.seconds:.1f}", ", ".join(map(str, outcome.codes))),
            *(str(outcome.left), "no" if outcome.missed else "yes", escape(outcome.said.partition(". The run was ended")[0])),
        ]
        for case, outcome in outcomes.items()
    ]
    columns = ("started by", "fault", "rank", "s to the end", "exit codes", "left", "gone on with", "said")
    show("a rank is lost", columns, rows, *skipped, footer(figures))
    wrong = {case: outcome for case, outcome in outcomes.items() if outcome.left or outcome.missed or 0 in outcome.codes}
    if wrong:
        texts = [f"{', '.join(map(str, case))} ({'; '.join(outcome.missed[:4])})" for case, outcome in wrong.items()]
        raise Failure(f"not as it should be: {' · '.join(texts)}")
