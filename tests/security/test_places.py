"""Files of others write, delete and overwrite nothing outside the run, and their names stay text wherever shown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from contract.command_line import OWN_IMAGES, SMALL, copy_run, draw_folder, rows_of, run_command

from cifar_lit.base.files import is_below


@pytest.fixture
def outside(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of the user's beside the working folder."""
    (working_folder / "work").mkdir()
    shutil.move("small.yaml", "work")
    monkeypatch.chdir("work")
    notes = working_folder / "outside/notes.ckpt"
    notes.parent.mkdir()
    notes.write_text("mine")
    return notes


def test_a_link_in_a_run_is_replaced_and_not_followed(run_dir: Path, outside: Path) -> None:
    run = copy_run(run_dir)
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(outside)
    assert run_command("report", run, "--accelerator", "cpu").code == 0
    assert outside.read_text() == "mine" and "<html" in (run / "report.html").read_text()


def test_a_configuration_does_not_name_a_run_outside_the_folder_of_runs(outside: Path) -> None:
    Path("mine.yaml").write_text("recipe: ../../outside/run\n")
    answer = run_command("fit", "--config", "small.yaml", "--config", "mine.yaml")
    assert answer.code == 2 and "must be the name of a folder" in answer.err
    assert [path.name for path in outside.parent.iterdir()] == ["notes.ckpt"]


def test_a_path_is_below_a_folder_after_links_and_dots_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/link").symlink_to(tmp_path)
    below = {
        name: is_below(name, tmp_path / "runs") for name in ("a/b", ".", "a/../b", "..", "link/a", "/tmp", "../runs2")
    }
    assert [name for name, value in below.items() if value] == ["a/b", ".", "a/../b"]


def test_names_of_classes_stay_text_on_the_terminal_in_tables_and_on_pages(outside: Path) -> None:
    names = ("=1+1", "<b>bold</b>".replace("/", ""), "[red]x", "\u202eback")
    draw_folder(Path("images"), dict.fromkeys(names, 12))
    answer = run_command(
        *SMALL, *OWN_IMAGES, "--data-dir", "images", "--data.image_size", "16", "--epochs", "1", "--data.val_size", "8"
    )
    assert answer.code == 0, answer.err
    assert r"\u202eback" in answer.out and "\u202e" not in answer.out and "[red]x" in answer.out
    run = Path("lightning_logs/small-1")
    cells = {row["label"] for row in rows_of(run / "predictions.csv")}
    assert cells == {"'=1+1", "<b>bold<b>", "[red]x", r"\u202eback"}
    page = (run / "report.html").read_text()
    assert "<b>bold<b>" not in page and "&lt;b&gt;bold" in page and "\u202e" not in page
    answer = run_command("classify", run, "images", "--csv", "--top", "4")
    assert "'=1+1" in answer.out and ",=1+1" not in answer.out and "\u202e" not in answer.out
