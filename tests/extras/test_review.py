"""Review of labels without a browser: the journal, the table, and the images of the page."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from PIL import Image

from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import Failure
from cifar_lit.extras.label.journal import Decision, Journal
from cifar_lit.extras.label.queue import Queue
from cifar_lit.extras.label.table import Labels

CLASSES = ["cat", "dog", "eel"]


def made(image: str, action: str, label: str | None = None, new: bool = False) -> Decision:
    return Decision(image, action, label, "2026-11-24", new)


# ---- the journal


def test_decisions_are_read_again_and_undone(tmp_path: Path) -> None:
    file = tmp_path / "review.jsonl"
    journal = Journal(file, CLASSES)
    for decision in (made("1", "skip"), made("2", "drop"), made("1", "relabel", "dog"), made("3", "keep", "cat")):
        journal.decide(decision)
    undone = journal.undo()
    assert undone == made("3", "keep", "cat")
    again = Journal(file, CLASSES)
    assert again.decisions == journal.decisions == {"1": made("1", "relabel", "dog"), "2": made("2", "drop")}
    again.undo()
    assert again.decisions["1"] == made("1", "skip")
    again.decide(made("4", "keep", "eel"))
    assert Journal(file, CLASSES).decisions == again.decisions
    assert [again.undo() is None for _ in range(4)] == [False, False, False, True]


def test_a_decision_without_a_newline_at_its_end_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "review.jsonl"
    file.write_text(json.dumps(made("1", "drop")._asdict()) + "\n\n" + json.dumps(made("2", "drop")._asdict()))
    Journal(file, CLASSES).decide(made("new", "keep", "cat"))
    assert [*Journal(file, CLASSES).decisions] == ["1", "2", "new"]


def test_an_added_class_is_read_again_and_stays_after_an_undo(tmp_path: Path) -> None:
    file = tmp_path / "review.jsonl"
    journal = Journal(file, CLASSES)
    journal.add_class("Kingfisher, blue")
    journal.decide(made("1", "relabel", "Kingfisher, blue"))
    journal.decide(made("2", "relabel", "Kingfisher, blue"))
    journal.undo()
    again = Journal(file, CLASSES)
    assert again.classes == journal.classes == [*CLASSES, "Kingfisher, blue"]
    assert again.decisions == {"1": made("1", "relabel", "Kingfisher, blue")}
    before = file.read_bytes()
    for name in ("=1+1", " cat", "", "a\u202eb", "a\nb", "\ud800", "x" * 301, 7, None, float("nan")):
        with pytest.raises(ValueError):
            journal.add_class(name)  # type: ignore[arg-type]
    assert file.read_bytes() == before


def test_a_journal_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "review.jsonl").touch()
    os.truncate(tmp_path / "review.jsonl", 10**9)  # a sparse file
    with pytest.raises(Failure, match="it is larger than"):
        Journal(tmp_path / "review.jsonl", CLASSES)


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        '{"image": "4", "act',
        "\0\0\0",
        '{"undo": "1"}',  # nothing was decided before
        '{"image": "1", "action": "relabel", "label": "fox", "date": "2026-11-24", "new": false}',
        '{"image": "1", "action": "drop", "label": "cat", "date": "2026-11-24", "new": false}',
        '{"image": "1", "action": "relabel", "label": NaN, "date": "2026-11-24", "new": false}',
        '{"image": "1", "action": "drop", "label": null, "date": "20261124", "new": false}',
        '{"class": "=1+1"}',
        '{"image": "1", "action": "drop"}',
        '{"image": "=1+1", "action": "keep", "label": "cat", "date": "2026-11-24", "new": true}',
        "[" * 100_000,
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    good = json.dumps(made("1", "drop")._asdict())
    text = f"{good}\n" * ("undo" not in line) + f"{line}\n{good}\n"
    (tmp_path / "review.jsonl").write_text(text)
    with pytest.raises(Failure, match=rf"review.jsonl, line {text.count(good)} is not a decision.* move the file away"):
        Journal(tmp_path / "review.jsonl", CLASSES)
    assert (tmp_path / "review.jsonl").read_text() == text


def test_a_journal_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("not to be changed")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(Failure, match=f"decisions cannot be stored in .*{name}"):
            Journal(tmp_path / name, CLASSES)
    assert target.read_text() == "not to be changed"


def test_a_decision_is_not_stored_in_a_deleted_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "review.jsonl", CLASSES)
    (tmp_path / "review.jsonl").rename(tmp_path / "review.jsonl~")
    for _ in range(2):
        with pytest.raises(OSError, match=r"review\.jsonl was deleted or replaced"):
            journal.decide(made("1", "drop"))
        (tmp_path / "review.jsonl").touch()  # an editor replaces the file, and keeps the old one under another name
    assert not journal.decisions


def test_a_line_that_fits_only_in_part_leaves_no_trace(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "review.jsonl", CLASSES)
    journal.decide(made("1", "drop"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "review.jsonl").stat().st_size + 9, before[1]))
        with pytest.raises(OSError, match="File too large"):
            journal.decide(made("2", "drop"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.decide(made("3", "drop"))
    assert [*Journal(tmp_path / "review.jsonl", CLASSES).decisions] == [*journal.decisions] == ["1", "3"]


# ---- the table


def test_the_table_has_the_new_labels_and_keeps_the_split(tmp_path: Path) -> None:
    labels = Labels(
        "path", list("abcde"), ["cat", "cat", "dog", "dog", "eel"], "split", ["train"] * 3 + ["val", "test"]
    )
    decisions = [
        made("a", "keep", "cat"), made("b", "relabel", "eel"), made("c", "drop"), made("d", "skip"),
        made("new", "keep", "dog", new=True), made("dropped", "drop", new=True), made("gone", "keep", "cat"),
    ]  # fmt: skip
    assert labels.write(tmp_path / "table.csv", {decision.image: decision for decision in decisions}) == 5
    assert (tmp_path / "table.csv").read_text().splitlines() == [
        "path,label,original_label,reviewed,split",
        "a,cat,cat,2026-11-24,train",
        "b,eel,cat,2026-11-24,train",
        "d,dog,dog,,val",
        "e,eel,eel,,test",
        "new,dog,,2026-11-24,train",
    ]
    labels._replace(extra="", values=[]).write(tmp_path / "table.csv", {"a": made("a", "drop")})
    assert (tmp_path / "table.csv").read_text().splitlines()[:2] == ["path,label,original_label,reviewed", "b,cat,cat,"]


def test_images_added_since_an_earlier_table_move_no_image_to_another_side() -> None:
    earlier = {"a": "train", "b": "val", "c": "test"}  # and d, which was dropped
    keys = list("dcbaefgh")  # the present split, in another order, has each image on another side
    sides = ["test", "train", "test", "val", "val", "train", "test", "val"]
    groups = [1, 2, 3, 4, 5, 2, 3, None]
    now = Labels("path", keys, ["cat"] * 8, "split", sides, groups=groups)
    assert dict(zip(keys, now.with_split_of(earlier).values, strict=True)) == {
        **earlier, "d": "train", "e": "train", "f": "test", "g": "val", "h": "train",  # f is a copy of c, g of b
    }  # fmt: skip
    merged = now._replace(groups=()).with_split_of({"a": "=1+1", "b": "val"})
    assert dict(zip(keys, merged.values, strict=True)) == {**dict.fromkeys(keys, "train"), "b": "val"}
    assert now.with_split_of({"elsewhere/a": "train"}) == now  # the images were moved
    grouped = now._replace(extra="group")
    assert grouped.with_split_of(earlier) == grouped


@pytest.mark.parametrize("name", ["=1+1", "-cat", "a\u202eb", " cat"])
def test_names_that_a_spreadsheet_would_change_are_refused_at_the_start(name: str) -> None:
    for labels in (Labels("path", [name], ["cat"], "", []), Labels("path", ["a"], [name], "", [])):
        with pytest.raises(Failure, match="cannot be written to a table: rename it"):
            labels.check()


# ---- images of the page


def test_an_image_is_shown_with_its_nearest_training_images(tmp_path: Path) -> None:
    embeddings = torch.tensor([[0.0, 4.0], [3.0, 3.0], [-3.0, 3.0], [0.0, -8.0], [0.1, 4.0], [9.0, 9.0], [-1.0, 1.0]])
    train = ImageSet(torch.zeros(7, 8, 8, 3, dtype=torch.uint8), torch.arange(7) % 3, tuple(CLASSES))
    keys = list(map(str, range(7)))
    file = str(tmp_path / "large.jpg")
    Image.new("L", (1600, 400)).save(file)
    probabilities = torch.tensor([[0.2, 0.7, 0.1]] * 3)
    where = embeddings[[0, 0, 0]]
    missing = str(tmp_path / "gone.jpg")
    queue = Queue(["0", file, missing], ["cat", None, None], probabilities, where, train, keys, embeddings)
    shown = queue.details(0)
    assert shown["nearest"][0][1] == "dog"  # row 4; the image itself is row 0
    assert len(shown["nearest"]) == 5 and all(uri.startswith("data:image/png") for uri, _ in shown["nearest"])
    assert [name for name, _ in shown["top"]] == ["dog", "cat", "eel"]
    large = queue.details(1)
    assert large["nearest"][0][1] == "cat"  # row 0 is another image now
    assert large["picture"].startswith("data:image/jpeg")
    assert queue.details(2)["picture"] == ""
    assert [summary.name for summary in queue.summaries] == ["0", "large.jpg", "gone.jpg"]
