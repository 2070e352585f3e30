"""A process of its own that gives a reader inputs for some seconds, and watches what the reader does with each."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unicodedata import category
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from security.sandbox import PATIENCE, PROGRAMS, in_a_fork, memory_of

from cifar_lit.cli import main
from cifar_lit.cli.errors import explain_error
from cifar_lit.errors import Failure, InvalidFileError, UsageError
from cifar_lit.inference.serve.bodies import RequestError

# what has failed and is not mended yet is tried first; it is kept from one CI run to the next
CORPUS = Path(__file__).parent / "corpus"
REFUSALS = (UsageError, Failure, InvalidFileError, RequestError)
MAX_CPU_SECONDS, MAX_MEGABYTES = 4.0, 400.0  # for one input
ADDRESSES = 8 << 30  # bytes of addresses beyond those at the start
ROUND = 200  # inputs between two looks at the clock

OBEYED = ("Cc", "Cs", "Zl", "Zp")  # what a terminal obeys, or what ends a line: by Unicode's categories
BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # turns letters round
# Audit events that write, with the places of the paths among their arguments.
WRITES = {
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "os.setxattr": (0,),
}  # fmt: skip
FOLLOWED = (
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.utime",
    "os.setxattr",
)  # also where the last part of the path is a link
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Harm(AssertionError):
    """What a reader did and must not do."""


class Limit(BaseException):
    """An input took too long; no reader catches it."""


@dataclass
class Reader:
    """What reads something from outside.

    Args:
        inputs: what it is given.
        read: reads one input, in a folder of its own.
        prepare: puts files into that folder before.
        found: inputs that once did harm, tried each time.
        seconds: of the CPU that one input may take.
    """

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], object]
    prepare: Callable[[], object] = lambda: None
    found: Sequence[Any] = ()
    seconds: float = MAX_CPU_SECONDS


class Outcome(NamedTuple):
    """How many inputs were tried, the most that one took, and what went wrong, empty if nothing did."""

    inputs: int = 0
    cpu_seconds: float = 0.0
    megabytes: float = 0.0
    failure: str = "the process died"


class Watch:
    """Refuses what no reader may do: to write outside of `folder`, to start programs, to call other machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.active = False
        self.harm: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        harm = ""
        if event in PROGRAMS:
            harm = f"{event} of {arguments}"
        elif event == "open" and isinstance(arguments[0], str | bytes) and (arguments[2] or 0) & CHANGING:
            harm = self._outside(event, arguments[0], follow=not (arguments[2] or 0) & (os.O_NOFOLLOW | os.O_EXCL))
        elif event in WRITES:
            descriptor = -1 if event in ("os.truncate", "os.setxattr") else arguments[-1]
            for place in WRITES[event]:
                harm = harm or self._outside(event, arguments[place], descriptor, event in FOLLOWED)
        elif event in ("socket.connect", "socket.getaddrinfo"):
            harm = f"{event} of {arguments}"
        if harm:
            self.harm.append(harm)
            raise PermissionError(harm)

    def _outside(self, event: str, path: Any, descriptor: Any = -1, follow: bool = True) -> str:
        """What is done to a path, if that is not in the folder."""
        if isinstance(path, int) or os.fspath(path) in ("/dev/null", b"/dev/null"):
            return ""
        place = Path(os.fsdecode(path))
        if isinstance(descriptor, int) and descriptor >= 0:
            place = Path(f"/proc/self/fd/{descriptor}").readlink() / place
        with suppress(ValueError):  # a NUL in it: there is no such file
            real = Path(os.path.realpath(place if follow else place.parent))
            if not real.is_relative_to(self.folder):
                return f"{event} of {str(place)!r}, which is in {str(real)!r}"
        return ""


def refused_or_read(read: Callable[[], Any]) -> Any:
    """What `read` gives, None where it refuses; raises Harm for any other exception, and for a refusal of several lines."""
    try:
        return read()
    except Exception as refusal:
        line, _ = explain_error(refusal)
        if not _foreseen(refusal):
            raise
        if any(category(letter) in OBEYED for letter in line):
            raise Harm(f"a refusal that is no line: {line!r}") from refusal
        return None


def _foreseen(error: BaseException) -> bool:
    """Whether an exception is a refusal: one of ours, of Lightning's, or one that the program has words for."""
    if isinstance(error, (*REFUSALS, MisconfigurationException)):
        return True
    if isinstance(error, ValueError) and "the checkpoint does not fit" not in explain_error(error)[0]:
        return "lightning" in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts
    return not explain_error(error)[0].endswith("(--debug shows where)")


