"""Worker processes that prefetch batches, for images that do not fit in memory."""

from __future__ import annotations

import atexit
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from cifar_lit.base.memory import return_freed_memory
from cifar_lit.base.signals import ignore_stop_signals

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    items: Sequence[Item], make: Callable[[Item], Result], workers: int, pin_memory: bool
) -> Iterator[Result]:
    """Yield `make(item)` for each item, in order, computed by worker processes.

    `make` must be picklable. Workers are forked if the system supports it, so that they share the pages of a
    memory-mapped file. pin_memory: whether to return page-locked memory.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on a machine with one core
        loader = DataLoader(
            cast("Dataset[Item]", items),
            batch_size=None,
            num_workers=workers,
            collate_fn=cast("Any", make),
            pin_memory=pin_memory,
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
            worker_init_fn=_start_worker,
            # Without a generator, the loader would draw its seed from torch's global generator.
            generator=torch.Generator(),
        )
        iterator: Any = iter(loader)
    # At exit, Python sends SIGTERM to its children and joins them. Workers ignore it, so shut them down first.
    atexit.register(iterator._shutdown_workers)
    try:
        yield from iterator
    finally:
        atexit.unregister(iterator._shutdown_workers)


def _start_worker(worker: int) -> None:
    """Set up a worker. It ignores stop signals, because the last training step still needs its batches."""
    return_freed_memory()
    ignore_stop_signals()
