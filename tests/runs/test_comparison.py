"""What is read out of run folders, what is made of several, and how sure it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cifar_lit.errors import UsageError
from cifar_lit.runs.compare import RunRecord, differing, find_runs, groups, pairs, plot_curves, read_run
from cifar_lit.runs.predictions import write_predictions

MOSTLY = [True] * 8 + [False] * 2
HALF = [True] * 5 + [False] * 5
CURVES = (
    "epoch,step,lr,train/loss,train/accuracy,val/loss,val/accuracy,test/loss,test/accuracy\n"
    "0,10,0.1,1.5,0.4,1.4,0.45,,\n1,20,0.05,1.0,0.6,1.1,0.5,,\n2,20,,,,,,0.5,0.5\n"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made_run(
    name: str, right: Sequence[bool] | None = None, seed: int = 0, fingerprint: str | None = "f1", **model: Any
) -> RunRecord:
    """A run folder of the recipe `small`; right: for each test image, whether it is named right; None for a run without test."""
    path = Path(name)
    path.mkdir(parents=True)
    settings = {"seed_everything": seed, "trainer": {"max_epochs": 2}, "model": {"net": "lenet", "lr": 0.1, **model}}
    (path / "config.yaml").write_text(yaml.safe_dump({**settings, "recipe": "small", "logs": str(path.parent)}))
    test = None
    if right is not None:
        test = {"accuracy": sum(right) / len(right), "loss": 0.5, "images": len(right), "fingerprint": fingerprint}
        labels = torch.arange(len(right)) % 2
        named = torch.where(torch.tensor(right), labels, 1 - labels)
        batch = {"indices": torch.arange(len(right)), "labels": labels, "probabilities": torch.eye(2)[named]}
        write_predictions(path / "predictions.csv", ("cat", "dog"), [batch])
    metrics = {"recipe": "small", "seed": seed, "epochs": 2, "train_seconds": 10.0 + seed, "test": test}
    (path / "metrics.json").write_text(json.dumps({**metrics, "val": {"accuracy": 0.5, "loss": 1.0}}))
    (path / "metrics.csv").write_text(CURVES)
    return read_run(path)


def test_runs_are_found_by_folder_pattern_and_logs_each_once_in_order_of_number() -> None:
    for name in ("small-1", "small-2", "small-10", "other-1"):
        made_run(f"logs/{name}")
    assert [str(path) for path in find_runs(["logs"])] == [
        "logs/other-1",
        "logs/small-1",
        "logs/small-2",
        "logs/small-10",
    ]
    assert [path.name for path in find_runs(["logs/small-*", "logs/small-1/"])] == ["small-1", "small-2", "small-10"]
    for name, reason in (("logs/none-*", r"there is no logs/none-\*"), ("logs/small-1/config.yaml", "is a file")):
        with pytest.raises(UsageError, match=reason):
            find_runs([name])


def test_a_folder_may_end_in_a_digit_that_is_no_number() -> None:
    for name in ("logs/a-10", "logs/a-9", "logs/a-²"):
        made_run(name)
    assert [run.name for run in find_runs(["logs"])] == ["a-9", "a-10", "a-²"]


def test_only_settings_that_differ_are_named_without_those_of_places() -> None:
    runs = [made_run(f"{place}/small-1", lr=lr, widths=[8, 16]) for place, lr in (("a", 0.1), ("b", 0.2))]
    assert differing(runs) == {"model.lr": ["0.1", "0.2"]}
    more = made_run("c/small-1", seed=4, widths=[8])
    assert differing([runs[0], more]) == {"seed_everything": ["0", "4"], "model.widths": ["[8, 16]", "[8]"]}
    unknown = RunRecord(Path("none"), "none")  # does not count, but has its place
    assert differing([runs[0], unknown, made_run("d/small-1")]) == {"model.widths": ["[8, 16]", "–", "–"]}


def test_runs_without_their_figures_say_why() -> None:
    assert made_run("a", MOSTLY).note == ""
    assert made_run("b").note == "no test"
    running = made_run("c").path
    (running / "metrics.json").unlink()
    assert read_run(running).note == "did not end"
    (running / ".lock").touch()
    assert read_run(running).note == "still running, or killed"
    (running / "metrics.json").write_text('{"recipe":')
    assert read_run(running).note == "damaged: metrics.json cannot be read"
    (running / "empty").mkdir()
    assert read_run(running / "empty").note == "broken: neither config.yaml nor metrics.json"
    (made_run("d", MOSTLY).path / "config.yaml").write_text("a: [")
    assert read_run(Path("d")).note == "its config.yaml is missing or damaged"


def test_whatever_a_test_or_a_validation_counted_is_among_the_figures() -> None:
    run = made_run("a", HALF)
    run.metrics["test"] |= {"top5": 0.99, "per_class": {"cat": 0.5}}
    run.metrics["val"] |= {"f1": 0.25}
    assert list(run.figures)[-3:] == ["epochs", "top5", "val_f1"]
    assert [run.figures[name] for name in ("accuracy", "val_accuracy", "top5", "val_f1")] == [0.5, 0.5, 0.99, 0.25]


def test_groups_are_of_the_same_settings_but_for_the_seed() -> None:
    runs = [made_run(f"small-{seed}", [True] * (6 + seed) + [False] * (4 - seed), seed) for seed in range(3)]
    runs.append(made_run("small-7", HALF, lr=0.5))
    runs.append(made_run("small-8", lr=0.7))  # not tested: neither a member nor a difference
    seeds, other = groups(runs)
    assert (seeds["settings"], other["settings"], seeds["seeds"]) == (
        {"model.lr": "0.1"},
        {"model.lr": "0.5"},
        [0, 1, 2],
    )
    accuracy = seeds["accuracy"]
    assert (accuracy["n"], accuracy["mean"], accuracy["std"]) == (3, pytest.approx(0.7), pytest.approx(0.1))
    assert accuracy["high"] - accuracy["mean"] == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-4)  # t of 2 degrees
    assert seeds["train_seconds"]["mean"] == 11.0
    assert (other["accuracy"]["n"], other["accuracy"]["std"]) == (1, None)


def test_pairs_count_the_images_that_only_one_has_right_and_leave_out_other_test_images() -> None:
    first, second = (
        made_run("a", [True, True, True, False, True, False]),
        made_run("b", [True, False, False, True, False, False]),
    )
    assert pairs([first, second]) == ([("a", "b", (3, 1, pytest.approx(10 / 16), pytest.approx(6 / 16)))], [])
    other = made_run("c", HALF, fingerprint="f2")
    tests, lines = pairs([first, second, other])
    assert [names for *names, _ in tests] == [["a", "b"]]
    assert lines == ["runs with different test images are not compared image by image"]
    old, cut = made_run("d", HALF, fingerprint=None), made_run("e", HALF)
    rows = (cut.path / "predictions.csv").read_text().splitlines(keepends=True)
    (cut.path / "predictions.csv").write_text("".join(rows[:-1]))
    reason = "not compared image by image, because predictions.csv is missing or incomplete: d, e"
    assert pairs([first, old, cut]) == ([], [reason])


def test_many_runs_are_each_tested_against_the_best() -> None:
    runs = [made_run(f"small-{count}", [True] * count + [False] * (10 - count)) for count in range(1, 8)]
    tests, (line,) = pairs(runs)
    assert [first for first, _, _ in tests] == ["small-7"] * 6
    assert line.startswith("small-7 was selected as the best on these images")
    best_of_others = made_run("other", [True] * 10, fingerprint="f2")
    with_others, lines = pairs([*runs, best_of_others])
    assert with_others == tests and lines[1:] == [line] and "different test images" in lines[0]


# ---- the picture of several runs' curves


def test_runs_are_drawn_with_a_line_each_and_one_entry_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kept: figures.append(self))
    runs = [made_run(f"small-{number}") for number in range(10)]
    plot_curves(runs, [run.name for run in runs], Path("a.png"))
    plot_curves(runs, ["one"] * 5 + ["other"] * 5, Path("b.png"))
    assert [len(axes.get_lines()) for axes in figures[0].axes] == [10] * 4
    lines = figures[0].axes[0].get_lines()
    assert (list(lines[0].get_xdata()), list(lines[0].get_ydata())) == ([1, 2], [45, 50])
    assert [text.get_text() for text in figures[1].legends[0].get_texts()] == ["one", "other"]

    untimed = RunRecord(Path("b"), "b")
    Path("b").mkdir()
    with pytest.raises(ValueError, match="none of these runs has a curve"):
        plot_curves([untimed], ["b"], Path("c.png"))
    Path("b/metrics.csv").write_text(CURVES.replace("val/accuracy", "other"))
    plot_curves([untimed], ["b"], Path("c.png"))
    assert [axes.get_ylabel() for axes in figures[2].axes] == ["training accuracy, %", "training loss"]
