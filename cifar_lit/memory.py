"""The C library's memory, which on a CPU decides over a fifth of a training step's time."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_… of glibc's malloc.h
LARGEST_KEPT = 2**30  # bytes


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for the next step; returns whether the C library can be told so.

    By itself, glibc hands large blocks back to the system, as soon as a tensor is freed, and the system clears each of their
    pages anew when the next step asks for them: a tenth to a third of a step's time on two cores, for tensors of 1 to 50 MB.
    The process is then as large as it was at its peak until it ends. Blocks above 1 GiB are still handed back. Other
    libraries (macOS, Windows, musl) are left as they are, and so is an allocator that was loaded before it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # glibc before 2.35 refuses a threshold above 32 MiB, and is then left with the most that it takes
    kept = mallopt(_MMAP_THRESHOLD, LARGEST_KEPT) or mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1) and kept)
