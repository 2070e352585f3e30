"""Fuzz a reader in a forked process for some seconds and watch what it does with each input."""

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
from security.sandbox import PATIENCE, PROGRAMS, memory_of, run_in_fork
from starlette.exceptions import HTTPException

from cifar_lit.cli import main
from cifar_lit.cli.errors import explain_error
from cifar_lit.errors import Failure, InvalidFileError, UsageError

# Inputs that failed and are not fixed yet; they are tried first, and CI caches them between runs.
CORPUS = Path(__file__).parent / "corpus"
REFUSALS = (UsageError, Failure, InvalidFileError, HTTPException)
MAX_CPU_SECONDS, MAX_MEGABYTES = 4.0, 400.0  # for one input
ADDRESSES = 8 << 30  # bytes of address space beyond those at the start
ROUND = 200  # inputs between two checks of the clock

OBEYED = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories of terminal controls and line breaks
BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # reverse text
# Audit events that write, with the positions of the paths in their arguments.
WRITES = {
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "os.setxattr": (0,),
}  # fmt: skip
FOLLOWED = ("os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr")  # events that follow a final link
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Harm(AssertionError):
    """A reader did something forbidden."""


class Limit(BaseException):
    """An input took too long. A BaseException, so that no reader catches it."""


@dataclass
class Reader:
    """A reader of untrusted input.

    Args:
        inputs: strategy that generates its inputs.
        read: reads one input, in the reader's own folder.
        prepare: writes files to that folder first.
        found: inputs that once did harm; tried every time.
        seconds: limit of CPU time for one input.
    """

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], object]
    prepare: Callable[[], object] = lambda: None
    found: Sequence[Any] = ()
    seconds: float = MAX_CPU_SECONDS


class Outcome(NamedTuple):
    """Number of inputs, the maximum cost of one, and the failure (empty if there is none)."""

    inputs: int = 0
    cpu_seconds: float = 0.0
    megabytes: float = 0.0
    failure: str = "the process died"


class Watch:
    """Audit hook that refuses writing outside `folder`, starting programs and opening connections."""

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
            for position in WRITES[event]:
                harm = harm or self._outside(event, arguments[position], descriptor, event in FOLLOWED)
        elif event in ("socket.connect", "socket.getaddrinfo"):
            harm = f"{event} of {arguments}"
        if harm:
            self.harm.append(harm)
            raise PermissionError(harm)

    def _outside(self, event: str, path: Any, descriptor: Any = -1, follow: bool = True) -> str:
        """Describe the event if the path is not in the folder, else return an empty text."""
        if isinstance(path, int) or os.fspath(path) in ("/dev/null", b"/dev/null"):
            return ""
        target = Path(os.fsdecode(path))
        if isinstance(descriptor, int) and descriptor >= 0:
            target = Path(f"/proc/self/fd/{descriptor}").readlink() / target
        with suppress(ValueError):  # a path with a NUL does not exist
            real = Path(os.path.realpath(target if follow else target.parent))
            if not real.is_relative_to(self.folder):
                return f"{event} of {str(target)!r}, which is in {str(real)!r}"
        return ""


