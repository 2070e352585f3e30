from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
from odd_files import picture

import cifar_lit
from cifar_lit.cli import main

COLUMNS = ["index", "label", "probability", "class_2", "probability_2", "class_3", "probability_3",
           "path", "novelty", "unknown", "prediction_set", "error"]  # fmt: skip

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with three pictures, a hidden file and a text file."""
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for number, name in enumerate(("2.png", "10.jpg", "more/1.webp")):
        picture(40 + number).save(tmp_path / "pictures" / name)
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    (tmp_path / "pictures" / ".hidden.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)


def classify(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    code = main(["classify", *map(str, argv)])
    return code, *capsys.readouterr()


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def paths(text: str) -> list[str]:
    return [row["path"] for row in rows(text)]


def test_csv_and_jsonl_rows_hold_the_predictions_of_the_classifier(run: Path, capsys: Capture) -> None:
    code, out, err = classify(capsys, run, "pictures", "--csv")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split(",") == COLUMNS
    assert paths(out) == ["pictures/2.png", "pictures/10.jpg", "pictures/more/1.webp"]
    for row, prediction in zip(rows(out), cifar_lit.load(run).predict(paths(out)), strict=True):
        best = [(row["label"], row["probability"]), *((row[f"class_{k}"], row[f"probability_{k}"]) for k in (2, 3))]
        assert best == [(name, f"{probability:.6f}") for name, probability in prediction.top]
        assert row["novelty"] == f"{prediction.novelty:.6f}"
        assert row["unknown"] == row["prediction_set"] == row["error"] == ""
    code, out, _ = classify(capsys, run, "--jsonl", "pictures/2.png", "missing.png", "--top", 9)
    first, second = map(json.loads, out.splitlines())
    assert code == 1
    assert list(first) == [*COLUMNS[:7], "class_4", "probability_4", *COLUMNS[7:]]  # all four classes
    assert sum(first[name] for name in first if name.startswith("probability")) == pytest.approx(1, abs=1e-5)
    label = cifar_lit.load(run).predict(["pictures/2.png"])[0].label
    assert (first["index"], first["label"], first["error"]) == (0, label, None)
    assert (second["label"], second["probability"], second["error"]) == (None, None, "missing: there is no such file")
    answer = classify(capsys, run, "--csv", "made/a.csv", "--jsonl=b.jsonl", "pictures")
    assert answer == (0, "", "3 rows in b.jsonl\n3 rows in made/a.csv\n")
    assert len(rows(Path("made/a.csv").read_text())) == len(Path("b.jsonl").read_text().splitlines()) == 3


def test_the_table_shows_files_classes_unknown_images_and_errors(reject_run: Path, capsys: Capture) -> None:
    Path("pictures/cut.jpg").write_bytes(Path("pictures/10.jpg").read_bytes()[:-300])
    code, out, err = classify(capsys, reject_run, *["pictures"] * 20)  # more than one chunk
    lines = [line.rstrip() for line in out.splitlines()]
    assert code == 1 and "cifar-lit: 20 of 80 files could not be classified; their rows give the reason\n" in err
    assert len(lines) == 81 and set(lines[1::4]) == {lines[1]}
    assert " ".join(lines[0].split()) == "file class 1 prob 1 class 2 prob 2 class 3 prob 3 unknown"
    top = cifar_lit.load(reject_run).predict("pictures/2.png")[0].top
    classes = " ".join(f"{name} {probability:.3f}" for name, probability in top)
    assert " ".join(lines[1].split()) == f"pictures/2.png {classes} unknown"
    assert lines[3].split() == ["pictures/cut.jpg", "cut", "short"]


def test_several_processes_predict_the_same_as_one(run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    files = ["pictures/2.png", "missing.png", "pictures/10.jpg"] * 70
    code, many, err = classify(capsys, run, "--csv", *files)
    assert code == 1 and "70 of 210 files could not be classified" in err
    assert paths(many) == files
    assert [row["index"] for row in rows(many)] == [str(number) for number in range(210)]
    few = rows(classify(capsys, run, "--csv", *files[:3])[1])
    assert [row["probability"] for row in rows(many)] == [row["probability"] for row in few] * 70


# ---- paths


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("pictures/**/*.webp pictures/a[1].png", ["pictures/more/1.webp", "pictures/a[1].png"]),
        ("pictures/*.[jp]*g", ["pictures/2.png", "pictures/10.jpg", "pictures/a[1].png"]),
        ("pictures/m*", ["pictures/more/1.webp"]),
        ("-- --csv.png pictures/2.png", ["--csv.png", "pictures/2.png"]),
    ],
)
def test_patterns_folders_and_files_keep_their_order(
    run: Path, capsys: Capture, argv: str, expected: list[str]
) -> None:
    for name in ("pictures/a[1].png", "--csv.png"):
        shutil.copy("pictures/2.png", name)
    code, out, _ = classify(capsys, run, "--csv", *argv.split())
    assert (code, paths(out)) == (0, expected)


LIST = "pictures/more\r\n\r\n'pictures/2.png'\r\n*.png\r\n"


@pytest.mark.parametrize(
    "stdin",
    [
        *(LIST.encode(code) for code in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")),
        b"pictures/more\0pictures/2.png\0*.png\0",
        b"pictures/more\npictures/more/1.webp\npictures/2.png\n*.png",  # find lists a folder before its files
    ],
)
def test_a_list_may_come_from_any_system(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, stdin: bytes
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    code, out, _ = classify(capsys, run, "--csv", "-")
    assert (code, paths(out)) == (1, ["pictures/more/1.webp", "pictures/2.png", "*.png"])


@pytest.mark.parametrize("folder", ["/", "..", ".", "pictures/.."])
def test_a_list_does_not_select_the_folder_that_one_works_in(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{folder}\0pictures/2.png\0".encode())))
    code, out, _ = classify(capsys, run, "--csv", "-")
    assert (code, paths(out)) == (1, [folder, "pictures/2.png"])
    assert "a list does not select the working folder" in rows(out)[0]["error"]


def test_link_cycles_are_skipped_and_missing_files_are_rows(run: Path, capsys: Capture) -> None:
    for name in ("again", "and_again"):
        Path("pictures/more", name).symlink_to(Path("pictures").absolute())
    for path in ("pictures", "pictures/**/*.*[gp]", "**/1.webp"):  # each folder once
        found = paths(classify(capsys, run, "--csv", path)[1])
        assert len(found) == len(set(found)) == (1 if "1" in path else 3), path
    Path("empty").mkdir()
    _, out, _ = classify(capsys, run, "--csv", "empty", "none*.png", "pictures/2.png", "pictures/notes.txt")
    assert [row["error"].partition(",")[0] for row in rows(out)] == [
        "the folder contains no JPEG", "no file matches this pattern", "", "not a JPEG",
    ]  # fmt: skip


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_may_be_typed_in_another_form(run: Path, capsys: Capture, forms: tuple[str, str]) -> None:
    on_disk, typed = (unicodedata.normalize(form, "Käse/é.png") for form in forms)
    Path(on_disk).parent.mkdir()
    picture().save(on_disk)
    code, out, _ = classify(capsys, run, "--csv", typed, typed.split("/")[0])
    assert (code, paths(out)) == (0, [on_disk] * 2)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes")
def test_a_named_pipe_in_a_folder_is_skipped(run: Path, capsys: Capture) -> None:
    os.mkfifo("pictures/pipe.png")
    code, out, _ = classify(capsys, run, "--csv", "pictures/more", "pictures")
    assert (code, "pipe" in out, len(paths(out))) == (0, False, 4)


# ---- errors


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("", "classify needs a run and images"),
        ("pictures --top 0", "top"),
        ("pictures --accelerator tpu", "this machine has no device 'tpu': it has cpu"),
        ("pictures --topp 2", "there is no flag --topp. Did you mean --top?"),
    ],
)
def test_invalid_arguments_are_refused(run: Path, capsys: Capture, argv: str, text: str) -> None:
    code, out, err = classify(capsys, run, *argv.split())
    assert (code, out, err.count("\n"), text in err) == (2, "", 1, True), err
