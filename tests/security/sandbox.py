"""Run a reader in a forked process and measure its CPU time, its memory and the programs that it starts."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Limits of CPU time and memory for one file. Measured: at most 0.7 s, and 1.7 to 2.5 s on a busy CPU.
SECONDS, MEGABYTES = 4.0, 512.0
PATIENCE = 60  # seconds of wall-clock time until a reader counts as hanging
ADDRESSES = 32 << 30  # bytes of address space beyond those at the start
PROGRAMS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
)  # audit events that start programs
# A recipe that trains in a second.
SMALL = """seed_everything: 3
trainer: {accelerator: cpu, max_epochs: 1, precision: 32-true}
model: {net: lenet, lr: 0.05}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 200, val_size: 40, batch_size: 32}
"""


@dataclass(frozen=True)
class Answer:
    """The result of a reader.

    Args:
        code: exit code; None if the reader hung or died.
        lines: its lines on stderr.
        cpu_seconds: CPU time of its process.
        megabytes: peak memory of its process, beyond the memory at the start.
        ran: signs that code of the file was executed.
        out: its stdout.
    """

    code: int | None
    lines: list[str]
    cpu_seconds: float = 0.0
    megabytes: float = 0.0
    ran: list[str] = field(default_factory=list)
    out: str = ""

    @property
    def harmless(self) -> bool:
        """Whether the reader stayed within its limits and executed nothing."""
        return not self.ran and self.cpu_seconds < SECONDS and self.megabytes < MEGABYTES

    @property
    def refused(self) -> bool:
        """Whether the file was refused with one line and within the limits."""
        one_line = len(self.lines) == 1 and self.lines[0].startswith("cifar-lit: ")
        return self.harmless and self.code in (1, 2) and one_line


def read_in_fork(folder: Path, reader: Callable[[], int]) -> Answer:
    """Run `reader`, which returns an exit code, in a forked process in `folder`."""
    answer = run_in_fork(folder / "report.json", lambda: _watched(folder, reader), PATIENCE)
    if answer is None:
        return Answer(None, ["it hung or died"])
    return Answer(**{**answer, "ran": answer["ran"] + ["a trace was left"] * (folder / "ran").exists()})


def run_in_fork(report: Path, work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of `work`, which a forked process writes to `report`; None if it dies or times out."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            report.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.005)
    finally:
        os.kill(process, signal.SIGKILL)  # not reaped yet, so its id is not reused
        os.waitpid(process, 0)
    if not report.exists():
        return None
    answer = json.loads(report.read_text())
    report.unlink()
    return answer


def _watched(folder: Path, reader: Callable[[], int]) -> dict[str, Any]:
    os.chdir(folder)
    os.environ["CIFAR_LIT_CACHE"] = str(folder / "cache")
    sys.path.insert(0, str(folder))  # the worst case: modules from the run's folder can be imported
    torch.set_num_threads(1)
    events: set[str] = set()
    sys.addaudithook(lambda event, _: events.add(event) if event in PROGRAMS else None)
    before = memory_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
    resource.setrlimit(resource.RLIMIT_AS, (memory_of("VmSize") + ADDRESSES,) * 2)
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()
    with redirect_stdout(out), redirect_stderr(err):
        code = reader()
    return {
        "code": code,
        "lines": [line for line in err.getvalue().splitlines() if not line.startswith("decoding images")],
        "cpu_seconds": round(time.process_time() - start, 3),
        "megabytes": round((memory_of("VmHWM") - before) / 1e6, 1),
        "ran": sorted(events),
        "out": out.getvalue(),
    }


def memory_of(name: str) -> int:
    """Return a figure in bytes from /proc/self/status."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