def refused_or_read(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or None if it refuses. Raise Harm for a refusal of several lines."""
    try:
        return read()
    except Exception as refusal:
        line, _ = explain_error(refusal)
        if not _foreseen(refusal):
            raise
        if any(category(letter) in OBEYED for letter in line):
            raise Harm(f"a refusal of more than one line: {line!r}") from refusal
        return None


def _foreseen(error: BaseException) -> bool:
    """Whether an exception is a refusal: ours, Lightning's, or one that `explain_error` describes."""
    if isinstance(error, (*REFUSALS, MisconfigurationException)):
        return True
    if isinstance(error, ValueError) and "the checkpoint does not fit" not in explain_error(error)[0]:
        return "lightning" in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts
    return not explain_error(error)[0].endswith("(--debug shows where)")


def run_line(*words: str) -> int:
    """Run a command line and return its exit code: 0, or 1 or 2 with one line of error at the end."""
    out, err, errors = StringIO(), StringIO(), []
    with redirect_stdout(out), redirect_stderr(err), patch("cifar_lit.cli.errors.explain_error") as explain:
        explain.side_effect = lambda error: errors.append(error) or explain_error(error)
        code = main([*words])
    lines = err.getvalue().splitlines()
    if code not in (0, 1, 2) or (code and not (lines and lines[-1].startswith("cifar-lit: "))):
        raise Harm(f"exit code {code} and {lines}")
    for error in errors:
        if not _foreseen(error):
            raise Harm(f"an unexpected exception: {lines}") from error
    printed = set(out.getvalue() + err.getvalue()) - {"\n"}
    controls = {letter for letter in printed if category(letter) in OBEYED or letter in BIDI}
    if controls:
        raise Harm(f"printed {controls}")
    return code


def fuzz(name: str, reader: Reader, folder: Path, seconds: float, first: int) -> Outcome:
    """Fuzz a reader for some seconds in a forked process in `folder`, with random seeds from `first` on."""
    folder.mkdir()
    log = folder.with_suffix(".log")

    def work() -> Outcome:
        with log.open("a") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            faulthandler.enable(2)
            return _fuzzed(name, reader, folder, seconds, first)

    timeout = seconds + 10 * PATIENCE  # a failing input is shrunk, too
    outcome = run_in_fork(folder.with_suffix(".json"), work, timeout)
    return Outcome(*outcome) if outcome else Outcome(failure=f"the process died or hung: {log.read_text()[-3000:]}")


def _fuzzed(name: str, reader: Reader, folder: Path, seconds: float, first: int) -> Outcome:
    os.chdir(folder)
    sys.dont_write_bytecode = True
    os.environ |= {"CIFAR_LIT_CACHE": f"{folder}/cache", "TMPDIR": f"{folder}", "MPLCONFIGDIR": f"{folder}/matplotlib"}
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_of("VmSize") + ADDRESSES,) * 2)
    reader.prepare()
    watch = Watch(folder)
    end = time.monotonic() + seconds
    inputs, most_seconds, most_megabytes, failed = 0, 0.0, 0.0, False

    def read(value: Any) -> None:
        nonlocal inputs, most_seconds, most_megabytes
        inputs += 1
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
        before, start = memory_of("VmRSS"), time.process_time()
        print(repr(value)[:3000], file=sys.__stderr__, flush=True)  # in the log if the process dies
        with _limits(reader.seconds):
            watch.active = True
            try:
                reader.read(value)
            finally:
                watch.active = False
        used, memory = time.process_time() - start, (memory_of("VmHWM") - before) / 1e6
        most_seconds, most_megabytes = max(most_seconds, used), max(most_megabytes, memory)
        os.truncate(folder.with_suffix(".log"), 0)
        harm = watch.harm.copy()
        watch.harm.clear()
        if harm or (folder / "ran").exists():
            raise Harm(f"{harm or 'code ran'}")
        if used > reader.seconds or memory > MAX_MEGABYTES:
            raise Harm(f"it took {used:.1f} s of the CPU and {memory:.0f} MB")

    def one(value: Any) -> None:
        nonlocal failed
        if time.monotonic() > end and not failed:
            return  # skip the rest of a round, but not the shrinking of a failing input
        try:
            read(value)
        except Limit as limit:
            failed = True
            raise Harm(f"it was stopped: {limit}") from limit
        except BaseException:
            failed = True
            raise

    one.__name__ = one.__qualname__ = name  # the key of its failures in the corpus
    test = given(value=reader.inputs)(lambda value: one(value))
    for value in reader.found:
        test = example(value=value)(test)
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    if reader.seconds <= MAX_CPU_SECONDS:  # shrinking takes minutes for slower readers
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
            if time.monotonic() > end:
                break
        text = ""
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", []))  # the input
        error.__notes__ = []
        text = "".join(traceback.format_exception(error))[-4000:] + notes[:4000]
    return Outcome(inputs, round(most_seconds, 3), round(most_megabytes, 1), text)


@contextmanager
def _limits(seconds: float) -> Any:
    """Interrupt the block after twice `seconds` of CPU time, or after PATIENCE seconds of wall-clock time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Limit("it took too long" if number == signal.SIGPROF else "it hangs")

    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_PROF, 2 * seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
