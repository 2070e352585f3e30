"""cifar-lit: train image classifiers on CIFAR-10 and on one's own small images, with PyTorch Lightning.

`cifar_lit.load(run)` returns the trained classifier of a run folder. Nothing heavy is imported until it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cifar_lit.inference.load import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from cifar_lit.inference.load import load

        return load
    raise AttributeError(f"module 'cifar_lit' has no attribute {name!r}")
