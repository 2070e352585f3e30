"""A small process beside each rank that kills it when it is frozen: from another machine nobody could.

A process that was stopped (SIGSTOP), or that waits for ever inside a driver or a file system, runs none of its own threads, so
that neither DDPStrategy's timeout nor NCCL's watchdog thread ends it; torchrun's agent waits for it to exit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from subprocess import DEVNULL, PIPE
from typing import IO

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


def start_watchdog(limit: float, heartbeat: float) -> IO[bytes] | None:
    """Starts what kills this process after `limit` seconds without its usual `heartbeat` (seconds); None on Windows.

    Returns: The pipe that each heartbeat is a byte in, which never blocks; without any end of it left open the watchdog ends.
    """
    if os.name != "posix":
        return None
    argv = [sys.executable, "-I", "-S", "-c", _WATCHDOG, *map(str, (os.getpid(), heartbeat, max(1, round(limit / heartbeat))))]
    try:
        pipe = subprocess.Popen(argv, bufsize=0, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL).stdin
    except OSError:  # it is a further safety, which a run does not fail for
        return None
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    return pipe
