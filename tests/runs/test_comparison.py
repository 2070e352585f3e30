"""What is read out of run folders, and what is made of several."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import made_run

from cifar_lit.errors import UsageError
from cifar_lit.runs.compare import differing, find_runs, flattened, groups, pairs, read_run

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
    with pytest.raises(UsageError, match=r"there is no logs/none-\*"):
        find_runs(["logs/none-*"])
    with pytest.raises(UsageError, match="is a file"):
        find_runs(["logs/small-1/config.yaml"])


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
    assert [row["train/loss"] for row in record.curves] == [1.5, 1.0, None]
    (running / "metrics.json").write_text('{"recipe":')
    assert read_run(running).note == "damaged: metrics.json cannot be read"
    Path("empty").mkdir()
    assert read_run(Path("empty")).note == "broken: neither config.yaml nor metrics.json"
    old = made_run(Path("d"), MOSTLY)
    (old / "config.yaml").write_text("a: [")
    assert read_run(old).note == "its config.yaml is missing or damaged"


def test_groups_are_of_the_same_settings_but_for_the_seed() -> None:
    runs = [read_run(made_run(Path(f"small-{seed}"), [True] * (6 + seed) + [False] * (4 - seed), seed=seed)) for seed in range(3)]
    runs.append(read_run(made_run(Path("small-7"), HALF, lr=0.5)))
    runs.append(read_run(made_run(Path("small-8"), lr=0.7)))  # not tested: neither a member nor a difference
    seeds, other = groups(runs)
    assert (seeds["settings"], other["settings"]) == ({"model.lr": "0.1"}, {"model.lr": "0.5"})
    assert seeds["seeds"] == [0, 1, 2]
    found = seeds["accuracy"]
    assert (found["n"], found["mean"], found["std"]) == (3, pytest.approx(0.7), pytest.approx(0.1))
    assert found["high"] - found["mean"] == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-4)  # t of 2 degrees
    assert seeds["train_seconds"]["mean"] == 11.0
    assert (other["accuracy"]["n"], other["accuracy"]["std"]) == (1, None)


def test_pairs_count_the_images_that_only_one_has_right() -> None:
    first = read_run(made_run(Path("a"), [True, True, True, False, True, False]))
    second = read_run(made_run(Path("b"), [True, False, False, True, False, False]))
    ((one, other, found),), lines = pairs([first, second])
    assert (one, other, found.first, found.second) == ("a", "b", 3, 1)
    assert found.exact == pytest.approx(10 / 16)
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
