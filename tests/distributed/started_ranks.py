"""Ranks as processes of their own, without any training."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIMIT = 2.0
SOON = 5.0  # seconds; what is not for the limit takes milliseconds and, at most, the time given to the main thread


class Rank:
    """A process of one_rank.py."""

    def __init__(self, rank: int, world: int, *more: str, limit: float = LIMIT) -> None:
        words = [sys.executable, str(Path(__file__).with_name("one_rank.py")), str(rank), str(world), str(limit), *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            words, env=environment, text=True, stdin=-1, stdout=-1, stderr=-1, start_new_session=True, bufsize=1
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().split()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, *orders: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{order}\n" for order in orders))
        self.process.stdin.flush()

    def wait(self, seconds: float = SOON) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        code = self.process.wait(seconds)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()

    def released(self) -> bool:
        assert self.process.stdout is not None
        return "released" in self.process.stdout.read()


def meet(first: Rank, count: int) -> None:
    """Waits until all ranks know each other."""
    assert first.process.stdout is not None
    deadline = time.monotonic() + SOON
    line = ""
    while line != str(list(range(count))) and time.monotonic() < deadline:
        first.tell("members")
        line = first.process.stdout.readline().strip()
    assert line == str(list(range(count)))
