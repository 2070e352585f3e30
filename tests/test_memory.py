import ctypes
import platform
import subprocess
import sys

import pytest

from cifar_lit.hardware import keep_freed_memory

COUNT_FAULTS = """
import resource, sys
from cifar_lit.hardware import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [b"x" * count for count in (3_000_000, 20_000_000, 48_000_000)]
    del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([step() for _ in range(4)][-1])
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_what_a_step_frees_serves_the_next_without_new_pages() -> None:
    kept, left = faults("kept"), faults("left")
    assert kept < 10
    assert left > kept  # some 17,000 where pages are of 4 KiB


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
