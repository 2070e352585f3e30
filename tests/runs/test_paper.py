"""`report --paper`: a table row, answers to a checklist and BibTeX, which state what is known and no more."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.command_line import assert_refused, run_command

from cifar_lit.errors import UsageError
from cifar_lit.runs.paper import citations, latex, paper

DATA = {"images": "aa", "labels": "bb", "split": "cc", "train": 900, "val": 100, "test": 50, "classes": 4}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(seed: int, accuracy: float | None, lr: float = 0.1, name: str = "", **metrics: Any) -> Path:
    """Write a run folder of the recipe `small_1` in logs/."""
    path = Path("logs") / (name or f"small_1-{seed}")
    path.mkdir(parents=True)
    settings = {"model": {"lr": lr, "optimizer": "sgd"}, "data": {"split": {"seed": 7}}, "logs": "logs"}
    (path / "config.yaml").write_text(yaml.safe_dump({"seed_everything": seed, "recipe": "small_1", **settings}))
    test = None
    if accuracy is not None:
        test = {"accuracy": accuracy, "loss": 0.5, "images": 50, "fingerprint": "f"}
    content: dict[str, Any] = {"recipe": "small_1", "net": "lenet", "dataset": "cifar10", "seed": seed, "epochs": 2}
    content |= {
        "devices": 1,
        "accelerator": "cpu",
        "threads": 2,
        "precision": "32-true",
        "batch_size": 64,
        "data": DATA,
    }
    content |= {"parameters": 1234, "train_seconds": 30.0 + seed, "test": test, "versions": {"torch": "2.11"}}
    (path / "metrics.json").write_text(json.dumps({**content, **metrics}))
    return path


def row(text: str) -> list[str]:
    """Return the cells of the row in the text."""
    (line,) = [line for line in text.splitlines() if line.endswith(r"\\")]
    return line.removesuffix(r" \\").split(" & ")


def test_the_row_has_mean_and_deviation_over_seeds_and_says_what_they_are() -> None:
    accuracies = [0.9, 0.92, 0.91]
    for seed, accuracy in zip((3, 1, 10), accuracies, strict=True):
        make_run(seed, accuracy)
    text = paper(["logs"])
    spread = 100 * statistics.stdev(accuracies)
    assert row(text) == [r"small\_1", "lenet", "cifar10", "3", rf"$91.00 \pm {spread:.2f}$", "1234", "35"]
    assert "sample standard deviation of the test accuracy over 3 trainings" in text
    assert (
        "% 95 % interval of the mean over seeds (Student's t): 88.52 to 93.48 %.\n" in text
    )  # 0.91 ± 4.303 · 0.01 / √3
    assert r"\item[Seeds] 1, 3, 10 ($n = 3$)." in text
    assert r"\texttt{cifar-lit train -{}-config logs/small\_1-1/config.yaml -{}-seeds 1,3,10}" in text


def test_the_checklist_answers_what_the_runs_know_and_asks_for_the_rest() -> None:
    make_run(0, 0.9)
    make_run(1, 0.9, threads=1, versions={"torch": "2.12"}, changes=[{"step": 5, "settings": {"data.workers": 2}}])
    text = paper(["logs"])
    for answer in (
        "cifar10: 900 training, 100 validation and 50 test images of 4 classes.",
        "(split seed 7)",
        "best on the validation images (accuracy)",
        r"split \texttt{cc}.",
        "sgd with a learning rate of 0.1, batches of 64, 2 epochs.",
        "devices 1, accelerator cpu, threads 2, precision 32-true; devices 1, accelerator cpu, threads 1, ",
        "30 s for a training, 0.02 h for this row",
        "torch 2.11; torch 2.12.",
        r"% logs/small\_1-1: from step 5: data.workers 2",
        "cifar10: its authors state no licence.",
        "[State how they were chosen",
        "[State the model of the processor",
        "@techreport{krizhevsky2009,",
    ):
        assert answer in text, answer
    assert re.search(r"^\\begin\{description\}\n(\\item.*\n(  .*\n)*)+\\end\{description\}$", text, re.MULTILINE)


def test_a_fingerprint_may_break_at_the_margin() -> None:
    make_run(0, 0.9, data={**DATA, "images": "0123456789abcdef" * 4})
    digits = r"0123456789abcdef\allowbreak " * 3 + "0123456789abcdef"
    assert rf"images \texttt{{{digits}}};" in paper(["logs"])


@pytest.mark.parametrize(
    ("accuracies", "cell", "remark"),
    [
        ([0.9], "$90.00$", "% One training: there is no \\pm, and nothing is known about other seeds."),
        ([0.9, 0.92], "$91.00 \\pm 1.41$", "% The mean of two trainings has no interval."),
        ([0.9, 0.9, 0.9], "$90.00 \\pm 0.00$", "% All results are equal. Their spread is unknown"),
    ],
)
def test_fewer_than_three_or_equal_results_have_no_interval_of_the_mean(
    accuracies: list[float], cell: str, remark: str
) -> None:
    for seed, accuracy in enumerate(accuracies):
        make_run(seed, accuracy)
    text = paper(["logs"])
    assert row(text)[4] == cell and remark in text
    assert "interval of the mean over seeds" not in text
    assert ("(Wilson): 78.64 to 95.65 %" in text) == (len(accuracies) == 1)  # 45 in 50
    assert ("-seeds" in text) == (len(accuracies) > 1)


def test_a_repeated_seed_counts_once() -> None:
    make_run(0, 0.9)
    make_run(1, 0.92)
    make_run(1, 0.92, name="small_1-2")
    assert row(paper(["logs"]))[3:5] == ["2", r"$91.00 \pm 1.41$"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"lr": 0.2}, "model.lr"),
        ({"data": {**DATA, "labels": "dd"}}, "their data"),
        ({"test": {"accuracy": 0.9, "loss": 0.5, "images": 50, "fingerprint": "g"}}, "their data"),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(changes: dict[str, Any], what: str) -> None:
    make_run(0, 0.9)
    make_run(1, 0.9, **changes)
    assert_refused(run_command("report", "--paper", "logs"), 2, f"no mean of runs that differ in {what}: name runs")


def test_runs_without_a_test_or_settings_are_refused_by_name() -> None:
    make_run(0, None)
    with pytest.raises(UsageError, match=r"^logs/small_1-0: no test\. A table needs runs"):
        paper(["logs"])
    (make_run(1, 0.9) / "config.yaml").unlink()
    with pytest.raises(UsageError, match=r"^logs/small_1-1: its config\.yaml is missing"):
        paper(["logs/small_1-1"])


def test_several_runs_need_paper_and_out_names_its_file() -> None:
    make_run(0, 0.9)
    make_run(1, 0.92)
    assert_refused(run_command("report", "logs/small_1-0", "logs/small_1-1"), 2, "add --paper for several")
    printed = run_command("report", "logs/small_1-0", "logs/small_1-1", "--paper")
    written = run_command("report", "--paper", "logs", "--out", "table.tex")
    assert (printed.code, written.code) == (0, 0)
    assert Path("table.tex").read_text().splitlines() == printed.lines and row(printed.out)[3] == "2"


def test_text_is_escaped_for_latex() -> None:
    assert latex(r"50% of_a\b{c}#1 & $d^e~f<g> --h 'i'") == (
        r"50\% of\_a\textbackslash{}b\{c\}\#1 \& \$d\textasciicircum{}e\textasciitilde{}f\textless{}g\textgreater{} "
        r"-{}-h \textquotesingle{}i\textquotesingle{}"
    )
    assert latex("a\n\\end{document}") == r"a\textbackslash{}n\textbackslash{}end\{document\}"
    make_run(0, 0.9, net="evil\n\\input{x}", dataset="50%\n$&", versions={"a_b\n\\x": "1%"})
    text = paper(["logs"])
    assert row(text)[1:3] == [r"evil\textbackslash{}n\textbackslash{}input\{x\}", r"50\%\textbackslash{}n\$\&"]
    assert not re.search(r"^(?!%).*(\\input|(?<!\\)%)", text, re.MULTILINE)
    assert r"a\_b\textbackslash{}n\textbackslash{}x 1\%" in text and "[State the licence of the images.]" in text


@pytest.mark.parametrize("dataset", ["cifar100", "fashion_mnist", "shapes"])
def test_citations_are_balanced_and_name_the_data(dataset: str) -> None:
    text = citations(dataset)
    entries = re.findall(r"^@\w+\{([\w-]+),\n(?:  \w+ = \"[^\"\n]+\",?\n)+\}$", text, re.MULTILINE)
    data = {"cifar100": ["krizhevsky2009"], "fashion_mnist": ["xiao2017"], "shapes": []}
    assert entries == ["cifar-lit", *data[dataset]] and text.count("{") == text.count("}")
