"""A small process beside each rank that kills it when it is frozen: from another machine nobody could.

A process that was stopped (SIGSTOP), or that waits for ever inside a driver or a file system, runs none of its own threads, so
that neither DDPStrategy's timeout nor NCCL's watchdog thread ends it; torchrun's agent waits for it to exit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

# It counts heartbeats rather than time: when a terminal or a scheduler stops the whole run, it stands still with it.
_WATCHDOG = """
import os, select, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
rank, heartbeat, allowed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
missed = 0
while missed < allowed and os.getppid() == rank:
    if select.select([0], [], [], heartbeat)[0]:
        if not os.read(0, 4096):
            sys.exit()
        missed = 0
    else:
        missed += 1
if os.getppid() == rank:
    os.kill(rank, signal.SIGKILL)
"""


class Watchdog:
    """This process's end of the pipe to its watchdog."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def heartbeat(self) -> None:
        """Lets the watchdog know that this process runs."""
        with suppress(OSError):
            os.write(self._pipe, b".")

    def close(self) -> None:
        """Lets go of the pipe; without any left the watchdog ends."""
        with suppress(OSError):
            os.close(self._pipe)


def start_watchdog(limit: float, heartbeat: float) -> Watchdog | None:
    """Starts what kills this process after `limit` seconds without its usual `heartbeat` (seconds); None on Windows."""
    if os.name != "posix":
        return None
    read, write = os.pipe()
    os.set_blocking(write, False)
    argv = [
        *(sys.executable, "-I", "-S", "-c", _WATCHDOG),
        *(str(os.getpid()), str(heartbeat), str(max(1, round(limit / heartbeat)))),
    ]
    try:
        subprocess.Popen(argv, stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:  # it is a further safety, which a run does not fail for
        os.close(write)
        return None
    finally:
        os.close(read)
    return Watchdog(write)
