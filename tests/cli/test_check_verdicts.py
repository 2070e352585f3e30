"""What is made of the answers of a group of processes: who is to blame."""

from __future__ import annotations

from typing import Any

import pytest

from cifar_lit.cli.check.verdicts import group_verdict


def words(rank: int, *stages: str, **last: Any) -> list[dict[str, Any]]:
    return [{"rank": rank, "tries": stage} for stage in stages] + ([{"rank": rank, **last}] if last else [])


DONE = {"done": True}
LOST = {"error": "DistBackendError: Connection closed by peer [127.0.0.1]:4242"}


@pytest.mark.parametrize(
    ("said", "codes", "line"),
    [
        ([*words(0, "a", **DONE), *words(1, "a", **DONE)], {0: 0}, None),
        (words(0, "a", "b"), {0: None, 1: None}, "process 1 of 2 gave no answer in 30 s over gloo (starting)"),
        ([*words(0, "a", "b"), *words(1, "a")], {0: None, 1: None}, "process 1 of 2 gave no answer in 30 s over gloo (a)"),
        (
            [*words(0, "a"), *words(1, "a")],
            {0: None, 1: None},
            "two processes cannot reach each other over gloo: no answer in 30 s (a)",
        ),
        ([*words(0, "a", **LOST), *words(1, "a")], {0: 1}, "process 1 of 2 ended without a word over gloo, in a"),
        ([*words(0, "a", **LOST), *words(1, "a")], {0: 1, 1: -11}, "process 1 of 2 crashed with SIGSEGV over gloo, in a"),
        ([*words(0, "a"), *words(1, "a")], {0: -9}, "process 1 of 2 ended without a word over gloo, in a"),
        (
            [*words(0, "a"), *words(1, "b", error="OSError: no such host")],
            {0: -9},
            "two processes cannot reach each other over gloo: process 1 in b: OSError: no such host",
        ),
        (
            [*words(0, "a", **LOST), *words(1, "a", **LOST)],
            {0: 1},
            f"two processes cannot reach each other over gloo: {LOST['error']}",
        ),
        (
            [*words(0, "a", **DONE), *words(1, tried="a", wrong="3 numbers", seconds=1.0, figure=""), *words(1, **DONE)],
            {0: 0},
            "two processes exchange wrong numbers over gloo: process 1: a: 3 numbers",
        ),
    ],
)
def test_the_process_that_is_to_blame_is_named(
    said: list[dict[str, Any]], codes: dict[int, int | None], line: str | None
) -> None:
    assert group_verdict(2, "gloo", said, codes, 30).complaints == ([line] if line else [])


def test_a_try_that_another_process_found_wrong_is_wrong_in_the_table() -> None:
    tried = {"tried": "a", "seconds": 1.0, "figure": ""}
    said = [*words(0, **tried, wrong=""), *words(0, **DONE), *words(1, **tried, wrong="3 numbers"), *words(1, **DONE)]
    assert [row.result for row in group_verdict(2, "gloo", said, {0: 0}, 30).rows] == ["wrong"]
