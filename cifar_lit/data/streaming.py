"""Training images that stay in their file: worker processes read and augment chunks ahead of the training."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from cifar_lit.data.loaders import Chunk, ChunkMaker


def ahead(maker: ChunkMaker, workers: int, pin_memory: bool) -> Iterator[Chunk]:
    """The chunks of `maker` in their order, made by `workers` processes; in page-locked memory if `pin_memory`.

    Workers are forked where the system can, so that they share the file's pages instead of copying the set.
    """
    context = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on a machine of one core
        loader = DataLoader(
            cast("Dataset[Chunk]", maker),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            pin_memory=pin_memory,
            multiprocessing_context=context,
            worker_init_fn=_leave_signals_to_the_training,
            generator=torch.Generator(),  # its seed would be drawn from what dropout draws from
        )
        chunks: Any = iter(loader)
    # Python terminates and awaits what is left of its children at its end; these have to be told in another way.
    atexit.register(chunks._shutdown_workers)
    try:
        yield from chunks
    finally:
        atexit.unregister(chunks._shutdown_workers)


def _as_it_is(chunk: Chunk) -> Chunk:
    return chunk


def _leave_signals_to_the_training(worker: int) -> None:
    """A terminal's Ctrl-C reaches the workers too; the training stops in order, and needs them until then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
