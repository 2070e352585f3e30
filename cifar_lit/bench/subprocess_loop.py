"""A hand-written loop in a process of its own, so that it runs as its user would run it.

The Trainer's process keeps the memory that it frees (`cifar_lit.hardware`); a loop in the same process would gain by that too.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice

import torch

from cifar_lit.bench.plain import TutorialLoop
from cifar_lit.bench.process import environment
from cifar_lit.errors import Failure


class SubprocessLoop(Iterator[int]):
    """The turns of a loop that runs in another process, and waits there between them.

    turns: "steps" or "epochs", the method of the loop that makes them. The process takes as many threads as this one, and
    ends with `close`, or when this process does. Raises Failure when it ends before that.
    """

    def __init__(self, loop: TutorialLoop, turns: str, device: torch.device) -> None:
        command = [sys.executable, "-m", "cifar_lit.bench.subprocess_loop"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
        assert self._process.stdin is not None
        pickle.dump((loop, turns, str(device), torch.get_num_threads()), self._process.stdin)
        self.take(0)  # comes back when it has the images and has started

    def take(self, turns: int) -> int:
        """Has that many turns made, and returns the images of all of them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{turns}\n".encode())
            self._process.stdin.flush()
            return int(self._process.stdout.readline())
        except (OSError, ValueError):
            code = self._process.wait()
            raise Failure(f"the process of the hand-written loop ended with exit code {code}: what it printed says why") from None

    def __next__(self) -> int:
        return self.take(1)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()  # the end of its input


def take(loop: Iterator[int], turns: int) -> int:
    """Makes that many turns of a loop, in whatever process it runs, and returns the images of all of them."""
    return loop.take(turns) if isinstance(loop, SubprocessLoop) else sum(islice(loop, turns))


def main() -> None:
    """The other process: reads the loop, then numbers of turns; answers each with the images they were of."""
    loop, turns, device, threads = pickle.load(sys.stdin.buffer)  # from the process that started this one
    torch.set_num_threads(threads)
    running: Iterator[int] = getattr(loop, turns)(torch.device(device))
    for line in sys.stdin.buffer:
        images = take(running, int(line))
        if device != "cpu":
            torch.get_device_module(device).synchronize()
        print(images, flush=True)


if __name__ == "__main__":
    main()
