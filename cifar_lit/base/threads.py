"""Choose the number of threads by the processor time that this process gets.

The barriers in oneDNN's bfloat16 kernels spin while a thread of the team waits for a core. Two trainings with a thread
per core can therefore take 25 times as long as one alone. So a process must not have more threads than free cores.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256

from cifar_lit.base.errors import UsageError
from cifar_lit.base.hardware import core_count

VARIABLE = "OMP_NUM_THREADS"
MEASURE_SECONDS = 0.5
MARGIN = 0.25  # a core of which a quarter is taken still counts as free


@cache
def free_cores() -> int:
    """Return the number of threads that may compute: OMP_NUM_THREADS, or the free cores, measured once in a process.

    A thread per core computes for half a second. The processor time that they get is idle, or shared fairly with other
    programs and within the limit of a container. Two trainings that start together get half of the cores each.
    """
    cores, number = core_count(), os.environ.get(VARIABLE, "").partition(",")[0]
    # torchrun sets 1 for each rank. What one rank does for all, such as decoding, is not limited by it.
    if number.isdecimal() and not (number == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return max(1, min(int(number), cores))
    begin, used, block = time.perf_counter(), time.process_time(), bytes(1 << 22)

    def compute(core: int) -> None:
        while time.perf_counter() - begin < MEASURE_SECONDS:
            sha256(block)  # without Python's global lock

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(compute, range(cores)))
    seconds = time.perf_counter() - begin
    share = (time.process_time() - used) / seconds
    return max(1, min(int(share + MARGIN), cores))


def choose_threads(number: int | None = None, typed: bool = False, processes: int = 1) -> tuple[int, str]:
    """Set torch's number of threads in this process and its children. Return it, and it with the reason as text.

    Args:
        number: as typed or in a configuration file; None to choose the free cores.
        typed: whether `number` precedes OMP_NUM_THREADS.
        processes: processes of this run on this machine, which share the free cores.

    Raises:
        UsageError: the typed number exceeds the cores.
    """
    import torch

    cores, threads = core_count(), torch.get_num_threads()
    if os.environ.get(VARIABLE) and not typed:
        return threads, f"{threads} ({VARIABLE})"
    if number:
        if typed and number > cores:
            raise UsageError(f"--threads {number}: this process may use {cores} cores: use at most {cores} threads")
        threads, reason = min(number, cores), f"set to {number}"
    else:
        free = free_cores()
        threads, reason = max(1, min(free // processes, threads)), f"{free} of {cores} cores are free"
    torch.set_num_threads(threads)
    if typed or processes > 1:
        os.environ[VARIABLE] = str(threads)
    return threads, f"{threads} ({reason})"
