"""Write checkpoints in a thread, while an accelerator continues the training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_leaves

from cifar_lit.training.checkpoint import AtomicCheckpointIO


def checkpoint_io(kind: str, processes: int) -> AtomicCheckpointIO:
    """Return the writer of checkpoints for a kind of device (`Machine.kind`) and a number of processes.

    It is asynchronous for one process on an accelerator. On a CPU, its thread would take a core from the training. With
    several processes, only the first would know when its writes are complete.
    """
    return AsyncCheckpointIO() if kind != "cpu" and processes == 1 else AtomicCheckpointIO()


class AsyncCheckpointIO(AtomicCheckpointIO):
    """During a fit, copy each checkpoint to host memory, and write the copy in a thread.

    `teardown`, which the Trainer calls at the end of a fit and after an error, waits for the writes. So do reads and
    removals. A failed write raises its error once, in the next call.

    Lightning's AsyncCheckpointIO does not suffice. Its copies stay on the device, are unlimited in number and lose the
    versions of modules in a state dict. A file may be removed before it is written. Each teardown raises the
    same error again.
    """

    MAX_PENDING = 2  # copies in host memory: best.ckpt and last.ckpt of an epoch

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1)  # None after the fit
        self._writes: deque[Future[None]] = deque()

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Copy `checkpoint` to write it to `path`. Wait first if MAX_PENDING writes are unfinished."""
        if self._thread is None:
            super().save_checkpoint(checkpoint, path)
            return
        self._wait(self.MAX_PENDING - 1)
        self._writes.append(self._thread.submit(super().save_checkpoint, host_copy(checkpoint), path))

    def load_checkpoint(
        self, path: str | Path, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> object:
        """Return the contents of a checkpoint; see `read_checkpoint`."""
        self._wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, but no folder and no file with another suffix."""
        self._wait()
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for all writes, and raise the error of a failed one. Later checkpoints are written at once."""
        self._wait()
        self._thread = None

    def _wait(self, pending: int = 0) -> None:
        """Wait until at most `pending` writes are unfinished. If one failed, wait for all and raise its error."""
        while len(self._writes) > pending:
            error = self._writes[0].exception()  # may be interrupted by a signal
            self._writes.popleft()
            if error:
                wait(self._writes)
                self._writes.clear()
                raise error


def host_copy(checkpoint: dict[str, object]) -> dict[str, object]:
    """Return a deep copy of a checkpoint with its tensors on the CPU, so that only this thread uses the device."""
    tensors = [leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor)]
    copies: dict[int, object] = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in tensors}
    return deepcopy(checkpoint, copies)
