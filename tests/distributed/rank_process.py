"""Ranks as separate processes without a training. `Rank` starts this script, which reads commands from its stdin.

`python rank_process.py RANK WORLD [PORT] [--parent]` prints the port for the other ranks, or `joined`.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from cifar_lit.distributed import join
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.rank_watch import Coordinator, RankWatch, Worker

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
LIMIT = 2.0
TIMEOUT = 60.0  # seconds; a generous limit for a busy machine


class Rank:
    """A process that runs this script."""

    def __init__(self, rank: int, world: int, *flags: str) -> None:
        argv = [sys.executable, __file__, str(rank), str(world), *flags]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(argv, env=ENVIRONMENT, text=True, start_new_session=True, bufsize=1, **pipes)
        self.pid = self.process.pid
        self.address = self.read()

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


def start_ranks(world: int, command: str, *flags: str) -> list[Rank]:
    """Start connected ranks and send the command to each."""
    first = Rank(0, world, *flags)
    ranks = [first, *(Rank(rank, world, first.address, *flags) for rank in range(1, world))]
    members = ""
    deadline = time.monotonic() + TIMEOUT
    while members != str(list(range(world))):
        assert time.monotonic() < deadline
        first.write("members")
        members = first.read()
    for rank in ranks:
        rank.write(command)
    return ranks


def main(rank: int, world: int, *flags: str) -> None:
    info = RankInfo(rank, world, parent=os.getppid() if "--parent" in flags else None)
    watch: RankWatch
    if rank == 0:
        watch = Coordinator(info, LIMIT, "token")
        print(watch.port, flush=True)
    else:
        watch = Worker(info, LIMIT, socket.create_connection(("127.0.0.1", int(flags[0])), 5), "token")
        print("joined", flush=True)
    watch.advice = lambda: "Resume with:\n  cifar-lit train --resume a-run"
    watch.release = lambda: print("released", flush=True)
    join._watch = watch
    os.register_at_fork(after_in_child=join._forget)
    watch.start()
    for line in sys.stdin:
        run_command(watch, line.strip())


def run_command(watch: RankWatch, command: str) -> None:
    if command == "members":
        print(sorted(watch.members), flush=True)
    elif command == "fork" and os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    elif command == "hang":  # blocks the main thread as a collective does
        threading.Event().wait()
    elif command.startswith("hang in "):
        watch.folder = Path(command.removeprefix("hang in "))
        read_a_lost_file_system()
    elif command == "ahead":  # in the next step, waiting for a rank that hangs
        watch.position = [1]
        threading.Event().wait()
    elif command == "keep the lock":
        wait_in_c()
    elif command in ("end", "lost"):  # lost: a collective failed because another rank is gone
        if line := join.leave("cifar-lit: no more paper", 1, lost=command == "lost"):
            print(line, file=sys.stderr, flush=True)
        sys.exit(1)


def read_a_lost_file_system() -> None:
    time.sleep(TIMEOUT)


def wait_in_c() -> None:
    """Read from an empty pipe in C, without releasing Python's lock: no other thread of this rank runs."""
    pipe, _ = os.pipe()
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
