import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from cifar_lit.errors import Failure
from cifar_lit.runs import run_folder as lock
from cifar_lit.runs.run_folder import LOCK, OWNER, RunLock, owner_of

HOLD = """
import sys, time
from pathlib import Path
from cifar_lit.runs.run_folder import RunLock
held = RunLock(Path(sys.argv[1]))
held.acquire()
print("held", flush=True)
time.sleep(60)
"""


def elsewhere(run: Path, age: float, host: str = "node-7") -> None:
    """Leaves the record of a process of another machine, renewed `age` seconds ago."""
    (run / OWNER).write_text(json.dumps({"pid": 41, "host": host}))
    (run / LOCK).touch()
    os.utime(run / OWNER, (time.time() - age, time.time() - age))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "FRESH", 0.4)
    monkeypatch.setattr(lock, "OLD", 100.0)


def test_the_owner_is_known_while_it_holds_the_lock_and_leaves_no_trace(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    held.acquire()
    owner = owner_of(tmp_path)
    assert owner is not None and (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
    with pytest.raises(Failure, match=f"process {os.getpid()} on {socket.gethostname()} is writing {tmp_path}: wait until it"):
        RunLock(tmp_path).acquire()
    assert owner_of(tmp_path) == owner or owner_of(tmp_path) is not None
    held.release()
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_killed_holds_nothing_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(Failure, match=f"process {process.pid} on"):
            RunLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
    left = owner_of(tmp_path)
    assert left is not None and left.pid == process.pid
    started = time.monotonic()
    after = RunLock(tmp_path)
    after.acquire()
    assert time.monotonic() - started < lock.FRESH
    assert owner_of(tmp_path).pid == os.getpid()  # type: ignore[union-attr]
    assert capsys.readouterr().err == ""
    after.release()


def test_one_that_was_left_on_another_machine_long_ago_is_named_with_its_age(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere(tmp_path, age=3 * 3600)
    held = RunLock(tmp_path)
    held.acquire()
    said = f"{tmp_path} was left by process 41 on node-7, which gave its last sign 3 hours ago; going on with it\n"
    assert capsys.readouterr().err == said
    held.release()


def test_one_that_was_written_on_another_machine_just_now_is_watched_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere(tmp_path, age=5)
    started = time.monotonic()
    held = RunLock(tmp_path)
    held.acquire()
    assert time.monotonic() - started >= lock.FRESH
    waited, left = capsys.readouterr().err.splitlines()
    assert "was written by process 41 on node-7: waiting" in waited
    assert "was left by process 41 on node-7, which gave its last sign 5 seconds ago" in left
    held.release()


def test_one_that_still_gives_signs_on_another_machine_is_in_use(tmp_path: Path) -> None:
    elsewhere(tmp_path, age=5)
    beat = threading.Timer(0.1, lambda: os.utime(tmp_path / OWNER))
    beat.start()
    with pytest.raises(Failure, match="process 41 on node-7 is writing"):
        RunLock(tmp_path).acquire()
    beat.join()
    assert owner_of(tmp_path).host == "node-7"  # type: ignore[union-attr]
    with FileLock(tmp_path / LOCK, timeout=0):
        pass  # which was given back


def test_an_owner_gives_signs(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    held.acquire()
    os.utime(tmp_path / OWNER, (1.0, 1.0))
    deadline = time.monotonic() + 5
    while owner_of(tmp_path).renewed == 1.0 and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert owner_of(tmp_path).renewed > 1.0  # type: ignore[union-attr]
    held.release()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "host": "y"}'])
def test_a_record_that_cannot_be_read_hinders_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / OWNER).write_text(text)
    assert owner_of(tmp_path) is None
    held = RunLock(tmp_path)
    held.acquire()
    held.release()


def test_of_many_that_want_the_same_run_at_once_exactly_one_gets_it(tmp_path: Path) -> None:
    locks = [RunLock(tmp_path) for _ in range(12)]

    def tries(one: RunLock) -> bool:
        try:
            one.acquire()
        except Failure:
            return False
        return True

    for _ in range(5):
        with ThreadPoolExecutor(12) as pool:
            assert sum(pool.map(tries, locks)) == 1
        for one in locks:
            one.release()
        assert list(tmp_path.iterdir()) == []
