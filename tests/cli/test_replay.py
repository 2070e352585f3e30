"""`cifar-lit replay`: a training that diverges leaves a file, which repeats the failed step and names the module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.command_line import SMALL, assert_refused, checkpoint_of, run_command
from PIL import Image

from cifar_lit import plugins
from cifar_lit.runs import trackers

RUN = Path("lightning_logs/small-1")
FILE = RUN / "not-finite.ckpt"
# The net divides by zero in its 14th training step, and writes the bits of its weights and images in each step.
NET = """
from pathlib import Path
import torch
from torch import nn


class Divide(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += self.training
        return x / (self.steps != 14)


class Net(nn.Module):
    def __init__(self, channels, image_size, num_classes, width=1.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 14 * 14, num_classes)
        )
        self.divide, self.last = Divide(), nn.Linear(num_classes, num_classes)

    def forward(self, x):
        hidden = self.layers(x)
        if self.training:
            with Path("steps.txt").open("a") as file:
                print(int(self.divide.steps), hidden.double().sum().item().hex(), file=file)
        return self.last(self.divide(hidden))
"""


@pytest.fixture
def own_net() -> Iterator[tuple[str, ...]]:
    Path("dividing.py").write_text(NET)
    Path("steps.txt").write_text("")
    yield (*SMALL, "--net", "dividing.Net", "--lr", "0.01")
    plugins.sys.modules.pop("dividing", None)


def test_the_replay_repeats_the_failed_step_bit_for_bit_from_the_last_checkpoint(own_net: tuple[str, ...]) -> None:
    answer = run_command(*own_net, "--checkpoint-every", "6", "--epochs", "4")
    assert answer.code == 1
    assert answer.error_lines[-1].endswith(f"cifar-lit replay {FILE}")
    assert checkpoint_of(FILE)["global_step"] == 12
    steps = dict.fromkeys(Path("steps.txt").read_text().splitlines())
    Path("steps.txt").write_text("")
    before = sorted(path.name for path in RUN.iterdir())

    answer = run_command("replay", FILE)
    assert answer.code == 0, answer.err
    assert Path("steps.txt").read_text().splitlines() == list(steps)[12:14]
    assert answer.lines[-1] == "first value that is not finite: output of net.divide (Divide)"
    assert {"step 13", "loss: nan at step 13 of epoch 2"} <= set(answer.lines)
    rows = [line.split() for line in answer.lines if line.startswith("net")]
    assert [row[0] for row in rows][-4:] == ["net.layers", "net.divide", "net.last", "net"]
    assert [row[3] for row in rows][-4:-2] == [rows[-4][3], "inf"]
    assert Image.open("replay.png").width > 8 * 96
    assert sorted(path.name for path in RUN.iterdir()) == before


def test_without_a_checkpoint_the_replay_begins_with_the_seed_and_needs_no_tracker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_command(*SMALL, "--lr", "1e30", "--logger", "csv").code == 1
    checkpoint = checkpoint_of(FILE)
    assert not checkpoint["state_dict"]
    record = checkpoint["not_finite"]
    record["config"] = record["config"].replace("logger: csv", "logger: mlflow")
    torch.save(checkpoint, FILE)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    answer = run_command("replay", FILE, "--out", "batch.png")
    assert answer.code == 0, answer.err
    assert "step 1" in answer.lines and "first value that is not finite: output of net." in answer.lines[-1]
    assert Path("batch.png").exists()


def test_weights_that_overflow_after_a_finite_loss_are_found_in_their_step() -> None:
    assert "is no longer finite" in run_command(*SMALL, "--lr", "1e39", "--trainer.limit_train_batches", "1").err
    answer = run_command("replay", FILE)
    assert answer.code == 0, answer.err
    assert answer.lines[-1] == "first value that is not finite: weights after the step"
    assert any(line.startswith("norm of the gradients: ") for line in answer.lines)


def test_gradients_that_overflow_under_loss_scaling_leave_no_file() -> None:
    answer = run_command(*SMALL, "--precision", "16-mixed", "--model.label_smoothing", "0.1", "--epochs", "1")
    assert answer.code == 0, answer.err
    assert not FILE.exists()


@pytest.fixture
def failed() -> dict[str, Any]:
    assert run_command(*SMALL, "--lr", "1e30").code == 1
    return checkpoint_of(FILE)


def test_a_file_from_a_stranger_runs_no_code(failed: dict[str, Any], run_dir: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (Path("ran"),)

    torch.save({**failed, "payload": Payload()}, "evil.ckpt")
    assert_refused(run_command("replay", "evil.ckpt"), 1, "evil.ckpt was not loaded: it would execute code")

    Path("evil.py").write_text("open('ran', 'w')\ndef net(**shape): ...\n")
    record = failed["not_finite"]
    config = record["config"].replace("net: lenet", "net: evil.net")
    torch.save({**failed, "not_finite": {**record, "config": config}}, "evil.ckpt")
    assert_refused(run_command("replay", "evil.ckpt"), 2, "evil.net, whose code would run")
    assert not Path("ran").exists()


def test_other_files_and_records_are_refused(failed: dict[str, Any], run_dir: Path) -> None:
    assert_refused(run_command("replay", run_dir / "checkpoints/last.ckpt"), 2, "does not hold a failed step")
    torch.save({**failed, "not_finite": {"config": 3, "step": 1}}, "odd.ckpt")
    assert_refused(run_command("replay", "odd.ckpt"), 2, "does not hold a failed step")
    shutil.copy(FILE, "odd.ckpt")
    assert_refused(run_command("replay", "odd.ckpt", "--out", "sheet.txt"), 2, "give an image file")
    config = failed["not_finite"]["config"].replace("lr: 1.0e+30", "lr: 0.01")
    torch.save({**failed, "not_finite": {"config": config, "step": 2}}, "odd.ckpt")
    answer = run_command("replay", "odd.ckpt")
    assert answer.code == 1 and "all values are finite in this replay" in answer.err
