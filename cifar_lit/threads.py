"""Choose the number of threads by the processor time that is free.

The barriers in oneDNN's bfloat16 kernels spin while a thread of the team waits for a core. Two trainings with a thread
per core can therefore take 25 times as long as one alone. So a process must not have more threads than free cores.
"""

from __future__ import annotations

import os
import threading
import time
from functools import cache
from hashlib import sha256

from cifar_lit.errors import UsageError
from cifar_lit.hardware import core_count, core_numbers, cpu_limits, psutil

VARIABLE = "OMP_NUM_THREADS"
MEASURE_SECONDS = 0.5


class ProcessorLoad:
    """Measure, from its creation on, how many cores are free for this process: idle, or used by the process itself."""

    def __init__(self) -> None:
        self._cores = core_numbers()
        self._limits = list(cpu_limits())
        self._before = self._read()

    def _read(self) -> list[float]:
        """Return seconds: the clock, used by this process, idle on its cores, used in each group with a limit."""
        times = psutil.cpu_times(percpu=True)
        cores = [times[number] for number in self._cores if number < len(times)]
        idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores or times)
        return [time.perf_counter(), time.process_time(), idle, *(limit.used() for limit in self._limits)]

    @property
    def seconds(self) -> float:
        """Seconds since the creation."""
        return time.perf_counter() - self._before[0]

    def free(self) -> float:
        """Return the mean number of free cores since the creation."""
        changes = [after - before for after, before in zip(self._read(), self._before, strict=True)]
        seconds, own, idle, *used = changes
        unused = [idle / seconds]
        for limit, busy in zip(self._limits, used, strict=True):
            unused.append(limit.cores - busy / seconds)
        return max(0.0, min(unused)) + own / seconds


@cache
def free_cores() -> int:
    """Return the number of threads that may compute: OMP_NUM_THREADS, or the free cores, measured once in a process.

    Half of the cores compute meanwhile, so that two trainings started together see each other and share the cores.
    """
    cores = core_count()
    number = os.environ.get(VARIABLE, "").partition(",")[0]
    # torchrun sets 1 for each rank. What all ranks share, such as decoding, is not limited by it.
    if number.isdecimal() and not (number == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return max(1, min(int(number), cores))
    if cores == 1 or psutil is None:
        return cores
    load, block = ProcessorLoad(), bytes(1 << 18)

    def compute() -> None:
        while load.seconds < MEASURE_SECONDS:
            sha256(block)  # without Python's global lock

    workers = [threading.Thread(target=compute) for _ in range(cores // 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(1, min(round(load.free()), cores))


def choose_threads(typed: int | None = None, recorded: int | None = None, processes: int = 1) -> tuple[int, str]:
    """Set the number of threads of torch in this process and its children. Return it with the reason.

    Args:
        typed: the number that the user wants; it precedes OMP_NUM_THREADS.
        recorded: the number in a configuration file. Without any of these, the free cores decide.
        processes: the processes of this run on this machine, which share the free cores.

    Raises:
        UsageError: `typed` exceeds the cores.
    """
    import torch

    cores = core_count()
    if typed is not None and typed > cores:
        raise UsageError(f"--threads {typed}: this machine has {cores} cores for this process: use at most {cores}")
    if typed is not None:
        threads, reason = typed, "--threads"
    elif os.environ.get(VARIABLE):
        return torch.get_num_threads(), VARIABLE
    elif recorded is not None:
        threads, reason = max(1, min(recorded, cores)), f"{recorded} in the configuration"
    else:
        free = free_cores()
        threads, reason = max(1, min(free // processes, torch.get_num_threads())), f"{free} of {cores} cores are free"
    torch.set_num_threads(threads)
    if typed is not None or processes > 1:
        os.environ[VARIABLE] = str(threads)
    return threads, reason
