"""Hostile files of every kind, read as a user would. `cifar-lit bench hostile` reads all of them."""

from __future__ import annotations

import sys

import pytest

from cifar_lit.bench.hostile import KINDS, Answer, answers_of

if sys.platform != "linux":
    pytest.skip("memory and programs are watched as Linux shows them", allow_module_level=True)

SHORT = [(kind, name) for kind, step in (("model", 3), ("checkpoint", 6), ("configuration", 6), ("archive", 6), ("image", 4))
         for name in list(KINDS[kind])[::step]]  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return list(answers_of(SHORT))


def test_every_kind_of_hostile_file_is_refused_in_one_line_soon_in_little_memory_and_nothing_runs(answers: list[Answer]) -> None:
    assert [(one.kind, one.name) for one in answers] == SHORT
    assert not [one for one in answers if not one.held]


def test_there_are_at_least_sixty_files_and_twelve_of_each_kind() -> None:
    assert sum(len(files) for files in KINDS.values()) >= 60
    assert min(len(files) for files in KINDS.values()) >= 12


def test_what_is_refused_is_made_of_what_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same room with the genuine file in the place of the hostile one gives no complaint: what is refused is the harm."""
    monkeypatch.setitem(KINDS, "checkpoint", {"genuine": lambda room: room.checkpoint})
    monkeypatch.setitem(KINDS, "model", {"genuine": lambda room: room.model})
    found = list(answers_of([("checkpoint", "genuine"), ("model", "genuine")]))
    assert [(one.code, one.lines, one.ran) for one in found] == [(0, [], "")] * 2


def test_code_that_runs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar_lit.bench.hostile._loaded", lambda path: __import__("os").system("true"))
    [found] = answers_of([("model", "a card that is a list")])
    assert found.ran == "os.system"
    assert not found.held