def typed(*words: str) -> int:
    """Runs a command line, which must end with 0, or with 1 or 2 and one line at its end; returns the code."""
    out, err, errors = StringIO(), StringIO(), []
    with redirect_stdout(out), redirect_stderr(err), patch("cifar_lit.cli.errors.explain_error") as explain:
        explain.side_effect = lambda error: errors.append(error) or explain_error(error)
        code = main([*words])
    lines = err.getvalue().splitlines()
    if code not in (0, 1, 2) or (code and not (lines and lines[-1].startswith("cifar-lit: "))):
        raise Harm(f"exit code {code} and {lines}")
    for error in errors:
        if not _foreseen(error):
            raise Harm(f"nobody thought of this: {lines}") from error
    controls = {
        letter for letter in out.getvalue() + err.getvalue() if category(letter) in OBEYED or letter in BIDI
    } - {"\n"}
    if controls:
        raise Harm(f"printed {controls}")
    return code


def fuzz(name: str, reader: Reader, folder: Path, seconds: float, first: int) -> Outcome:
    """Gives a reader the inputs from the seeds `first` on for so many seconds, in a process that works in `folder`."""
    folder.mkdir()
    log = folder.with_suffix(".log")

    def work() -> Outcome:
        with log.open("a") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            faulthandler.enable(2)
            return _fuzzed(name, reader, folder, seconds, first)

    # what was found is also made smaller
    outcome = in_a_fork(folder.with_suffix(".json"), work, seconds + 10 * PATIENCE)
    return Outcome(*outcome) if outcome else Outcome(failure=f"the process died or hung: {log.read_text()[-3000:]}")


def _fuzzed(name: str, reader: Reader, folder: Path, seconds: float, first: int) -> Outcome:
    os.chdir(folder)
    sys.dont_write_bytecode = True
    os.environ |= {
        "CIFAR_LIT_CACHE": str(folder / "cache"),
        "TMPDIR": str(folder),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
    }
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_of("VmSize") + ADDRESSES,) * 2)
    reader.prepare()
    watch, began = Watch(folder), time.monotonic()
    inputs, most_seconds, most_megabytes, failed = 0, 0.0, 0.0, False

    def read(value: Any) -> None:
        nonlocal inputs, most_seconds, most_megabytes
        inputs += 1
        Path("/proc/self/clear_refs").write_text("5")  # the highest use so far is forgotten
        before, started = memory_of("VmRSS"), time.process_time()
        print(repr(value)[:3000], file=sys.__stderr__, flush=True)  # in the log, should the process die of it
        with _limits(reader.seconds):
            watch.active = True
            try:
                reader.read(value)
            finally:
                watch.active = False
        used, memory = time.process_time() - started, (memory_of("VmHWM") - before) / 1e6
        most_seconds, most_megabytes = max(most_seconds, used), max(most_megabytes, memory)
        os.truncate(folder.with_suffix(".log"), 0)
        harm, watch.harm[:] = [*watch.harm], []
        if harm or (folder / "ran").exists():
            raise Harm(f"{harm or 'code ran'}")
        if used > reader.seconds or memory > MAX_MEGABYTES:
            raise Harm(f"it took {used:.1f} s of the CPU and {memory:.0f} MB")

    def one(value: Any) -> None:
        nonlocal failed
        if time.monotonic() - began > seconds and not failed:
            return  # the rest of a round, but for what makes an input smaller
        try:
            read(value)
        except Limit as limit:
            failed = True
            raise Harm(f"it was stopped: {limit}") from limit
        except BaseException:
            failed = True
            raise

    one.__name__ = one.__qualname__ = name  # what its failures are stored under
    test = given(value=reader.inputs)(lambda value: one(value))
    for value in reader.found:
        test = example(value=value)(test)
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    if reader.seconds <= MAX_CPU_SECONDS:  # of others, to make an input smaller would take minutes
        phases.append(Phase.shrink)
    test = settings(
        max_examples=ROUND,
        deadline=None,
        derandomize=False,
        phases=phases,
        report_multiple_bugs=False,
        database=DirectoryBasedExampleDatabase(CORPUS / name.replace(" ", "-")),
        suppress_health_check=list(HealthCheck),
    )(test)
    try:
        for number in count(first):
            seed(number)(test)()
            if time.monotonic() - began > seconds:
                break
        text = ""
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", []))  # the input
        error.__notes__ = []
        text = "".join(traceback.format_exception(error))[-4000:] + notes[:4000]
    return Outcome(inputs, round(most_seconds, 3), round(most_megabytes, 1), text)


@contextmanager
def _limits(seconds: float) -> Any:
    """Stops what is within after so many seconds of the CPU, or where it waits for something that does not come."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Limit("it took too long" if number == signal.SIGPROF else "it waits for something")

    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_PROF, 2 * seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
