"""A process of its own in which a file is read, watched for what it takes and for programs that it starts."""

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

# what a file may take of the CPU and the memory; measured: 0.7 s at most, 1.7 to 2.5 on a CPU with busy caches
SECONDS, MEGABYTES = 4.0, 512.0
PATIENCE = 60  # seconds of the clock until a reader counts as hanging
ADDRESSES = 32 << 30  # bytes of addresses that a reader may ask for beyond what it starts with
PROGRAMS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
)  # audit events of starting a program
# a recipe that trains in a second, as it lies in the folder of each reader
SMALL = """seed_everything: 3
trainer: {accelerator: cpu, max_epochs: 1, precision: 32-true}
model: {net: lenet, lr: 0.05}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 200, val_size: 40, batch_size: 32}
"""


@dataclass(frozen=True)
class Answer:
    """What a reader gave.

    code: the exit code, None where the reader hung or died. lines: on stderr. cpu_seconds: those of the process itself.
    megabytes: its memory at the highest, beyond what it started with. ran: signs that code of the file ran. out: its stdout.
    """

    code: int | None
    lines: list[str]
    cpu_seconds: float = 0.0
    megabytes: float = 0.0
    ran: list[str] = field(default_factory=list)
    out: str = ""

    @property
    def harmless(self) -> bool:
        """Whether it came in time, within the memory, and nothing ran."""
        return not self.ran and self.cpu_seconds < SECONDS and self.megabytes < MEGABYTES

    @property
    def refused(self) -> bool:
        """Whether the file was refused in one line, cheaply."""
        return (
            self.harmless and self.code in (1, 2) and len(self.lines) == 1 and self.lines[0].startswith("cifar-lit: ")
        )


def read_apart(folder: Path, reader: Callable[[], int]) -> Answer:
    """What `reader`, which returns an exit code, gives in a process that is forked off and works in `folder`."""
    answer = in_a_fork(folder / "report.json", lambda: _watched(folder, reader), PATIENCE)
    if answer is None:
        return Answer(None, ["it hung or died"])
    return Answer(**{**answer, "ran": answer["ran"] + ["a trace was left"] * (folder / "ran").exists()})


def in_a_fork(report: Path, work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns in a process that is forked off and writes it to `report`; None if it dies, or hangs for so long."""
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
        until = time.monotonic() + seconds
        while time.monotonic() < until and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.005)
    finally:
        os.kill(process, signal.SIGKILL)  # it is still to be waited for, so that the number is its own
        os.waitpid(process, 0)
    if not report.exists():
        return None
    answer = json.loads(report.read_text())
    report.unlink()
    return answer


def _watched(folder: Path, reader: Callable[[], int]) -> dict[str, Any]:
    os.chdir(folder)
    os.environ["CIFAR_LIT_CACHE"] = str(folder / "cache")
    sys.path.insert(0, str(folder))  # the worst case: modules that came with a run can be imported
    torch.set_num_threads(1)
    events: set[str] = set()
    sys.addaudithook(lambda event, _: events.add(event) if event in PROGRAMS else None)
    before = memory_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest use so far is forgotten
    resource.setrlimit(resource.RLIMIT_AS, (memory_of("VmSize") + ADDRESSES,) * 2)
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with redirect_stdout(out), redirect_stderr(err):
        code = reader()
    return {
        "code": code,
        "lines": [line for line in err.getvalue().splitlines() if not line.startswith("decoding images")],
        "cpu_seconds": round(time.process_time() - began, 3),
        "megabytes": round((memory_of("VmHWM") - before) / 1e6, 1),
        "ran": sorted(events),
        "out": out.getvalue(),
    }


def memory_of(name: str) -> int:
    """Bytes of this process's memory as Linux counts them."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
