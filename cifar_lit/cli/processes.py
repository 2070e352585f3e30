"""Run trainings in processes of their own, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import cifar_lit
from cifar_lit.signals import stop_signals_later


@contextmanager
def started(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own group, which Ctrl-C does not reach. The group is killed if the block fails."""
    group = {"process_group": 0, "creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}  # 0 on POSIX
    text = {"encoding": "utf-8", "errors": "replace"}
    settings = {**group, **text, "env": child_environment(), "stdin": subprocess.DEVNULL, **settings}
    with ExitStack() as stack:
        with stop_signals_later():  # else one could leave a process that nobody knows
            process = stack.enter_context(subprocess.Popen(command, **settings))
            stack.push(lambda error, *_: kill_group(process) if error else None)
        yield process


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process of `started` and all that it has started."""
    if sys.platform != "win32" and hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return
    import psutil

    with suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()


def ask_to_stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    """Send a stop signal. On Windows only Ctrl-Break reaches a process group and lets it write a checkpoint."""
    process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", number))


def child_environment() -> dict[str, str]:
    """Return environment variables for a child: this package is importable, output is UTF-8 and not buffered."""
    root = str(Path(cifar_lit.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
