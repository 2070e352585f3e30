"""Ranks as separate processes without a training. `Rank` starts this script, which reads commands from its stdin.

`python rank_process.py RANK WORLD PORT` prints the port of the store.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from cifar_lit.distributed.join import leave, start_watch
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.rank_watch import RankWatch

# Without torch's warnings, as in the program.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TORCH_CPP_LOG_LEVEL": "ERROR"}
LIMIT = 2.0
TIMEOUT = 60.0  # seconds; a generous limit for a busy machine


class Rank:
    """A process that runs this script."""

    def __init__(self, rank: int, world: int, port: str = "0") -> None:
        argv = [sys.executable, __file__, str(rank), str(world), port]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(argv, env=ENVIRONMENT, text=True, start_new_session=True, bufsize=1, **pipes)
        self.pid = self.process.pid

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")

    def wait(self) -> tuple[int, str]:
        """Return the exit code and stderr."""
        code = self.process.wait(TIMEOUT)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()


def start_ranks(world: int, command: str) -> list[Rank]:
    """Start ranks, wait until each knows all, and send the command to each."""
    first = Rank(0, world)
    port = first.read()
    ranks = [first, *(Rank(rank, world, port) for rank in range(1, world))]
    for rank in ranks[1:]:
        rank.read()
    for rank in ranks:
        rank.write("meet")
        rank.read()
    for rank in ranks:
        rank.write(command)
    return ranks


def main(rank: int, world: int, port: int) -> None:
    watch = start_watch(RankInfo(rank, world, "127.0.0.1", port), LIMIT)
    watch.advice = lambda: "Resume with:\n  cifar-lit train --resume a-run"
    watch.release = lambda: print("released", flush=True)
    print(watch.store.port, flush=True)
    for line in sys.stdin:
        run_command(watch, line.strip())


def run_command(watch: RankWatch, command: str) -> None:
    if command == "meet":
        while len(watch.rows) < watch.info.world:
            time.sleep(0.02)
        print("met", flush=True)
    elif command == "hang":  # blocks the main thread as a collective does
        threading.Event().wait()
    elif command == "move":
        watch.position = [1]
    elif command in ("end", "lost"):  # lost: a collective failed because another rank is gone
        if line := leave("cifar-lit: no more paper", 1, lost=command == "lost"):
            print(line, file=sys.stderr, flush=True)
        sys.exit(1)
    elif command == "finish":
        leave("", 0)
        sys.exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
