"""Changed settings of a resumed run in a line of text."""

from __future__ import annotations

from cifar_lit.run.record import changes_text


def test_changes_are_listed_with_their_steps() -> None:
    changes = [{"step": 20, "settings": {"workers": 1, "threads": 3}}, {"step": 40, "settings": {"workers": 2}}]
    assert changes_text({"changes": changes}) == "from step 20: workers 1, threads 3; from step 40: workers 2"
    assert changes_text({}) == ""
