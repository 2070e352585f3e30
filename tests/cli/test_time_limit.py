"""`--time-limit`: the epochs come from a measurement; the training is repeated and resumed exactly without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from contract.command_line import SMALL, assert_refused, checkpoint_of, config_of, metrics_of, run_command

from cifar_lit.cli import time_limit
from cifar_lit.cli.flags import Command, recipe_path
from cifar_lit.cli.recipes import measured, recipe_header
from cifar_lit.cli.time_limit import Probe, Stopwatch

RUN = Path("lightning_logs/small-1")
LIMITED = (
    *SMALL,
    "--data.val_size",
    "0",
    "--data.count",
    "800",
    "--data.resolutions",
    "{12: 0.5}",
    "--net",
    "shapenet",
)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every measured step take 0.1 s, 25 to an epoch: two epochs fit into 8.5 s, and fewer than four."""
    monkeypatch.setattr(Stopwatch, "step", property(lambda watch: 0.1))
    monkeypatch.setattr(Probe, "fixed", property(lambda probe: 1.0, lambda probe, value: None), raising=False)


@pytest.mark.usefixtures("slow_steps")
def test_the_training_gets_the_fraction_of_epochs_that_fits_and_is_repeated_by_its_config() -> None:
    answer = run_command(*LIMITED, "--time-limit", "8.5s")
    assert answer.code == 0, answer.err
    assert "small with 2.7 epochs instead of 2, expected end after 8 s" in answer.lines[0]
    trainer = config_of(RUN)["trainer"]
    assert (trainer["max_epochs"], trainer["max_steps"]) == (3, 68)
    assert run_command("--config", RUN / "config.yaml").code == 0
    first, again = (checkpoint_of(Path(f"lightning_logs/small-{number}/checkpoints/last.ckpt")) for number in (1, 2))
    assert first["global_step"] == 68
    assert all(torch.equal(first["state_dict"][name], again["state_dict"][name]) for name in first["state_dict"])


@pytest.mark.usefixtures("slow_steps")
def test_a_resumed_run_keeps_its_length_and_gives_the_same_weights() -> None:
    words = (*LIMITED, "--time-limit", "8.5s", "--checkpoint-every", "60")
    assert run_command(*words).code == 0
    (RUN / "metrics.json").unlink()
    whole = checkpoint_of(RUN / "checkpoints/last.ckpt")["state_dict"]
    Path("stop.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n"
        "class Stop(Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n"
        "        if trainer.global_step == 65:\n"
        "            raise KeyError('pulled the plug')\n"
    )
    assert run_command(*words, "--trainer.callbacks", "stop.Stop").code == 1
    stopped = Path("lightning_logs/small-2")
    assert checkpoint_of(stopped / "checkpoints/last.ckpt")["global_step"] == 60
    answer = run_command(*words, "--resume", stopped, "--trainer.callbacks", "null")
    assert answer.code == 0, answer.err
    assert "--time-limit" not in answer.out
    resumed = checkpoint_of(stopped / "checkpoints/last.ckpt")["state_dict"]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_training_that_is_validated_has_whole_epochs_and_the_test_set_leaves_no_score() -> None:
    answer = run_command(*SMALL, "--time-limit", "10m")
    assert answer.code == 0, answer.err
    assert "small with 4 epochs instead of 2" in answer.lines[0]  # at most twice as many
    assert config_of(RUN)["trainer"]["max_epochs"] == metrics_of(RUN)["epochs"] == 4
    assert "expected accuracy" not in answer.out  # nobody has measured small.yaml
    assert len(list(Path("lightning_logs").iterdir())) == 1


def test_a_training_with_a_teacher_is_measured_with_it(run_dir: Path) -> None:
    answer = run_command(*SMALL, "--model.teacher", run_dir, "--time-limit", "10m")
    assert answer.code == 0, answer.err
    assert config_of(RUN)["model"]["teacher"] == str(run_dir)


@pytest.mark.usefixtures("slow_steps")
def test_a_limit_that_is_too_short_names_the_shortest_and_leaves_no_run() -> None:
    line = "--time-limit 2s is too short on this machine: use "
    answer = run_command(*LIMITED, "--time-limit", "2s")
    assert_refused(answer, 2, line)
    seconds = re.search(r"use (\d+)s or more", answer.err)
    assert seconds and not Path("lightning_logs").exists()
    assert run_command(*LIMITED, "--time-limit", f"{seconds[1]}s").code == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--time-limit", "10"], "--time-limit must be a time such as 90s, 10m or 2h, not 10"),
        (["--time-limit", "0s"], "--time-limit must be a time"),
        (["--time-limit", "1m", "--epochs", "3"], "leave --epochs and other limits out"),
        (["--time-limit", "1m", "--auto-lr"], "leave --auto-batch and --auto-lr out"),
        (["--time-limit", "1m", "--folds", "3"], "--folds has no time limit: leave --time-limit out"),
        (["--time-limit", "1m", "--devices", "2"], "--time-limit measures one device"),
    ],
)
def test_contradictions_are_refused(words: list[str], line: str) -> None:
    assert_refused(run_command(*SMALL, *words), 2, line)


@pytest.fixture
def chosen(slow_steps: None, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """Return the list of the commands that train, without running them."""
    commands: list[Command] = []
    monkeypatch.setattr(time_limit, "TrainingCLI", commands.append)
    return commands


@pytest.mark.parametrize(("limit", "recipe", "epochs"), [("10.6s", "laptop91", "5.8"), ("21.1s", "laptop", "12.2")])
def test_without_a_recipe_the_longest_that_fits_is_chosen(
    limit: str, recipe: str, epochs: str, chosen: list[Command]
) -> None:
    small = "--dataset shapes --data.count 300 --batch-size 20 --model.net_options.widths [8,8,8] --accelerator cpu"
    answer = run_command(*small.split(), "--time-limit", limit)
    assert answer.code == 0, answer.err
    assert f"{recipe} with {epochs} epochs" in answer.out and "accuracy" not in answer.out
    assert [command.recipe for command in chosen] == [recipe]


@pytest.mark.parametrize(("limit", "epochs", "relation"), [("25s", 1, "less than "), ("65.4s", 4, "")])
def test_a_measured_recipe_on_its_own_data_announces_its_accuracy(
    limit: str, epochs: int, relation: str, chosen: list[Command]
) -> None:
    accuracy, *_ = measured(recipe_header(recipe_path("quickstart")))
    answer = run_command("--recipe", "quickstart", "--accelerator", "cpu", "--seed", "4", "--time-limit", limit)
    assert f"with {epochs} epochs" in answer.out
    assert answer.out.strip().endswith(f"expected accuracy: {relation}{accuracy}")
