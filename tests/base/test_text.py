"""Text from files is escaped for terminals, pages and tables."""

from __future__ import annotations

import csv
import io
import re
import sys

import pytest

from cifar_lit.base.text import csv_cell, duration_seconds, is_name, note, printable, progress, quoted, say


@pytest.mark.parametrize("text", ["a b", "Ä", "猫", "👩‍💻", "❤️‍🔥", "می‌خواهم", "क्‍ष", "C:\\run", "x[bold]", ""])
def test_letters_of_every_script_and_emoji_are_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("a\x85b\u2028c", r"a\x85b\u2028c"),
        ("a\u202eb\u2066", r"a\u202eb\u2066"),
        ("\udcff\ud800", r"\udcff\ud800"),
    ],
)
def test_commands_of_terminals_and_changes_of_direction_are_escaped_once(text: str, shown: str) -> None:
    assert printable(text) == shown == printable(shown)


def test_each_text_is_printed_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\nb", "c")
    note("\x1b[2J")
    assert capsys.readouterr() == ("a\\nb\nc\n", "\\x1b[2J\n")


@pytest.mark.parametrize("text", ["=1+1", "+cmd|x", "-x(1)", "@SUM(1)"])
def test_no_spreadsheet_evaluates_a_cell(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize(
    "value", [1, -0.5, None, True, "-1", "+1e5", "1", "-minus", "+a/0.png", "cat", "a=b", "T-shirt/top", "", "'s"]
)
def test_numbers_and_ordinary_texts_are_unchanged(value: object) -> None:
    assert csv_cell(value) is value or csv_cell(value) == value


def test_a_cell_never_breaks_the_line() -> None:
    out = io.StringIO()
    csv.writer(out).writerow([csv_cell("a\nb"), csv_cell('"\x1b'), csv_cell("\udcff")])
    assert out.getvalue() == 'a\\nb,"""\\x1b",\\udcff\r\n'


def test_names_have_no_control_characters_and_are_valid_unicode() -> None:
    assert all(map(is_name, ("cat", "T-shirt/top", "猫 😀", "می‌خواهم")))
    assert not any(map(is_name, ("", "a\tb", "a\nb", "\x7f", "\x9b", "\ud800")))


def test_a_duration_is_a_number_with_a_unit() -> None:
    assert [duration_seconds(text) for text in ("90s", "10m", "1.5h", "2d")] == [90, 600, 5400, 172_800]
    assert [duration_seconds(text) for text in ("", "90", "m", "-1m", "10 m", "10min", ".5h")] == [None] * 7


def test_words_of_a_command_are_in_double_quotes_where_a_shell_would_read_them_otherwise() -> None:
    words = ["--lr=1", "my photos", "{depth: 3}", "it's", "$HOME", '"', "*.png", "猫/a-1.yaml", ""]
    assert quoted(*words) == '--lr=1 "my photos" "{depth: 3}" "it\'s" "\\$HOME" "\\"" "*.png" 猫/a-1.yaml ""'


def test_a_bar_in_a_file_leaves_one_line_in_the_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("a [b]", 3_000_000, unit="MB", scale=1e-6) as advance:
        advance(1_000_000)
        advance(2_000_000)
    assert re.fullmatch(r"a \[b\]: 3 MB · [\d,]{3,}\.\d MB/s · 0.0 s\n", capsys.readouterr().err)


def test_a_program_without_a_console_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    note("b")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", None)
    say("a")
    with progress("reading", 2) as advance:
        advance(2)
