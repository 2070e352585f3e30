"""One rank of a run without any training: it watches, and does what it is told by its standard input, a word a line.

python one_rank.py RANK WORLD LIMIT [PORT TOKEN]; prints what others connect with, or `joined`.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from cifar_lit.distributed import join as meeting
from cifar_lit.distributed.coordinator import Coordinator
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.watch import Watch
from cifar_lit.distributed.worker import Worker


def main() -> None:
    rank, world, limit = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    place = RankInfo(rank, world, parent=os.getppid() if "--parent" in sys.argv else None)
    watch: Watch
    if rank == 0:
        watch = Coordinator(place, limit)
        print(watch.port, watch.token, flush=True)
    else:
        watch = Worker(place, limit, socket.create_connection(("127.0.0.1", int(sys.argv[4])), 5), sys.argv[5])
        print("joined", flush=True)
    watch.advice = lambda: "Go on with:\n  cifar-lit train --resume a-run"
    watch.release = lambda: print("released", flush=True)
    meeting._watch = watch
    os.register_at_fork(after_in_child=meeting._forget)
    watch.start()
    obey(watch)


def obey(watch: Watch) -> None:
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        orders: dict[str, Any] = {"crash": os.abort, "members": lambda: print(sorted(watch.members), flush=True)}
        if word in orders:
            orders[word]()
        elif word == "fork":
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        elif word == "launch":  # a rank that this one starts, and that ends with the given code before it has joined
            watch.adopt([subprocess.Popen([sys.executable, "-c", f"import os, signal; {rest}"])])
        elif word == "at":
            watch.position = [int(number) for number in rest.split()]
        elif word == "hang":  # as in a collective, where nothing else runs in the main thread
            threading.Event().wait()
        elif word == "end":
            code = int(rest)
            line = {0: "", 1: "cifar-lit: no more paper"}.get(code, "cifar-lit: stopped")
            if said := meeting.leave(line, code):
                print(said, file=sys.stderr, flush=True)
            sys.exit(code)
        elif word == "lost":  # what gloo raises when another rank is gone
            print(meeting.leave("cifar-lit: another process", 1, lost=True), file=sys.stderr, flush=True)
            sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main()
