"""What is read out of run folders, what is made of several, and how sure it is."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from made_runs import made_run
from PIL import Image

from cifar_lit.errors import UsageError
from cifar_lit.runs.compare import (
    RunRecord,
    curve,
    differing,
    find_runs,
    flattened,
    groups,
    mcnemar,
    pairs,
    plot_curves,
    read_run,
    seconds_per_epoch,
    wilson_interval,
)

MOSTLY = [True] * 8 + [False] * 2
HALF = [True] * 5 + [False] * 5


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_are_found_by_folder_pattern_and_logs_each_once_in_order_of_number() -> None:
    for number in (1, 2, 10):
        made_run(Path(f"logs/small-{number}"))
    made_run(Path("logs/other-1"))
    assert [str(path) for path in find_runs(["logs"])] == ["logs/other-1", "logs/small-1", "logs/small-2", "logs/small-10"]
    assert [path.name for path in find_runs(["logs/small-*", "logs/small-1/"])] == ["small-1", "small-2", "small-10"]
    for name, reason in (("logs/none-*", r"there is no logs/none-\*"), ("logs/small-1/config.yaml", "is a file")):
        with pytest.raises(UsageError, match=reason):
            find_runs([name])


def test_only_settings_that_differ_are_named_without_those_of_places() -> None:
    runs = [read_run(made_run(Path(f"{place}/small-1"), lr=lr, widths=[8, 16])) for place, lr in (("a", 0.1), ("b", 0.2))]
    assert differing(runs) == {"model.lr": ["0.1", "0.2"]}
    more = read_run(made_run(Path("c/small-1"), seed=4, widths=[8]))
    assert differing([runs[0], more]) == {"seed_everything": ["0", "4"], "model.widths": ["[8, 16]", "[8]"]}
    assert differing([runs[0], read_run(made_run(Path("d/small-1")))]) == {"model.widths": ["[8, 16]", "–"]}
    assert differing(runs[:1]) == {}
    assert flattened({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


def test_runs_without_their_figures_say_why() -> None:
    assert read_run(made_run(Path("a"), MOSTLY)).note == ""
    assert read_run(made_run(Path("b"))).note == "no test"
    running = made_run(Path("c"))
    (running / "metrics.json").unlink()
    assert read_run(running).note == "did not end"
    (running / ".lock").touch()
    with (running / "metrics.csv").open("a") as file:
        file.write("2,30,0.0,0.x")  # the row that is being written
    record = read_run(running)
    assert record.note == "still running, or killed"
    assert [row.get("train/loss") for row in record.curves] == [1.5, 1.0, None]
    (running / "metrics.json").write_text('{"recipe":')
    assert read_run(running).note == "damaged: metrics.json cannot be read"
    Path("empty").mkdir()
    assert read_run(Path("empty")).note == "broken: neither config.yaml nor metrics.json"
    old = made_run(Path("d"), MOSTLY)
    (old / "config.yaml").write_text("a: [")
    assert read_run(old).note == "its config.yaml is missing or damaged"


def test_whatever_a_test_or_a_validation_counted_is_among_the_figures() -> None:
    run = made_run(Path("a"), HALF)
    metrics = json.loads((run / "metrics.json").read_text())
    metrics["test"] |= {"top5": 0.99, "per_class": {"cat": 0.5}}
    metrics["val"] |= {"f1": 0.25}
    (run / "metrics.json").write_text(json.dumps(metrics))
    figures = read_run(run).figures
    assert list(figures)[-3:] == ["epochs", "top5", "val_f1"]
    assert (figures["accuracy"], figures["val_accuracy"], figures["top5"], figures["val_f1"]) == (0.5, 0.5, 0.99, 0.25)


def test_groups_are_of_the_same_settings_but_for_the_seed() -> None:
    runs = [read_run(made_run(Path(f"small-{seed}"), [True] * (6 + seed) + [False] * (4 - seed), seed=seed)) for seed in range(3)]
    runs.append(read_run(made_run(Path("small-7"), HALF, lr=0.5)))
    runs.append(read_run(made_run(Path("small-8"), lr=0.7)))  # not tested: neither a member nor a difference
    seeds, other = groups(runs)
    assert (seeds["settings"], other["settings"]) == ({"model.lr": "0.1"}, {"model.lr": "0.5"})
    assert seeds["seeds"] == [0, 1, 2]
    accuracy = seeds["accuracy"]
    assert (accuracy["n"], accuracy["mean"], accuracy["std"]) == (3, pytest.approx(0.7), pytest.approx(0.1))
    assert accuracy["high"] - accuracy["mean"] == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-4)  # t of 2 degrees
    assert seeds["train_seconds"]["mean"] == 11.0
    assert (other["accuracy"]["n"], other["accuracy"]["std"]) == (1, None)


def test_pairs_count_the_images_that_only_one_has_right() -> None:
    first = read_run(made_run(Path("a"), [True, True, True, False, True, False]))
    second = read_run(made_run(Path("b"), [True, False, False, True, False, False]))
    ((one, other, test),), lines = pairs([first, second])
    assert (one, other, test.first, test.second) == ("a", "b", 3, 1)
    assert test.exact == pytest.approx(10 / 16)
    assert lines == []


def test_runs_of_other_or_unknown_test_images_are_left_out_with_a_line() -> None:
    a, b = (read_run(made_run(Path(name), MOSTLY)) for name in "ab")
    other = read_run(made_run(Path("c"), HALF, fingerprint="f2"))
    tests, lines = pairs([a, b, other])
    assert [(first, second) for first, second, _ in tests] == [("a", "b")]
    assert lines == ["runs that were tested on other images than each other are not tested against each other"]
    old = read_run(made_run(Path("d"), HALF, fingerprint=None))
    cut = read_run(made_run(Path("e"), HALF))
    rows = (cut.path / "predictions.csv").read_text().splitlines()
    (cut.path / "predictions.csv").write_text("\n".join(rows[:-1]))
    tests, lines = pairs([a, old, cut])
    assert tests == []
    assert lines == ["not tested against the others image by image, for want of a whole predictions.csv: d, e"]


def test_many_runs_are_each_tested_against_the_best() -> None:
    runs = [read_run(made_run(Path(f"small-{count}"), [True] * count + [False] * (10 - count))) for count in range(1, 8)]
    tests, lines = pairs(runs)
    assert [first for first, _, _ in tests] == ["small-7"] * 6
    assert len(lines) == 1
    assert lines[0].startswith("small-7 was chosen as the best on these same images")


# ---- intervals and tests, against values worked by hand or counted out


@pytest.mark.parametrize(
    ("right", "count", "interval"),
    [
        (5, 10, (0.23659, 0.76341)),  # middle 0.5, half 1.96 · sqrt(0.025 + 0.0096036) / 1.384146 = 0.26341
        (0, 10, (0.0, 0.27753)),  # from 0 to z² / (n + z²) = 3.8415 / 13.8415
        (10, 10, (0.72247, 1.0)),
        (9400, 10000, (0.93518, 0.94449)),  # for many images nearly the normal's: 0.94 ± 1.96 · 0.0023749
    ],
)
def test_wilsons_interval_is_that_of_worked_examples(right: int, count: int, interval: tuple[float, float]) -> None:
    assert wilson_interval(right, count) == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 3), (2, 7), (9, 1), (5, 6)])
def test_mcnemars_p_is_the_share_of_all_ways_to_split(first: int, second: int) -> None:
    """Every way in which the images could have fallen to the one or the other, counted."""
    count = first + second
    splits = [sum(way) for way in product((0, 1), repeat=count)]
    as_much = sum(abs(2 * split - count) >= abs(first - second) for split in splits) / len(splits)
    itself = sum(split == min(first, second) for split in splits) / len(splits)  # its mirror image counts too unless it is even
    test = mcnemar(first, second)
    assert test.exact == pytest.approx(as_much)
    assert test.mid == pytest.approx(as_much - (itself / 2 if first == second and count else 0 if not count else itself))
    assert mcnemar(second, first)[2:] == test[2:]


def test_mcnemar_holds_for_many_images() -> None:
    assert mcnemar(2600, 2400).mid == pytest.approx(0.00468, abs=2e-4)  # the normal's: z = 200 / sqrt(5000) = 2.828
    assert 0 < mcnemar(500, 100).exact < 1e-50


# ---- the picture of several runs' curves


def test_a_curve_is_over_epochs_that_have_ended() -> None:
    run = read_run(made_run(Path("small-1")))
    assert curve(run, "val/accuracy") == ([1.0, 2.0], [0.45, 0.5])
    assert seconds_per_epoch(run) == 5.0
    assert seconds_per_epoch(RunRecord(Path("none"), "none")) is None


def test_ten_runs_are_drawn_with_a_line_each_and_one_entry_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kept: figures.append(self))
    runs = [read_run(made_run(Path(f"small-{number}"))) for number in range(10)]
    plot_curves(runs, [run.path.name for run in runs], Path("a.png"))
    plot_curves(runs, ["one"] * 5 + ["other"] * 5, Path("b.png"))
    assert [len(axes.get_lines()) for axes in figures[0].axes] == [10] * 4
    assert len({(line.get_color(), line.get_linestyle()) for line in figures[0].axes[0].get_lines()}) == 10
    assert figures[0].axes[0].get_ylabel() == "validation accuracy, %"
    assert [text.get_text() for text in figures[1].legends[0].get_texts()] == ["one", "other"]


def test_without_times_and_validation_there_is_one_column_of_training_curves() -> None:
    curves = [
        {name: value for name, value in row.items() if name != "val/accuracy"} for row in read_run(made_run(Path("b"))).curves
    ]
    plot_curves([RunRecord(Path("a"), "a", curves=curves)], ["a"], Path("a.png"))
    with Image.open("a.png") as image:
        assert image.format == "PNG"
        assert image.width < 1000
    with pytest.raises(ValueError, match="none of these runs has a curve"):
        plot_curves([RunRecord(Path("a"), "a")], ["a"], Path("b.png"))
