"""Training images that stay in their file: worker processes read and augment chunks ahead of the training."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from cifar_lit.data.loaders import Chunk, ChunkMaker


def ahead(maker: ChunkMaker, workers: int, pin_memory: bool) -> Iterator[Chunk]:
    """The chunks of `maker` in their order, made by `workers` processes; in page-locked memory if `pin_memory`.

    Workers are forked where the system can, so that they share the file's pages instead of copying the set.
    """
    context = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    return iter(
        DataLoader(
            cast("Dataset[Chunk]", maker),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            pin_memory=pin_memory,
            multiprocessing_context=context,
        )
    )


def _as_it_is(chunk: Chunk) -> Chunk:
    return chunk
