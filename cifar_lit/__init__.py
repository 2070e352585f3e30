"""cifar-lit: train image classifiers on CIFAR-10 and on your own photos, with PyTorch Lightning.

    import lightning as L
    from cifar_lit import ImageClassifier, ImageData, load

    trainer = L.Trainer(max_epochs=3)
    trainer.fit(ImageClassifier(net="resnet18"), ImageData("cifar10", root="data"))

`save(model, data, folder)` writes a net as a run folder, and `load(run)` returns its classifier. The names are imported
on first use, because importing torch takes seconds.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.inference.load import load
    from cifar_lit.training.classifier import ImageClassifier

if sys.version_info < (3, 11):  # noqa: UP036
    raise SystemExit("cifar-lit needs Python 3.11 or later: activate its virtual environment")

__version__ = "0.2.0"
__all__ = ["ImageClassifier", "ImageData", "__version__", "load", "save"]  # noqa: F822 (imported on first use)

_MODULES = {
    "ImageClassifier": "cifar_lit.training.classifier",
    "ImageData": "cifar_lit.data.datamodule",
    "load": "cifar_lit.inference.load",
    "save": "cifar_lit.run.save",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'cifar_lit' has no attribute {name!r}")
