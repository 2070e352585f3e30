"""Settings of the split."""

from __future__ import annotations

from typing import Any

import pytest

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (3, r"data\.split must be settings by name, or Split\(…\), not 3"),
        ({"sed": 3}, r"data\.split has no setting 'sed'\. Did you mean seed\?"),
        ({"fold": 0.5}, r"data\.split\.fold must be a whole number, not 0\.5"),
        ({"share": "half"}, r"data\.split\.share must be a number, not 'half'"),
        ({"group": 3}, r"data\.split\.group must be text, not 3"),
        ({"test_size": 0.0}, r"data\.split\.test_size must be between 0 and 1"),
        ({"share": 0.0}, "above 0 and at most 1"),
        ({"test_size": 1.0}, r"data\.split\.test_size must be between 0 and 1"),
        ({"folds": 3, "fold": 3}, "folds are counted from 0"),
    ],
)
def test_invalid_settings_of_the_split_are_refused_by_name(settings: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ImageData("shapes", split=settings)
