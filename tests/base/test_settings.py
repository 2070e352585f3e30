"""Files of settings, and which settings may change when a training is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cifar_lit.base.errors import UsageError
from cifar_lit.base.settings import changed_settings, plain_settings, plain_values

LONGER = {"trainer.max_epochs": 5}


def test_other_trainings_can_be_prolonged_but_not_shortened_or_made_endless() -> None:
    saved = {"trainer.max_epochs": 3, "model.schedule": "constant"}
    assert changed_settings(saved, {**saved, **LONGER}) == LONGER
    for end in (2, -1, None):
        with pytest.raises(UsageError, match=r"trainer\.max_epochs was 3 in this run, not .*: leave it out"):
            changed_settings(saved, {**saved, "trainer.max_epochs": end})


def test_only_settings_that_may_change_change() -> None:
    saved = {"data.workers": 2, "early_stop": {"patience": 3}, "weight_average": {"decay": 0.9}}
    given = {"data.workers": 1, "early_stop": None, "weight_average": {"decay": 0.9}}
    changed = changed_settings(saved, given, ["data.workers", "early_stop"])
    assert changed == {"data.workers": 1, "early_stop": None}
    with pytest.raises(UsageError, match=r'weight_average was \{"decay": 0\.9\} in this run, not null'):
        changed_settings(saved, {**given, "weight_average": None}, ["data.workers", "early_stop"])


def test_equal_values_in_other_forms_and_unknown_settings_are_no_change() -> None:
    saved = {"data.mean": [0.5, 0.5, 0.5], "data.image_size": [8, 8], "data.val_size": 20, "data.removed": 1}
    given = {"data.mean": 0.5, **plain_settings("data", {"image_size": (8, 8), "val_size": 20.0}), "data.added": 2}
    assert changed_settings(saved, given) == {}
    with pytest.raises(UsageError, match=r"data\.mean was \[0\.5, 0\.5, 0\.5\] in this run, not 0\.4"):
        changed_settings(saved, {"data.mean": 0.4})


def test_functions_and_objects_are_compared_by_name() -> None:
    """Their addresses differ in every process."""
    values = plain_settings("data", {"dataset": plain_settings, "augment": {"policy": object()}})
    assert values == {
        "data.dataset": "cifar_lit.base.settings.plain_settings",
        "data.augment": {"policy": "builtins.object"},
    }


def test_a_file_may_merge_several_mappings(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, <<: *b}\n")
    assert plain_values(tmp_path / "a.yaml")["c"] == {"x": 1, "y": 2}
