"""`train --seeds`: one training per seed, continued and extended by a repeated command."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import SMALL, assert_refused, config_of, contents_of, metrics_of, run_command

from cifar_lit.base.errors import Failure
from cifar_lit.cli.flags import parse
from cifar_lit.cli.seeds import finish, read_seeds
from cifar_lit.cli.several import check_several
from cifar_lit.training.orderly_stop import Interrupted

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
    before, _, after = answer.out.partition("seed 2 (2 of 3)\n")
    assert ("epoch 1/2" in before, "epoch 1/2" in after) == (False, True)  # seed 1 was at its end
    lines = answer.out.replace("\n    ", " ").splitlines()
    assert [line for line in lines if "of 3):" in line] == [
        f"seed 1 (1 of 3): {accuracies[0]} · {GROUP}/small-2",
        f"seed 2 (2 of 3): {accuracies[1]} · {GROUP}/small-3",
        f"seed 3 (3 of 3): {accuracies[2]} · {GROUP}/small-1 is finished",
    ]
    assert answer.lines[-3:] == ["", "next:", f"  cifar-lit compare {GROUP} OTHER-SEEDS-FOLDER"]
    assert contents_of(GROUP / "small-1") == kept
    runs = [GROUP / name for name in ("small-2", "small-3", "small-1")]
    assert [config_of(run)["seed_everything"] for run in runs] == [1, 2, 3]
    accuracies = [metrics_of(run)["test"]["accuracy"] for run in runs]
    results = json.loads((GROUP / "seeds.json").read_text())
    assert results["runs"] == [str(run) for run in runs]
    assert results["accuracy"]["mean"] == pytest.approx(statistics.fmean(accuracies))
    assert any(line.startswith("test accuracy {mean:.4f} ± ".format(**results["accuracy"])) for line in lines)


def test_a_finished_group_is_not_reused() -> None:
    for words in (("--seeds", "0"), ("--seeds", "0", "--lr", "0.001"), ("--seeds", "0")):
        assert run_command("train", *SHORT, *words).code == 0
    answer = run_command("train", *SHORT, "--seeds", "0-1", "--lr", "0.01")  # in a log: a card, a line per epoch
    begins = [line.split(" · ")[0].split("  ")[0] for line in answer.lines[:15]]
    assert begins.count("data") == begins.count("run") == begins.count("seed 0 (1 of 2)") == 1
    assert begins.count("epoch 1/1") == 2
    assert sorted(path.name for path in GROUP.parent.iterdir()) == [f"small-seeds-{number}" for number in (1, 2, 3, 4)]


def test_an_interruption_prints_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise Interrupted(2)

    monkeypatch.setattr("cifar_lit.cli.seeds.train_each", interrupt)
    answer = run_command("train", *SHORT, "--seeds", "0-1")
    assert answer.code == 130 and answer.err.endswith("--epochs=1 --seeds=0-1\n")


def test_seeds_of_an_edited_recipe_are_not_continued() -> None:
    assert run_command("train", *SHORT, "--seeds", "0").code == 0
    Path("small.yaml").write_text(Path("small.yaml").read_text() + "\n# edited\n")
    assert run_command("train", *SHORT, "--seeds", "0-1").code == 0
    assert [len(list(group.glob("small-*"))) for group in (GROUP, GROUP.with_name("small-seeds-2"))] == [1, 2]


def finished(**tests: list[Any]) -> dict[str, Any]:
    """Return seeds.json of three runs that took 1, 2 and 90 seconds, with these values in `test`."""
    runs = [GROUP / name for name in "abc"]
    for number, run in enumerate(runs):
        run.mkdir(parents=True, exist_ok=True)
        test = {"accuracy": 0.5, "loss": 1.0, **{name: values[number] for name, values in tests.items()}}
        (run / "metrics.json").write_text(json.dumps({"test": test, "train_seconds": (1.0, 2.0, 90.0)[number]}))
    finish(GROUP, {}, runs)
    return json.loads((GROUP / "seeds.json").read_text())


def test_the_mean_with_tta_is_its_own_and_a_mean_time_has_no_negative_limit() -> None:
    results = finished(accuracy=[0.1, 0.2, 0.3], tta=[{"accuracy": value} for value in (0.2, 0.4, 0.9)])
    assert (results["accuracy"]["mean"], results["accuracy with TTA"]["mean"]) == pytest.approx((0.2, 0.5))
    assert results["train seconds"]["low"] == 0 and results["train seconds"]["high"] > 100


def test_a_seed_whose_net_diverged_has_no_loss_and_the_others_keep_theirs() -> None:
    results = finished(loss=[1.0, None, 2.0])
    assert "loss" not in results and results["accuracy"]["n"] == 3 and results["accuracy"]["low"] is None


def test_seeds_with_other_test_images_are_refused() -> None:
    assert finished(fingerprint=["one", "one", "one"])
    with pytest.raises(Failure, match="the images have changed between the trainings"):
        finished(fingerprint=["one", "one", "other"])


@pytest.mark.parametrize(("text", "expected"), [("0-4", [0, 1, 2, 3, 4]), ("7, 3,3-4", [7, 3, 4])])
def test_seeds_are_numbers_and_ranges(text: str, expected: list[int]) -> None:
    assert read_seeds(text) == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fit", "--seeds", "0-4"), "--seeds trains and tests: use it with `train`"),
        (("train", "--seeds", "0-4", "--folds", "5"), "and --folds are different sets of trainings: leave one"),
        (("train", "--seeds", "0-4", "--resume"), "--seeds cannot be used with --resume"),
        (("train", "--seeds", "0-4", "--devices", "2"), "--seeds trains on one device"),
        (("train", "--seeds"), "--seeds needs a value"),
        (("train", "--seeds", "a-4"), "--seeds must be seeds such as 0-4 or 1,2,3, not 'a-4'"),
        (("train", "--seeds", "4-0"), "--seeds 4-0 names no seed"),
    ],
)
def test_invalid_seeds_are_refused_in_one_line_and_leave_nothing(words: tuple[str, ...], line: str) -> None:
    command, *rest = words
    assert_refused(run_command(command, *SMALL, *rest), 2, line)
    assert not Path("lightning_logs").exists()


def test_several_trainings_use_one_device_of_many() -> None:
    command = parse("train", ["--seeds", "0-4"])
    check_several(command)
    assert command.value("trainer.devices") == "1"
