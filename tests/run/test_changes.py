"""Changed settings of a resumed run: recorded with their step, and kept in its checkpoints."""

from __future__ import annotations

from typing import Any

from cifar_lit.run.record import changes_text
from cifar_lit.run.run import Run


def resumed(step: int, state: dict[str, Any] | None = None, **changed: Any) -> Run:
    """Return a run that is resumed at a step from the state of an earlier one."""
    folder: Any = None
    run = Run(folder, {}, "", {"step": str(step)}, "fit", changed=changed)
    if state:
        run.load_state_dict(state)
    return run


def test_each_change_is_recorded_once_and_so_is_the_return_to_the_first_settings() -> None:
    run = resumed(0)
    for step, changed in ((10, {}), (20, {"workers": 1}), (30, {"workers": 1}), (40, {})):
        run = resumed(step, run.state_dict(), **changed)
    assert run.changes == [{"step": 20, "settings": {"workers": 1}}, {"step": 40, "settings": {}}]
    assert changes_text({"changes": run.changes}) == "from step 20: workers 1; from step 40: as at the start"
    assert changes_text({}) == ""
