"""Build a net in the main process when Lightning forks or spawns the training processes, as it does in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher


def build_before_workers() -> None:
    """Extend Lightning's launcher of worker processes: an ImageClassifier builds its net before they start.

    Lightning copies the trained weights into the main process's net, but calls no hook before it starts the workers.
    """
    launch = _MultiProcessingLauncher.launch

    @wraps(launch)
    def launch_with_net(
        self: _MultiProcessingLauncher, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: object
    ) -> object:
        model: Any = getattr(trainer, "lightning_module", None)
        if not hasattr(model, "build_for"):
            return launch(self, function, *args, trainer=trainer, **kwargs)
        data = None
        for value in (*args, *kwargs.values()):
            if isinstance(value, LightningDataModule):
                data = value
        model.build_for(data)
        if self._start_method == "fork":
            function = partial(_in_one_thread, function)
        return launch(self, function, *args, trainer=trainer, **kwargs)

    _MultiProcessingLauncher.launch = launch_with_net  # type: ignore[method-assign]


def _in_one_thread(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call a function in a forked process, which hangs if it waits for OpenMP threads that its parent had started."""
    torch.set_num_threads(1)
    return function(*args, **kwargs)
