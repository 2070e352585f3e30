"""Reading run folders, grouping and comparing runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.cli.compare import pair_lines, repeat_line, seed_pair_lines
from cifar_lit.data.image_set import ImageSet
from cifar_lit.run.predictions import write_predictions
from cifar_lit.runs.compare import (
    PairTest,
    RunRecord,
    data_differences,
    differing,
    find_runs,
    pairs,
    read_run,
)
from cifar_lit.runs.seeds import groups, seed_pairs

MOSTLY = [True] * 8 + [False] * 2
HALF = [True] * 5 + [False] * 5


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def images_of(labels: Tensor) -> ImageSet:
    pixels = torch.zeros(len(labels), 1, 1, 3, dtype=torch.uint8)
    return ImageSet(pixels, labels, ("cat", "dog"))


def make_run(
    name: str,
    correct: Sequence[bool] | None = None,
    seed: int = 0,
    fingerprint: str | None = "f1",
    data: Any = None,
    **model: Any,
) -> RunRecord:
    """Create a run of the recipe `small`.

    Args:
        correct: whether each test image is classified correctly; None for a run without a test.
        data: the `data` entry of metrics.json.
        model: further settings of the model.
    """
    path = Path(name)
    path.mkdir(parents=True)
    settings = {"seed_everything": seed, "trainer": {"max_epochs": 2}, "model": {"net": "lenet", "lr": 0.1, **model}}
    (path / "config.yaml").write_text(yaml.safe_dump({**settings, "recipe": "small", "logs": str(path.parent)}))
    test = None
    if correct is not None:
        images = len(correct)
        test = {"accuracy": sum(correct) / images, "loss": 0.5, "images": images, "fingerprint": fingerprint}
        labels = torch.arange(images) % 2
        predicted = torch.where(torch.tensor(correct), labels, 1 - labels)
        batch = {"indices": torch.arange(images), "labels": labels, "probabilities": torch.eye(2)[predicted]}
        write_predictions(path / "predictions.csv", [batch], images_of(labels))
    metrics = {"recipe": "small", "seed": seed, "epochs": 2, "train_seconds": 10.0 + seed, "test": test, "data": data}
    (path / "metrics.json").write_text(json.dumps({**metrics, "val": {"accuracy": 0.5, "loss": 1.0}}))
    return read_run(path)


def test_runs_are_found_once_each_by_folder_or_pattern_sorted_by_number() -> None:
    for name in ("small-1", "small-2", "small-10", "other-1"):
        make_run(f"logs/{name}")
    expected = [f"logs/{name}" for name in ("other-1", "small-1", "small-2", "small-10")]
    assert [str(path) for path in find_runs(["logs"])] == expected
    assert [path.name for path in find_runs(["logs/small-*", "logs/small-1/"])] == ["small-1", "small-2", "small-10"]
    for name in ("logs/none-*", "logs/small-1/config.yaml"):
        with pytest.raises(UsageError, match=f"there is no folder {re.escape(name)}"):
            find_runs([name])


def test_settings_that_differ_are_listed_except_paths() -> None:
    runs = [make_run(f"{logs}/small-1", lr=lr, widths=[8, 16]) for logs, lr in (("a", 0.1), ("b", 0.2))]
    assert differing(runs) == {"model.lr": ["0.1", "0.2"]}
    other = make_run("c/small-1", seed=4, widths=[8])
    assert differing([runs[0], other]) == {"seed_everything": ["0", "4"], "model.widths": ["[8, 16]", "[8]"]}
    runs = [make_run(name, optimizer_options=options) for name, options in (("a-1", None), ("b-1", {"momentum": 0.5}))]
    assert differing(runs) == {"model.optimizer_options.momentum": ["–", "0.5"]}


def test_a_run_without_results_has_a_note_with_the_reason() -> None:
    assert make_run("a", MOSTLY).note == ""
    assert make_run("b").note == "no test"
    running = make_run("c").path
    (running / "metrics.json").unlink()
    assert read_run(running).note == "did not end"
    (running / ".lock").touch()
    assert read_run(running).note == "still running, or killed"
    (running / "empty").mkdir()
    assert read_run(running / "empty").note == "broken: neither config.yaml nor metrics.json"


def test_further_metrics_of_test_and_validation_are_among_the_figures() -> None:
    run = make_run("a", HALF)
    run.metrics["test"] |= {"top5": 0.99, "per_class": {"cat": 0.5}}
    run.metrics["val"] |= {"f1": 0.25}
    assert list(run.figures)[-3:] == ["parameters", "top5", "val_f1"]
    assert [run.figures[name] for name in ("accuracy", "val_accuracy", "top5", "val_f1")] == [0.5, 0.5, 0.99, 0.25]


def test_runs_that_differ_only_in_the_seed_form_a_group() -> None:
    runs = [make_run(f"small-{seed}", [True] * (6 + seed) + [False] * (4 - seed), seed) for seed in range(3)]
    runs.append(make_run("small-7", HALF, lr=0.5))
    runs.append(make_run("small-8", lr=0.7))  # without a test, ignored
    seeds, other = groups(runs)
    assert [group.settings for group in (seeds, other)] == [{"model.lr": "0.1"}, {"model.lr": "0.5"}]
    assert list(seeds.accuracies) == ["0", "1", "2"]
    accuracy = seeds.accuracy
    assert (accuracy["n"], accuracy["mean"], accuracy["std"]) == (3, pytest.approx(0.7), pytest.approx(0.1))
    assert seeds.train_seconds["mean"] == 11.0
    assert (other.accuracy["n"], other.accuracy["std"]) == (1, None)


def test_runs_whose_folder_was_changed_between_them_form_groups_by_data() -> None:
    data = [{"images": "i", "labels": "l"}, {"images": "i", "labels": "corrected"}]
    runs = [make_run(f"small-{number}", HALF, number % 2, data=data[number // 2]) for number in range(4)]
    assert [(group.settings, group.runs) for group in groups(runs)] == [
        ({"data": "1"}, ["small-0", "small-1"]),
        ({"data": "2"}, ["small-2", "small-3"]),
    ]
    assert [group.settings for group in groups(runs[:2])] == [{}]


def test_runs_that_repeat_a_seed_count_once_and_runs_without_a_seed_each() -> None:
    same = [make_run(f"a-{n}", [True] * (6 + n) + [False] * (4 - n), 3, lr=0.5) for n in range(3)]
    (group,) = groups(same)
    assert group.runs == ["a-0", "a-1", "a-2"] and group.accuracies == {"3": 0.6}
    assert (group.accuracy["n"], group.accuracy["mean"], group.accuracy["low"]) == (1, 0.6, None)
    assert group.train_seconds["n"] == 1
    assert repeat_line(group) == (
        "small: 2 of 3 runs repeat a seed, and only the first run of each seed counts (n = 1)"
    )
    unseeded = [make_run(f"b-{n}", HALF) for n in range(3)]
    for run in unseeded:
        run.settings["seed_everything"] = False
    (other,) = groups(unseeded)
    assert other.accuracy["n"] == 3 and repeat_line(other) == ""
    mixed = groups([unseeded[0], make_run("b-3", HALF, 7), make_run("c-0", HALF, 7, lr=0.5), make_run("c-1", lr=0.5)])
    assert len(mixed) == 2 and seed_pairs(mixed) == []  # they share one seed, and runs without a seed are not paired


def test_the_recipe_is_no_setting_of_a_group() -> None:
    runs = [make_run(name, HALF) for name in ("a", "b")]
    runs[1].settings["recipe"] = runs[1].metrics["recipe"] = "other"
    assert [(group.recipe, group.settings) for group in groups(runs)] == [("small", {}), ("other", {})]


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([1, 1], "+10.00 points over 2 equal seeds, no verdict from fewer than 3 seeds"),
        ([2, 2, 2], "+20.00 points over 3 equal seeds, no verdict, because all differences are equal"),
        ([1, 2, -1], "+6.67 points over 3 equal seeds, not significant (p = 0.54)"),
        ([5, 6, 4], "+50.00 points over 3 equal seeds, significant (p = 0.014)"),
    ],
)
def test_a_verdict_on_two_groups_needs_three_seeds_and_a_spread(differences: list[int], words: str) -> None:
    runs = [make_run(f"a-{seed}", [True] * (3 + n) + [False] * (7 - n), seed) for seed, n in enumerate(differences)]
    runs += [make_run(f"b-{seed}", [True] * 3 + [False] * 7, seed, lr=0.5) for seed in range(len(differences))]
    grouped = groups(runs)
    (pair,) = seed_pairs(grouped)
    first, *lines = seed_pair_lines(grouped, pair)
    assert first == f"small · lr 0.1 minus small · lr 0.5: {words}"
    assert any("over seeds" in line for line in lines) == ("no verdict" not in words)


def compared(runs: list[RunRecord]) -> tuple[list[PairTest], list[str]]:
    return pairs(runs)


def test_pairs_count_the_images_that_only_one_run_classifies_correctly_on_the_same_test_images() -> None:
    first = make_run("a", [True, True, True, False, True, False])
    second = make_run("b", [True, False, False, True, False, False])
    assert compared([first, second]) == ([("a", "b", 3, 1, pytest.approx(6 / 16))], [])
    other = make_run("c", HALF, fingerprint="f2")
    tests, lines = compared([first, second, other])
    assert [test[:2] for test in tests] == [("a", "b")]
    assert lines == ["runs with different test images are not compared image by image"]
    truncated = make_run("e", HALF)
    predictions = truncated.path / "predictions.csv"
    lines = predictions.read_text().splitlines(keepends=True)
    predictions.write_text("".join(lines[:-1]))
    reason = "not compared image by image, because predictions.csv is missing or incomplete: e"
    assert compared([first, truncated]) == ([], [reason])


def test_p_values_are_corrected_for_the_number_of_pairs() -> None:
    hits = {"a": [False] * 7, "b": [True] * 7, "c": [True] * 7}
    tests, _ = compared([make_run(name, correct) for name, correct in hits.items()])
    assert [test.p for test in tests] == pytest.approx([3 / 2**7, 3 / 2**7, 1])  # 1 / 2⁷ each, times three
    assert pair_lines(tests)[-1].endswith("(Holm): 3 pairs")


def test_p_values_of_groups_are_corrected_for_the_number_of_pairs() -> None:
    # Group a is right on 7, 6 and 8 of 10 images, group b on 6, 4 and 7.
    runs = [make_run(f"a-{seed}", [True] * n + [False] * (10 - n), seed) for seed, n in enumerate((7, 6, 8))]
    runs += [make_run(f"b-{seed}", [True] * n + [False] * (10 - n), seed, lr=0.5) for seed, n in enumerate((6, 4, 7))]
    grouped = groups(runs)
    (pair,) = seed_pairs(grouped)
    ps = [each.over_seeds["p"] for each in seed_pairs([*grouped, grouped[1]])]
    assert ps == [pytest.approx(2 * pair.over_seeds["p"])] * 2 + [None]


def test_what_differs_in_the_data_is_named() -> None:
    data = {"images": "i", "labels": "l", "split": "s", "train": 18000, "val": 2000, "classes": 4}
    runs = [make_run("a", HALF, data=data), make_run("b", HALF, data=data | {"images": "j", "val": 1000})]
    (line,) = data_differences(runs)
    assert line == "a and b used different data: images, val"
