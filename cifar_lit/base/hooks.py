"""Methods that the core calls by name on every callback that has them, beyond Lightning's hooks.

| method | when and why |
|---|---|
| `check(model, data)` | before a fit: raise UsageError if the feature does not fit this model or data |
| `prepare(model)` | before a new fit, not before a resumed one: load what may fail, such as weights |
| `parameter_groups(groups)` | before the optimizer is built: return the parameter groups to train |
| `adjust_settings(own, settings)` | on the command line, before anything is built: set what the settings leave open |
| `card()` | lines of the start card by name, which replace the core's lines of these names |
| `class_weights()` | weights with which the classes count equally, float32 (classes,); only one callback may have it |
| `order(labels)` | the order of the training images in an epoch; see `data.loaders.shuffled` |
| `train_loader(settings, length, device)` | the training loader, in place of `TrainLoader(**settings)` |
| `side(epoch, epochs)` | side in pixels to which training images are scaled, None for full size |
| `start_from(model)` | before the first step, when the weights have been replaced |

| attribute | meaning |
|---|---|
| `depends_on_length` | whether it needs the number of epochs, which then cannot grow on resume |
| `may_change` | whether it may be added, removed and changed on resume |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def callbacks_with(trainer: Any, name: str) -> list[Any]:
    """Return the callbacks of a Trainer that have an attribute, in their order."""
    return [callback for callback in trainer.callbacks if hasattr(callback, name)]


def method(trainer: object, name: str) -> Callable[..., Any] | None:
    """Return the method of this name of the one callback that has it; None if none has."""
    return next(iter(methods(trainer, name)), None)


def methods(trainer: object, name: str) -> list[Callable[..., Any]]:
    """Return the methods of this name of a Trainer's callbacks, in the order of the callbacks."""
    return [getattr(callback, name) for callback in callbacks_with(trainer, name)]
