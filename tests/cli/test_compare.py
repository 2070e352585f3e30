"""`cifar-lit compare` on the command line."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from contract.command_line import assert_refused, metrics_of, run_command, run_process, table_rows

from cifar_lit.base.stats import mcnemar
from cifar_lit.cli.compare import pair_lines
from cifar_lit.runs.compare import PairTest


@pytest.fixture
def logs(run_dir: Path) -> Path:
    """Create two runs on the same test images: the second has another learning rate and fewer mistakes."""
    for number, mistakes in ((1, 30), (2, 10)):
        folder = Path(f"logs/small-{number}")
        shutil.copytree(run_dir, folder)
        metrics = metrics_of(folder)
        metrics["test"] |= {"accuracy": 1 - mistakes / 40, "fingerprint": "same", "top5": 0.875, "auroc": 0.625}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        rows = "".join(f"{index},a,{'b' if index < mistakes else 'a'},0.5\n" for index in range(40))
        (folder / "predictions.csv").write_text("index,label,predicted,probability\n" + rows)
    config = Path("logs/small-2/config.yaml")
    config.write_text(config.read_text().replace("lr: 0.05", "lr: 0.02"))
    return Path("logs")


def test_compare_prints_settings_results_and_a_significance_test(logs: Path, working_folder: Path) -> None:
    code = "import sys; from cifar_lit.cli import main; main(['compare', 'logs']); print('torch' in sys.modules)"
    answer = run_process([sys.executable, "-c", code], working_folder, COLUMNS="200")
    assert answer.err == ""
    rows = table_rows(answer.out)
    assert rows[:2] == [["logs/small-1", "0.05"], ["logs/small-2", "0.02"]]
    assert [row[:2] for row in rows[2:]] == [["logs/small-1", "25.00%"], ["logs/small-2", "75.00%"]]
    assert rows[2][2] == "14.19 … 40.19"  # Wilson interval of 10 in 40
    assert re.search("┃ +balanced ┃ +F1 ┃", answer.out) and "val balanced" not in answer.out
    assert re.search("┃ +top 5 ┃", answer.out) and answer.out.count(" 87.50% │") == 2
    assert "auroc" in answer.out and answer.out.count(" 0.6250 │") == 2  # a metric unknown to the package
    assert "by recipe" not in answer.out
    verdict = "logs/small-2 is significantly better than logs/small-1 (p = 9.5e-07): 20 images correct only in "
    assert f"{verdict}the first, 0 only in the second. p: " in " ".join(answer.out.split())
    assert "(McNemar's mid-p)" in answer.out and "not their recipes" in answer.out
    assert answer.lines[-1] == "False"  # torch is not imported


def test_runs_that_differ_in_the_seed_are_averaged(logs: Path) -> None:
    config = Path("logs/small-2/config.yaml")
    text = config.read_text().replace("lr: 0.02", "lr: 0.05")
    config.write_text(text.replace("seed_everything: 3", "seed_everything: 4"))
    answer = run_command("compare", "logs")
    assert "by recipe and settings, over seeds" in answer.out
    (row,) = [row for row in table_rows(answer.out) if row[0] == "small"]
    assert (row[1], "±" in row[2]) == ("2", True)


def test_a_broken_run_is_a_row_and_broken_runs_alone_are_an_error(logs: Path) -> None:
    Path("logs/broken-1").mkdir()
    answer = run_command("compare", "logs/small-1", "logs/broken-1")
    assert answer.code == 0
    assert "broken: neither config.yaml nor metrics.json" in answer.out
    Path("logs/broken-1/folds.json").write_text("{}")
    assert "a cross-validation: compare its runs" in run_command("compare", "logs/small-1", "logs/broken-1").out
    Path("logs/broken-1/folds.json").unlink()
    assert_refused(run_command("compare", "logs/broken-1"), 2, "no run in logs/broken-1: ")


def test_a_table_wider_than_80_columns_becomes_paragraphs_that_split_no_path(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = logs.rename("logs of an experiment with a name of more than eighty letters, which no line can hold")
    answer = run_command("compare", str(long))
    assert f"  {long}/small-1\n    accuracy 25.00% · 95 % interval 14.19 … 40.19 · " in answer.out
    assert not [line for line in answer.lines if len(line) > 80 and str(long) not in line]
    assert answer.out.count(f"{long}/small-") == 6  # in settings, results and test


def test_an_even_pair_has_no_better_run() -> None:
    (line, *_) = pair_lines([PairTest("a", "b", 7, 7, mcnemar(7, 7))])
    assert line.startswith("a and b do not differ significantly (p = 0.9): 7 images")
