"""Optional parts of a training: each is a Lightning callback in a file of its own, which may be deleted.

`Trainer(callbacks=[WeightAverage(decay=0.999)])` in Python, `weight_average: {decay: 0.999}` in a recipe, and
`--weight_average.decay 0.999` on the command line mean the same. To add a feature, write its file and its line here.
In its `setup("fit")`, a feature sets attributes of the model and the data, see `ImageClassifier` and `ImageData`. Its
class may have `may_change = True` if a resumed run may add, change or remove it, and a static method
`adjust_settings(own, settings)`, which sets on the command line what the settings leave open.

The callbacks run in this order. jsonargparse reads a class with @final as a group of settings, and others as a
class_path.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

_CLASSES = {
    "finetune": "Finetune",
    "weight_average": "WeightAverage",
    "skip_easy": "SkipEasy",
    "class_weights": "ClassWeights",
    "resolutions": "Resolutions",
    "whitening": "Whitening",
    "early_stop": "EarlyStop",
    "compile": "Compile",
}
FEATURES = tuple(name for name in _CLASSES if find_spec(f"{__name__}.{name}"))


def feature_class(name: str) -> Any:
    """Return the class of a feature by its name in recipes."""
    return getattr(import_module(f"{__name__}.{name}"), _CLASSES[name])


def feature_settings(name: str) -> list[str]:
    """Return the settings of a feature by their full names, such as `weight_average.decay`."""
    return [f"{name}.{setting}" for setting in signature(feature_class(name)).parameters]


def __getattr__(name: str) -> Any:
    """Import a class on first use, as in `from cifar_lit.features import WeightAverage`."""
    for feature in FEATURES:
        if _CLASSES[feature] == name:
            return feature_class(feature)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
