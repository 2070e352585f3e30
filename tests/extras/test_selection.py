"""`cifar-lit next`: the images to label next, as a table."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from contract.command_line import rows_of
from inference.small_nets import write_net
from PIL import Image

import cifar_lit
from cifar_lit.cli import main
from cifar_lit.extras.label.journal import Decision, Journal
from cifar_lit.extras.label.next import select

Capture = pytest.CaptureFixture[str]
NO_DATA = (
    "images with a label may be selected again: the images of folder are missing: give their folder with --data-dir\n"
)


def clusters(count: int, size: int) -> torch.Tensor:
    """Return `size` embeddings near each of `count` directions, cluster by cluster."""
    generator = torch.Generator().manual_seed(1)
    return torch.eye(count, 16).repeat_interleave(size, 0) + 0.05 * torch.randn(count * size, 16, generator=generator)


def test_one_image_of_each_cluster_is_selected_the_smallest_margin_first() -> None:
    margins = torch.rand(60, generator=torch.Generator().manual_seed(2))
    rows = select(margins, clusters(6, 10), 6)
    assert sorted((rows // 10).tolist()) == [0, 1, 2, 3, 4, 5]
    assert margins[rows].tolist() == sorted(margins[rows].tolist())
    assert torch.equal(rows, select(margins, clusters(6, 10), 6))


def test_certain_images_are_not_selected() -> None:
    margins = torch.tensor([1.0, 0.1]).repeat_interleave(30)  # three certain and three uncertain clusters
    assert sorted((select(margins, clusters(6, 10), 3) // 10).tolist()) == [3, 4, 5]


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_equal_images_are_selected_once_each_and_a_small_pool_as_a_whole(margin: float) -> None:
    margins = torch.full((12,), margin)
    assert len(set(select(margins, torch.ones(12, 4), 8).tolist())) == 8
    assert select(torch.tensor([0.5, 0.2, 0.4]), torch.eye(3), 3).tolist() == [1, 2, 0]


@pytest.fixture(autouse=True)
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with a pool of 12 pictures, a copy, a damaged file and a text file."""
    (tmp_path / "pool" / "more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(12):
        pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pool" / ("more" if number % 2 else "") / f"{number}.png")
    (tmp_path / "pool" / "copy.png").write_bytes((tmp_path / "pool" / "0.png").read_bytes())
    (tmp_path / "pool" / "cut.png").write_bytes((tmp_path / "pool" / "0.png").read_bytes()[:60])
    (tmp_path / "pool" / "notes.txt").write_text("no picture")
    monkeypatch.chdir(tmp_path)


def test_the_table_names_readable_images_once_with_prediction_and_margin(run: Path, capsys: Capture) -> None:
    assert main(["next", str(run), "pool", "-k", "5", "--out", "made/next.csv"]) == 0
    out, err = capsys.readouterr()
    assert (
        out.splitlines()
        == [
            "5 of 14 files (1 unreadable, 0 labelled already, 1 repeated) to label: made/next.csv",
            f"label them: cifar-lit review {run} --pool made/next.csv",
        ]
        and err == NO_DATA
    )
    rows = rows_of(Path("made/next.csv"))
    assert list(rows[0]) == ["path", "label", "predicted", "probability", "margin"]
    classifier = cifar_lit.load(run)
    for row in rows:
        prediction = classifier.predict([row["path"]], top=2)[0]
        (label, first), (_, second) = prediction.top
        assert (row["label"], row["predicted"]) == ("", label)
        assert float(row["probability"]) == pytest.approx(first, abs=1e-5)
        assert float(row["margin"]) == pytest.approx(first - second, abs=1e-5)
    assert len({row["path"] for row in rows}) == 5
    assert [float(row["margin"]) for row in rows] == sorted(float(row["margin"]) for row in rows)
    assert all(Path(row["path"]).is_absolute() for row in rows)


def test_images_that_have_a_label_and_their_copies_are_left_out(run: Path, capsys: Capture) -> None:
    mine = Path(shutil.copytree(run, "run-1"))
    classes = [*cifar_lit.load(run).classes]
    Path("first-1").mkdir()
    rows = []
    for number, (name, split) in enumerate(zip([*classes, *classes], ["train"] * 7 + ["test"], strict=True)):
        source = Path("pool", "more" if number % 2 else "", f"{number}.png")
        rows.append(f"{shutil.copy(source, 'first-1')},{name},{split}")
    table = Path("first-1/labels-reviewed.csv")
    table.write_text("\n".join(["path,label,split", *rows]).replace("first-1/", ""))
    data = {"dataset": "folder", "root": str(table), "image_size": 32, "val_size": 0, "cache_dir": "cache"}
    (mine / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    for folder, number, action in (("first-1", 8, "drop"), ("run-1", 9, "keep"), ("run-1", 10, "skip")):
        path = str(Path("pool", "more" if number % 2 else "", f"{number}.png").absolute())
        label = "cat" if action == "keep" else None
        with closing(Journal(Path(folder, "review.jsonl"), classes)) as journal:
            journal.decide(Decision(path, action, label, "2026-11-24", True))
    assert main(["next", str(mine), "pool", "--trust"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 of 14 files (1 unreadable, 11 labelled already, 0 repeated) to label: ")
    assert "may be selected again" not in err
    assert {Path(row["path"]).name for row in rows_of(Path("next.csv"))} == {"10.png", "11.png"}
    assert main(["next", str(mine), "pool/0.png", "first-1", "--trust"]) == 2
    assert "9 files, and no readable image without a label: name folders with other images" in capsys.readouterr().err
    table.rename("moved.csv")
    assert main(["next", str(mine), "pool", "--trust"]) == 0
    assert "may be selected again: the images of folder are missing in first-1/labels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["pool", "-k", "0"], "count must be >0, not 0"),
        (["pool/cut.png"], "none of 1 file is a readable image"),
        (["pool", "--out", "next.png"], "give a table such as next.csv"),
        ([], "POOL must be given"),
    ],
)
def test_invalid_requests_are_refused_in_one_line(argv: list[str], line: str, run: Path, capsys: Capture) -> None:
    assert main(["next", str(run), *argv]) == 2
    err = capsys.readouterr().err
    assert line in err and err.removeprefix(NO_DATA).count("\n") == 1
    assert not Path("next.csv").exists()


def test_a_net_of_a_single_class_is_refused(tmp_path: Path, capsys: Capture) -> None:
    run = write_net(tmp_path / "one-1", "lenet", side=16, classes=["cat"])
    assert main(["next", str(run), "pool"]) == 2
    assert "has a single class and is never unsure: name another run" in capsys.readouterr().err
