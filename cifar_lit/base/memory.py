"""Memory: what is free, and when the C library returns freed blocks, a fifth of the time of a step on a CPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

FLOATS_AT_ONCE = 1 << 28  # 1 GB of float32; limit for images processed in one batch before training
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_… of glibc's malloc.h
RETURNED_BLOCK = 2**17  # bytes; the default of glibc


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step. This has no effect on macOS and Windows, and with musl.

    By default, glibc returns a large block to the system as soon as its tensor is freed. The system then has to clear
    new pages in the next step. With this setting, the process stays as large as at its peak.
    """
    _mallopt(_MMAP_THRESHOLD, 2**25)
    _mallopt(_MMAP_THRESHOLD, 2**30)  # refused by glibc before 2.35
    _mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Make glibc return large blocks to the system as soon as they are freed, despite `keep_freed_memory`.

    Needed in processes that prefetch batches. Before 2.38, glibc often cannot reuse a freed block for an aligned block
    of the same size, which torch requests. Kept memory would then grow with every batch.
    """
    _mallopt(_MMAP_THRESHOLD, RETURNED_BLOCK)
    _mallopt(_TRIM_THRESHOLD, RETURNED_BLOCK)


def _mallopt(parameter: int, value: int) -> None:
    """Set a parameter of glibc; do nothing with another C library."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(parameter, value)


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, None if unknown."""
    if device.type != "cpu":
        import torch

        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return None
        return int(module.mem_get_info(device)[0])
    return min([psutil.virtual_memory().available, *_free_in_cgroups()])


CGROUPS = Path("/sys/fs/cgroup")


def _free_in_cgroups() -> Iterator[int]:
    """Yield the free bytes, including the file cache, below each memory limit of this container or job."""
    own = Path("/proc/self/cgroup")
    if not own.exists():
        return
    for line in own.read_text(encoding="utf-8").splitlines():
        folder = CGROUPS / line.rpartition(":")[2].strip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no limit
                limit = int((group / "memory.max").read_text())
                used = int((group / "memory.current").read_text())
                cached = re.findall(r"^(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
                yield limit - used + sum(map(int, cached))
