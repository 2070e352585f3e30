"""Ctrl-C and --resume: in the same run folder, with its settings, from its last checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .command_line import (
    OWN_IMAGES,
    SMALL,
    assert_refused,
    checkpoint_of,
    contents_of,
    copy_run,
    files_of,
    metrics_of,
    rows_of,
    run_command,
)
from .conftest import STEPS, Interruption, start_pair


@pytest.fixture
def interrupted(interruption: Interruption) -> Path:
    """A copy of the interrupted run in the working folder."""
    return copy_run(interruption.run_dir)


# ---- Ctrl-C


def test_ctrl_c_exits_with_130_and_writes_a_checkpoint_but_no_results(interruption: Interruption) -> None:
    assert interruption.answer.code == 130
    assert "Traceback" not in interruption.answer.err + interruption.answer.out
    last = interruption.run_dir / "checkpoints/last.ckpt"
    assert last.stat().st_mtime_ns > interruption.signal_time
    assert 0 < checkpoint_of(last)["global_step"] < STEPS
    files = files_of(interruption.run_dir)
    assert "config.yaml" in files
    assert not files & {"metrics.json", "model.safetensors", "predictions.csv", "report.html"}
    assert not {name for name in files if name.endswith((".part", ".tmp"))}


def test_ctrl_c_prints_the_exact_command_to_resume(interruption: Interruption, interrupted: Path) -> None:
    (line,) = [line for line in interruption.answer.err.splitlines() if "--resume" in line]
    words = shlex.split(line)[-3:]
    assert words == ["train", "--resume", "lightning_logs/small-1"]
    answer = run_command(*words)
    assert (answer.code, answer.err) == (0, "")
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["small-1"]  # no new run folder
    assert metrics_of(interrupted)["test"]["images"] == 280
    assert checkpoint_of(interrupted / "checkpoints/last.ckpt")["global_step"] == STEPS
    rows = rows_of(interrupted / "metrics.csv")
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps)
    assert len([row for row in rows if row["val/loss"]]) == 1
    assert "checkpoints/previous.ckpt" not in files_of(interrupted)


def test_a_run_locked_by_another_process_is_refused_by_name(interruption: Interruption) -> None:
    assert_refused(interruption.while_running, 1, "is writing", "small-1", "wait")


# ---- runs that cannot be resumed


def test_a_finished_run_is_reported_as_finished_and_unchanged(run_dir: Path) -> None:
    before = contents_of(run_dir)
    for words in (
        ["--resume", run_dir],
        ["--resume", run_dir / "checkpoints/last.ckpt"],
        ["--resume", "--logs", run_dir.parent],
    ):
        assert_refused(run_command(*words), 2, str(run_dir), "is finished", "metrics.json")
    assert contents_of(run_dir) == before


# ---- images that were added


def test_two_processes_keep_the_split_of_a_run_and_prolong_it(working_folder: Path) -> None:
    images = {"ant": 30, "bee": 30}
    draw_noise(Path("photos"), images)
    settings = [*OWN_IMAGES, "--data-dir", "photos", "--data.val_size", "0.2"]
    assert run_command(*SMALL, *settings, "--model.schedule", "constant").code == 0
    run = Path("lightning_logs/small-1")
    before = metrics_of(run)
    (run / "metrics.json").unlink()
    draw_noise(Path("photos"), {name: count + 20 for name, count in images.items()} | {"wasp": 5})
    for process in start_pair(["train", "--resume", run, "--epochs", "3"], working_folder):
        answer = process.answer()
        assert answer.code == 0, answer.err
    after = metrics_of(run)
    assert (after["data"], after["test"]["fingerprint"]) == (before["data"], before["test"]["fingerprint"])
    assert (after["devices"], after["epochs"]) == (2, 3)
    assert after["changes"] == [{"step": 4, "settings": {"trainer.devices": 2, "trainer.max_epochs": 3}}]


def draw_noise(root: Path, counts: Mapping[str, int]) -> None:
    """Write images of random pixels, always the same for a name."""
    for label, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{number:03}.png")


# ---- other settings beside --resume


def test_a_repeated_command_with_resume_added_is_accepted(interrupted: Path) -> None:
    words = "--data.count 1400 --batch-size 8 --lr 0.001 --net lenet --epochs 1 --data.eval_batch_size 123 --resume"
    answer = run_command(*SMALL, *words.split())  # resumes the newest run
    assert answer.code == 0, answer.err
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["small-1"]
    assert metrics_of(interrupted)["test"]["images"] == 280


def test_an_allowed_change_is_recorded_and_leaves_the_configuration_as_it_was(interrupted: Path) -> None:
    text = (interrupted / "config.yaml").read_text()
    assert "logs: lightning_logs\n" in text
    (interrupted / "config.yaml").write_text(text.replace("logs: lightning_logs\n", "logs: runs\n"))  # was moved
    config = (interrupted / "config.yaml").read_bytes()
    step = checkpoint_of(interrupted / "checkpoints/last.ckpt")["global_step"]
    assert run_command("--resume", "--data.eval_batch_size", "123", "--logger", "csv").code == 0
    assert (interrupted / "config.yaml").read_bytes() == config
    changed = {"data.loading.eval_batch_size": 123, "logger": "csv"}
    assert metrics_of(interrupted)["changes"] == [{"step": step, "settings": changed}]
    text = f"from step {step}: data.loading.eval_batch_size 123, logger csv"
    assert text in (interrupted / "report.html").read_text()
    assert text in " ".join(run_command("compare", interrupted).out.split())


def test_settings_that_contradict_the_run_are_refused_and_the_run_stays_unchanged(interrupted: Path) -> None:
    before = contents_of(interrupted)
    names = files_of(interrupted)
    assert_refused(run_command("--resume", "--recipe=quickstart"), 2, "recipe was ", " in this run, not ")
    others = {"net": "tudui", "model.optimizer": "adamw", "data.images.num_classes": "5", "model.schedule": "constant",
              "lr": "0.1", "epochs": "2", "batch-size": "16", "seed": "4", "data.augment.flip": "random",
              "data.split.seed": "7", "trainer.accumulate_grad_batches": "2"}  # fmt: skip
    for flag, value in others.items():
        name = flag if flag.startswith("data.") else flag.rpartition(".")[2].replace("-", "_")
        assert_refused(run_command("--resume", f"--{flag}={value}"), 2, name, " in this run, not ", value, "leave it")
    after = contents_of(interrupted)
    assert [name for name, content in before.items() if after.get(name) != content] == []
    assert files_of(interrupted) == names  # the Trainer may have added an event file
