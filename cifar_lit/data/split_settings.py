"""`Split`, the settings of the split into training, validation and test images (`data.split`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cifar_lit.errors import UsageError, nearest

_WHOLE = ("seed", "folds", "fold")


@dataclass(frozen=True)
class Split:
    """How the images are split into training, validation and test images, besides the size of the validation part.

    Args:
        test_size: fraction of your own images to test on, if the folder or table has no test set.
        seed: seed of the split and of generated images. Runs that differ in their seed share the same test set.
        group: table column, such as patient: images with equal values stay on the same side of every split. Default:
            the column `group`, if the table has one.
        folds: number of stratified folds for cross-validation; 0 for none. The training images are divided into folds,
            or all of your own images if there is no test set. `--folds 5` tests on each fold in turn.
        fold: index of the fold to test on, from 0.
        share: share of the training images to train on, drawn by class; `--learning-curve` trains on four shares.

    Raises:
        UsageError: for invalid values.
    """

    test_size: float = 0.2
    seed: int = 0
    group: str | None = None
    folds: int = 0
    fold: int = 0
    share: float = 1.0

    @classmethod
    def of(cls, settings: Split | Mapping[str, Any] | None) -> Split:
        """Return settings that are given as an object or by name; None for the defaults."""
        if isinstance(settings, cls):
            return settings
        if not isinstance(settings, Mapping | None):
            raise UsageError(f"data.split must hold settings by name, not {settings!r}")
        names = [field.name for field in fields(cls)]
        for name, value in (settings or {}).items():
            if name not in names:
                hint = nearest(str(name), names)
                raise UsageError(f"data.split has no setting {name!r}.{hint} It has {', '.join(names)}.")
            types: Any = int | float
            kind = "a number"
            if name in _WHOLE:
                types, kind = int, "a whole number"
            if name == "group":
                types, kind = str | None, "the name of a column"
            if not isinstance(value, types) or isinstance(value, bool):
                raise UsageError(f"data.split.{name} must be {kind}, not {value!r}")
        return cls(**(settings or {}))

    def __post_init__(self) -> None:
        if not 0 < self.test_size < 1:
            raise UsageError(f"data.split.test_size must be between 0 and 1, not {self.test_size:g}")
        if self.seed < 0:
            raise UsageError(f"data.split.seed must be 0 or more, not {self.seed}")
        if self.folds and not (self.folds > 1 and 0 <= self.fold < self.folds):
            fault = f"data.split.fold {self.fold} of data.split.folds {self.folds} is invalid"
            raise UsageError(f"{fault}: use 2 folds or more, counted from 0")
        if not 0 < self.share <= 1:
            fault = f"data.split.share is a share of the training images, above 0 and at most 1, not {self.share:g}"
            raise UsageError(fault)
