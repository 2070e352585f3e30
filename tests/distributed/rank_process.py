"""Ranks as processes of their own, without any training: `Rank` starts one, whose standard input this file obeys, a word a line.

python rank_process.py RANK WORLD LIMIT [PORT]; prints the port that others connect to, or `joined`.
"""

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
TIMEOUT = 60.0  # seconds that a busy machine may take for what is done in less than ten


class Rank:
    """A process of this file."""

    def __init__(self, rank: int, world: int, *more: str) -> None:
        argv = [sys.executable, __file__, str(rank), str(world), *more]
        self.process = subprocess.Popen(
            argv, env=ENVIRONMENT, text=True, stdin=-1, stdout=-1, stderr=-1, start_new_session=True, bufsize=1
        )
        self.pid, self.address = self.process.pid, self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")

    def wait(self) -> tuple[int, str]:
        """Exit code and what was printed on stderr."""
        code = self.process.wait(TIMEOUT)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()


def start_ranks(world: int, order: str, *more: str) -> list[Rank]:
    """Ranks that have met; each is given the order."""
    first = Rank(0, world, *more)
    ranks = [first, *(Rank(rank, world, first.address, *more) for rank in range(1, world))]
    members, deadline = "", time.monotonic() + TIMEOUT
    while members != str(list(range(world))):
        assert time.monotonic() < deadline
        first.write("members")
        members = first.read()
    for rank in ranks:
        rank.write(order)
    return ranks


def main(rank: int, world: int, *more: str) -> None:
    info = RankInfo(rank, world, parent=os.getppid() if "--parent" in more else None)
    watch: RankWatch
    if rank == 0:
        watch = Coordinator(info, LIMIT, "token")
        print(watch.port, flush=True)
    else:
        watch = Worker(info, LIMIT, socket.create_connection(("127.0.0.1", int(more[0])), 5), "token")
        print("joined", flush=True)
    watch.advice = lambda: "Resume with:\n  cifar-lit train --resume a-run"
    watch.release = lambda: print("released", flush=True)
    join._watch = watch
    os.register_at_fork(after_in_child=join._forget)
    watch.start()
    for order in sys.stdin:
        obey(watch, *order.split())


def obey(watch: RankWatch, word: str = "", code: str = "1") -> None:
    line = {"0": "", "1": "cifar-lit: no more paper"}.get(code, "cifar-lit: stopped")
    if word == "members":
        print(sorted(watch.members), flush=True)
    elif word == "fork" and os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    elif word == "hang":  # as in a collective, where nothing else runs in the main thread
        threading.Event().wait()
    elif word in ("end", "lost"):  # lost: by what gloo raises when another rank is gone
        if line := join.leave(line, int(code), lost=word == "lost"):
            print(line, file=sys.stderr, flush=True)
        sys.exit(int(code))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
