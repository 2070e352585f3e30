"""`train --seeds`: one training per seed, continued and extended by a repeated command."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from contract.command_line import SMALL, assert_refused, config_of, contents_of, metrics_of, run_command

from cifar_lit.cli.seeds import finish, read_seeds
from cifar_lit.errors import Failure

GROUP = Path("lightning_logs/small-seeds-1")
SHORT = (*SMALL, "--epochs", "1")


def test_a_command_with_more_seeds_trains_the_missing_ones_only(run_dir: Path) -> None:
    answer = run_command("train", *SMALL, "--seeds", "3,1")
    assert answer.code == 0, answer.err
    same = [(path / "model.safetensors").read_bytes() for path in (GROUP / "small-1", run_dir)]
    assert same[0] == same[1]  # seed 3 is the recipe's
    kept = contents_of(GROUP / "small-1")
    (GROUP / "small-2/metrics.json").unlink()  # killed after its last checkpoint
    answer = run_command("train", *SMALL, "--seeds=1-3")
    assert answer.code == 0, answer.err
    accuracies = [f"test accuracy {metrics_of(GROUP / f'small-{n}')['test']['accuracy']:.4f}" for n in (2, 3, 1)]
    assert answer.lines[:3] == [  # one line a training, without the cards of the trainings
        f"seed 1 (1 of 3): {accuracies[0]} · {GROUP}/small-2",
        f"seed 2 (2 of 3): {accuracies[1]} · {GROUP}/small-3",
        f"seed 3 (3 of 3): {accuracies[2]} · {GROUP}/small-1 is finished",
    ]
    assert len(answer.lines) < 20
    assert answer.lines[-3:] == ["", "next:", f"  cifar-lit compare {GROUP} OTHER-SEEDS-FOLDER"]
    assert contents_of(GROUP / "small-1") == kept
    runs = [GROUP / name for name in ("small-2", "small-3", "small-1")]
    assert [config_of(run)["seed_everything"] for run in runs] == [1, 2, 3]
    accuracies = [metrics_of(run)["test"]["accuracy"] for run in runs]
    results = json.loads((GROUP / "seeds.json").read_text())
    assert results["runs"] == [str(run) for run in runs]
    assert results["accuracy"]["mean"] == pytest.approx(statistics.fmean(accuracies))
    assert results["accuracy"]["std"] == pytest.approx(statistics.stdev(accuracies))
    expected = "test accuracy {mean:.4f} ± {std:.4f} · n = 3 · 95 % interval of the mean {low:.4f} … {high:.4f}"
    assert expected.format(**results["accuracy"]) in answer.out.splitlines()


@pytest.mark.slow
def test_equal_seeds_of_two_groups_are_compared_and_a_finished_group_is_not_reused() -> None:
    for words in (("--seeds", "0-1"), ("--seeds", "0-2", "--lr", "0.001")):
        assert run_command("train", *SHORT, *words).code == 0
    other = GROUP.with_name("small-seeds-2")
    answer = run_command("compare", str(GROUP), str(other), "--difference", "5", "--json", "both.json")
    assert answer.code == 0, answer.err
    accuracies = [[metrics_of(group / f"small-{n}")["test"]["accuracy"] for n in (1, 2)] for group in (GROUP, other)]
    mean = statistics.fmean(one - two for one, two in zip(*accuracies, strict=True))
    assert f"small · lr 0.05 minus small · lr 0.001: {100 * mean:+.2f} points over 2 equal seeds" in answer.out
    assert "finding a difference of 5 points takes about" in answer.out and "McNemar" not in answer.out
    (pair,) = json.loads(Path("both.json").read_text())["seed_pairs"]
    assert pair["over_seeds"]["n"] == 2 and pair["over_seeds"]["mean"] == pytest.approx(mean)
    assert pair["over_images"][0] < mean < pair["over_images"][1]

    answer = run_command("train", *SHORT, "--seeds", "0-1")
    assert answer.code == 0 and "n = 2\n" in answer.out and "interval" not in answer.out
    assert sorted(path.name for path in GROUP.parent.iterdir()) == [f"small-seeds-{number}" for number in (1, 2, 3)]


def test_seeds_of_an_edited_recipe_or_configuration_are_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []

    def stop(command: object, trainings: object, path: Path, after: object) -> None:
        (path / "small-1").mkdir(exist_ok=True)
        places.append(path.name)
        raise Failure("stopped")

    monkeypatch.setattr("cifar_lit.cli.seeds.train_each", stop)
    Path("more.yaml").write_text("model: {lr: 0.1}\n")
    for file in (None, None, "small.yaml", "more.yaml"):
        if file:
            Path(file).write_text(Path(file).read_text() + "\n# edited\n")
        assert run_command("train", *SHORT, "--config", "more.yaml", "--seeds", "0-1").code == 1
    assert places == [f"small-seeds-{number}" for number in (1, 1, 2, 3)]


def test_a_seed_whose_net_diverged_has_no_loss_and_the_others_keep_theirs() -> None:
    runs = {name: {"test": {"accuracy": 0.1, "loss": loss}, "train_seconds": 5.0, "seed": 0}
            for name, loss in (("a", 1.0), ("b", None), ("c", 2.0))}  # fmt: skip
    GROUP.mkdir(parents=True)
    finish(GROUP, {}, runs)
    results = json.loads((GROUP / "seeds.json").read_text())
    assert "loss" not in results and results["accuracy"]["n"] == 3 and results["accuracy"]["low"] is None


@pytest.mark.parametrize(("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("7, 3,3-4", [7, 3, 4])])
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert read_seeds(text) == seeds


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fit", "--seeds", "0-4"), "--seeds trains and tests: use it with `train`"),
        (("train", "--seeds", "0-4", "--seed", "3"), "--seeds sets seed_everything: leave it out"),
        (("train", "--seeds", "0-4", "--folds", "5"), "and --folds are different sets of trainings: leave one"),
        (("train", "--seeds", "0-4", "--resume"), "continues unfinished trainings by itself: leave --resume out"),
        (("train", "--seeds"), "--seeds needs a value"),
        (("train", "--seeds", "4-0"), "--seeds must be seeds such as 0-4 or 1,2,3, at most 1000 of them, not '4-0'"),
        (("train", "--seeds", "0-4000000"), "at most 1000 of them"),
        (("train", "--seeds", ",".join(f"{n}000-{n}999" for n in range(1, 40))), "at most 1000 of them"),
        (("train", "--json", "f.json"), "--json records several seeds: add --seeds 0-4"),
        (("train", "--seeds", "5"), "--seeds 5 is one seed: name several, such as 0-4, or use --seed 5"),
        (("compare", "lightning_logs", "--difference", "0"), "--difference is in points of accuracy, above 0"),
    ],
)
def test_invalid_seeds_are_refused_in_one_line_and_leave_nothing(words: tuple[str, ...], line: str) -> None:
    command, *rest = words
    assert_refused(run_command(command, *(SMALL if command != "compare" else ()), *rest), 2, line)
    assert not Path("lightning_logs").exists()
