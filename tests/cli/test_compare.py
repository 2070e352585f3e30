"""`cifar-lit compare` as it is typed."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from command_line import config_of, metrics_of, refused, started, typed

from cifar_lit.cli.compare import pair_line
from cifar_lit.runs.compare import mcnemar


@pytest.fixture
def logs(run: Path) -> Path:
    """Two runs: a real one, and its copy with another rate and more images right; their test images are said to be the same."""
    for number, wrong in ((1, 30), (2, 10)):
        folder = Path(f"logs/small-{number}")
        shutil.copytree(run, folder)
        metrics = metrics_of(folder)
        count = metrics["test"]["images"]
        metrics["test"] |= {"accuracy": 1 - wrong / count, "fingerprint": "same", "top5": 0.875}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        rows = "".join(f"{index},a,{'b' if index < wrong else 'a'},0.5\n" for index in range(count))
        (folder / "predictions.csv").write_text("index,label,predicted,probability\n" + rows)
    config = Path("logs/small-2/config.yaml")
    config.write_text(config.read_text().replace("lr: 0.05", "lr: 0.02"))
    assert config_of(Path("logs/small-2"))["model"]["lr"] == 0.02
    return Path("logs")


def test_settings_results_and_the_test_of_the_difference_are_printed(logs: Path) -> None:
    answer = typed("compare", "logs")
    assert (answer.code, answer.err) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in answer.out.splitlines() if line.startswith("│")]
    assert rows[0] == ["logs/small-1", "0.05"]
    assert rows[1] == ["logs/small-2", "0.02"]
    assert [row[:2] for row in rows[2:]] == [["logs/small-1", "25.00%"], ["logs/small-2", "75.00%"]]
    assert rows[2][2] == "14.19 … 40.19"  # Wilson's, of 10 in 40
    assert ("top5" in answer.out, answer.out.count(" 0.8750 │")) == (True, 2)  # a metric that nothing here knows by name
    assert "by recipe" not in answer.out
    lines = answer.out.splitlines()
    ahead = "logs/small-2 is ahead of logs/small-1: 20 images are right with it alone, 0 with the other alone"
    assert f"{ahead}; p = 9.5e-07, more than chance." in lines
    assert lines[-1].startswith("p is McNemar's mid-p")


def test_csv_and_json_hold_every_figure_and_a_dash_is_stdout_alone(logs: Path) -> None:
    answer = typed("compare", "logs/small-*", "--csv", "-", "--json", "out.json", "--plot", "out.png")
    first, second = csv.DictReader(io.StringIO(answer.out))
    assert (first["run"], first["model.lr"], second["model.lr"]) == ("logs/small-1", "0.05", "0.02")
    assert (first["top5"], second["top5"]) == ("0.875", "0.875")
    assert float(first["low"]) < float(first["accuracy"]) < float(first["high"])
    found = json.loads(Path("out.json").read_text())
    assert [entry["settings"] for entry in found["runs"]] == [{"model.lr": 0.05}, {"model.lr": 0.02}]
    assert found["pairs"] == [
        {"first": "logs/small-1", "second": "logs/small-2", "only_first_right": 0, "only_second_right": 20,
         "p_exact": 2**-19, "p_mid": 2**-20}
    ]  # fmt: skip
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_of_one_recipe_are_taken_together(logs: Path) -> None:
    config = Path("logs/small-2/config.yaml")
    config.write_text(config.read_text().replace("lr: 0.02", "lr: 0.05").replace("seed_everything: 3", "seed_everything: 4"))
    out = typed("compare", "logs").out
    assert "by recipe and settings, over seeds" in out
    (row,) = [line for line in out.splitlines() if line.startswith("│ small ")]
    assert [cell.strip() for cell in row.split("│")[1:3]] == ["small", "2"]
    assert "±" in row


def test_broken_runs_are_rows_and_nothing_but_broken_ones_an_error(logs: Path) -> None:
    Path("logs/broken-1").mkdir()
    answer = typed("compare", "logs/small-1", "logs/broken-1")
    assert answer.code == 0
    assert "broken: neither config.yaml nor metrics.json" in answer.out
    assert "settings that differ" not in answer.out
    refused(typed("compare", "logs/broken-1"), "cifar-lit: there is no run in logs/broken-1: …", 2)
    refused(typed("compare", "logs/none-*"), "cifar-lit: there is no logs/none-*: …", 2)
    refused(typed("compare", "logs", "--csv", "-", "--json", "-"), "cifar-lit: --csv - and --json - would be mixed…", 2)
    refused(typed("compare", "logs", "--csv", "no/where.csv"), "cifar-lit: cannot write no/where.csv: …", 1)
    refused(typed("compare", "logs", "--plot", "no/where.png"), "cifar-lit: cannot write no/where.png: …", 1)


def test_what_the_test_says_is_said_in_words() -> None:
    assert pair_line("a", "b", mcnemar(5, 5)).startswith("a and b are right equally often; 5 images")
    assert pair_line("a", "b", mcnemar(5, 6)).startswith("b is ahead of a: 6 images are right with it alone, 5")
    assert pair_line("a", "b", mcnemar(5, 6)).endswith("may be chance.")
    assert pair_line("a", "b", mcnemar(40, 10)).endswith("more than chance.")
    assert pair_line("a", "b", mcnemar(5000, 100)).endswith("p < 1e-300, more than chance.")


def test_comparing_needs_no_torch(logs: Path) -> None:
    code = "import sys; from cifar_lit.cli import main; main(['compare', 'logs']); print('torch' in sys.modules)"
    assert started("-c", code).out.splitlines()[-1] == "False"
