"""Review of labels: the journal, the table, the images of the page, and decisions over HTTP."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from cifar_lit.base.errors import Failure
from cifar_lit.data.image_set import ImageSet
from cifar_lit.extras.label.journal import Decision, Journal
from cifar_lit.extras.label.queue import Queue
from cifar_lit.extras.label.table import Labels

CLASSES = ["cat", "dog", "eel"]


def made(image: str, action: str, label: str | None = None, new: bool = False) -> Decision:
    return Decision(image, action, label, "2026-11-24", new)


# ---- the journal


def test_the_latest_decision_about_an_image_and_added_classes_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "review.jsonl"
    journal = Journal(file, CLASSES)
    for decision in (made("1", "skip"), made("2", "relabel", "heron"), made("1", "keep", "dog"), made("2", "drop")):
        journal.decide(decision)
        again = Journal(file, CLASSES)
        assert (again.decisions, again.classes) == (journal.decisions, journal.classes)
    assert again.decisions == {"1": made("1", "keep", "dog"), "2": made("2", "drop")}
    assert again.classes == [*CLASSES, "heron"]


@pytest.mark.parametrize("line", ["no JSON", '{"image": "4", "act', '{"image": "1", "action": "drop"}'])
def test_a_damaged_line_is_named_and_the_file_stays(tmp_path: Path, line: str) -> None:
    file = tmp_path / "review.jsonl"
    Journal(file, CLASSES).decide(made("1", "drop"))
    file.write_text(text := file.read_text() + line)
    with pytest.raises(Failure, match=r"review.jsonl, line 2 is not a decision: remove the line"):
        Journal(file, CLASSES)
    assert file.read_text() == text


def test_a_journal_elsewhere_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/review.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Failure, match="is a symlink pointing outside"):
        Journal(tmp_path / "run/review.jsonl", CLASSES)
    assert not (tmp_path / "elsewhere").exists()


# ---- the table


def test_the_table_has_the_new_labels_and_keeps_the_split(tmp_path: Path) -> None:
    old = ["cat", "cat", "dog", "dog", "eel"]
    columns = {"site": list("uvwxy"), "split": ["train"] * 3 + ["val", "test"]}
    labels = Labels("path", list("abcde"), old, columns, [None] * 5)
    decisions = [
        made("a", "keep", "cat"), made("b", "relabel", "eel"), made("c", "drop"), made("d", "skip"),
        made("new", "keep", "=1+1", new=True), made("dropped", "drop", new=True), made("gone", "keep", "cat"),
    ]  # fmt: skip
    assert labels.write(tmp_path / "table.csv", {decision.image: decision for decision in decisions}) == 5
    assert (tmp_path / "table.csv").read_text().splitlines() == [
        "path,label,original_label,reviewed,site,split",
        "a,cat,cat,2026-11-24,u,train",
        "b,eel,cat,2026-11-24,v,train",
        "d,dog,dog,,x,val",
        "e,eel,eel,,y,test",
        "new,'=1+1,,2026-11-24,,train",
    ]
    labels._replace(columns={}).write(tmp_path / "table.csv", {"a": made("a", "drop")})
    assert (tmp_path / "table.csv").read_text().splitlines()[:2] == ["path,label,original_label,reviewed", "b,cat,cat,"]


def test_images_added_since_an_earlier_table_move_no_image_to_another_side() -> None:
    earlier = {"a": "train", "b": "val", "c": "test"}  # and d, which was dropped
    keys = list("dcbaefgh")  # the present split, in another order, has each image on another side
    sides = ["test", "train", "test", "val", "val", "train", "test", "val"]
    groups = [1, 2, 3, 4, 5, 2, 3, None]
    now = Labels("path", keys, ["cat"] * 8, {"split": sides}, groups)
    assert dict(zip(keys, now.with_split_of(earlier).columns["split"], strict=True)) == {
        **earlier, "d": "train", "e": "train", "f": "test", "g": "val", "h": "train",  # f is a copy of c, g of b
    }  # fmt: skip
    assert now.with_split_of({"elsewhere/a": "train"}) == now  # the images were moved


# ---- images of the page


def test_an_image_is_shown_with_its_nearest_training_images(tmp_path: Path) -> None:
    embeddings = torch.tensor([[0.0, 4.0], [3.0, 3.0], [-3.0, 3.0], [0.0, -8.0], [0.1, 4.0], [9.0, 9.0], [-1.0, 1.0]])
    train = ImageSet(torch.zeros(7, 8, 8, 3, dtype=torch.uint8), torch.arange(7) % 3, tuple(CLASSES))
    keys = list(map(str, range(7)))
    file = str(tmp_path / "large.jpg")
    Image.new("L", (1600, 400)).save(file)
    probabilities = torch.tensor([[0.2, 0.7, 0.1]] * 3)
    missing = str(tmp_path / "gone.jpg")
    net: Any = SimpleNamespace(classes=CLASSES, card=SimpleNamespace(thresholds=None))
    queue = Queue(
        ["0", file, missing], ["cat", None, None], None, probabilities, embeddings[[0, 2, 2]], net, train, keys,
        [6, 5, 4, 3, 2, 1, 0], embeddings.flip(0),
    )  # fmt: skip
    shown = queue.details(0)
    assert shown["nearest"][0][1] == "dog"  # row 4; the image itself is row 0
    assert len(shown["nearest"]) == 5 and all(uri.startswith("data:image/png") for uri, _ in shown["nearest"])
    assert [name for name, _ in shown["top"]] == ["dog", "cat", "eel"]
    large = queue.details(1)
    assert large["nearest"][0][1] == "eel"  # row 2
    assert large["picture"].startswith("data:image/jpeg")
    assert queue.details(2)["picture"] == ""
    assert [summary.name for summary in queue.summaries] == ["0", "large.jpg", "gone.jpg"]
