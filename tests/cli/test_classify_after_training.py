from __future__ import annotations

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Typed, draw_folder, typed

import cifar_lit

ROOT = Path(__file__).parent.parent.parent
ENV = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def test_the_command_that_a_training_ends_with_classifies_and_marks(
    training: tuple[Path, Typed], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, answer = training
    monkeypatch.chdir(run.parent.parent)
    command = next(line.split() for line in answer.out.splitlines() if line.startswith("  cifar-lit classify "))
    assert command[-1] == "PICTURES"
    pictures = draw_folder(run.parent.parent / "pictures", {"cat": 2, "dog": 1})
    classified = typed(*command[1:-1], pictures, "--csv")
    assert (classified.code, classified.err) == (0, "")
    rows = list(csv.DictReader(classified.out.splitlines()))
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "0.png"]
    assert all(row["unlike"] in ("yes", "no") and float(row["novelty"]) >= 0 for row in rows)
    settings = cifar_lit.load(run).card.novelty
    assert (settings["held_out"], settings["images"]) == ("validation", [160, 40])


def test_scripts_predict_is_classify(run: Path) -> None:
    pictures = draw_folder(Path("pictures"), {"cat": 1})
    line = [sys.executable, ROOT / "scripts" / "predict.py", run, pictures, "--jsonl", "missing.png"]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["cifar-lit: 1 of 2 could not be classified; their rows say why"]
    same = typed("classify", run, pictures, "missing.png", "--jsonl")
    assert (same.code, same.out) == (1, done.stdout)


def test_a_reader_that_has_read_enough_is_no_failure(run: Path) -> None:
    pictures = draw_folder(Path("pictures"), {"cat": 30})
    line = f"{sys.executable} -m cifar_lit classify {shlex.quote(str(run))} {' '.join([str(pictures)] * 30)} | head -n 1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=ENV)
    assert done.stdout.split()[:2] == ["file", "class"] and done.stderr == ""
