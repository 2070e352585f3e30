"""Errors: one line on stderr, exit code 2 for invalid input and 1 for a failure, and no damaged file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.base.command_line import SYNONYMS
from cifar_lit.cli.flags import OWN, SHORT
from cifar_lit.data import split

from .command_line import SMALL, assert_refused, contents_of, run_command

S = "--recipe small.yaml"
INVALID: list[tuple[str, list[str]]] = [
    # misspelt names, and names of other programs
    (f"{S} --trainer.max_epoch 3", ["no flag --trainer.max_epoch", "Did you mean --trainer.max_epochs?"]),
    (f"{S} --weight_average.decy 0.9", ["no setting", "weight_average.decy", "Did you mean weight_average.decay?"]),
    (f"{S} --learning-rate 0.1", ["no flag --learning-rate", "Did you mean --lr?"]),
    (f"{S} --epoch 3", ["no flag --epoch", "Did you mean --epochs?"]),
    (f"{S} --config key.yaml", ["trainer.max_epoch", "Did you mean trainer.max_epochs?"]),
    (f"{S} --config epochs.yaml", ["no setting is called epochs", "Did you mean trainer.max_epochs?"]),
    (f"{S} --net resnt18", ["'resnt18'", "Did you mean resnet18?"]),
    (f"{S} --dataset cifar1O", ["'cifar1O'", "Did you mean cifar10?", "fashion_mnist"]),
    (f"{S} --model.optimizer adam", ["model.optimizer", "torch.optim.Adam"]),
    (f"{S} --net Net", ["the nets of your own files, as FILE.NAME"]),
    (f"{S} --data.train_count 5", ["Did you mean --data.split.share?"]),
    (f"{S} --config wrong.yaml", ["wrong.yaml: --lr: model.lr", "float", "fast"]),
    (f"{S} --config twice.yaml", ["twice.yaml", "line 3, column 3: lr stands there a second time"]),
    (f"{S} --data.images null", ["data.images is a group: set its settings, data.images.channels"]),
    (f"{S} --weight_average true", ["required: decay, settings: weight_average.decay"]),
    ("--recipe quickstart --data-dir nowhere", ["--data-dir nowhere: shapes are drawn: leave it out"]),
    (f"{S} --model.schedule cosin", ["model.schedule", "constant, cosine", "'cosin'", "Did you mean cosine?"]),
    (f"{S} --class_weights balanced", ["class_weights", "true or false", "balanced"]),
    ("trian", ["trian", "Did you mean train?", "validate"]),
    ("--recipe quikstart", ["'quikstart'", "Did you mean quickstart?"]),
    ("quickstart", ["no command is called 'quickstart'", "Did you mean train --recipe quickstart?"]),
    ("devices --chekc", ["no flag --chekc", "Did you mean --check?"]),
    (f"{S} --devices gpu", ["--devices gpu", "use a number (2), ids (0,1) or auto"]),
    (f"{S} --accelerator gpus", ["gpus", "cuda"]),
    # values
    (f"{S} --lr", ["--lr needs a value"]),
    (f"{S} --epochs many", ["--epochs", "trainer.max_epochs", "int", "many"]),
    (f"{S} --epochs 0", ["--epochs", "at least 1"]),
    (f"{S} --batch-size 0", ["batch"]),
    (f"{S} --lr 0", ["learning rate", "above 0", "--lr"]),
    (f"{S} --precision bf17-mixed", ["--precision", "bf16-mixed", "bf17-mixed"]),
    (f"{S} --checkpoint-every often", ["--checkpoint-every", "often", "500", "10m"]),
    (f"{S} --data.val_size 200", ["data.val_size 200", "train on"]),
    (f"{S} --data.seed 3", ["data.seed is set from --seed"]),
    (f"{S} --model.num_classes 3", ["model.num_classes is set from", "the data"]),
    (f"{S} --config fsdp.yaml", ["--trainer.strategy", "use --trainer.strategy ddp"]),
    (f"{S} --nodes 2", ["--nodes 2", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"]),
    (f"{S} --devices 2 --checkpoint-every 10m", ["needs one process: use a number of steps"]),
    # missing files, and words in the wrong place
    ("--recipe nowhere.yaml", ["no recipe file nowhere.yaml"]),
    (f"{S} --config nowhere.yaml", ["no configuration file nowhere.yaml"]),
    ("--dataset photos", ["'photos'", "Did you mean --dataset folder --data-dir photos?"]),
    ("test --ckpt_path photos", ["photos is a folder: name a checkpoint of a run"]),
    ("test --ckpt_path nowhere.ckpt", ["nowhere.ckpt"]),
    ("test", ["--ckpt_path"]),
    ("test --resume", ["--resume", "--ckpt_path"]),
    *((f"{command} nowhere-1", ["nowhere-1"]) for command in ("report", "serve", "export --to onnx")),
    ("compare nowhere-1 nowhere-2", ["nowhere-1"]),
    ("--resume", ["nothing to resume", "lightning_logs"]),
    ("--resume loose.ckpt", ["loose.ckpt is not in a run folder"]),
]  # fmt: skip


@pytest.fixture
def files(working_folder: Path) -> Path:
    """The working folder with the files named in INVALID."""
    for name, text in {
        "key.yaml": "trainer:\n  max_epoch: 3\n",
        "epochs.yaml": "epochs: 3\n",
        "fsdp.yaml": "trainer: {strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}}",
        "loose.ckpt": "",
        "my_net.py": "class Net: pass\nraise SystemExit",
        "wrong.yaml": "model: {lr: fast}",
        "twice.yaml": "model:\n  lr: 1\n  lr: 2\n",
    }.items():
        (working_folder / name).write_text(text)
    (working_folder / "photos").mkdir()
    return working_folder


def test_every_synonym_stands_for_an_existing_flag() -> None:
    flags = set(re.findall(r"--([\w.-]+)", run_command("fit", "--help-all").out))
    own = ("model.optimizer_options.weight_decay", "weight_average.decay")
    assert set(SYNONYMS.values()) - {*flags, *SHORT, *OWN, *own} == set()


def test_a_misspelt_name_is_refused_before_images_are_loaded(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("the images were loaded")

    monkeypatch.setattr(split, "load_images", fail)
    for flag, value, part in (
        ("--model.net_options", "{depth: 3}", "lenet has no 'depth'"),
        ("--model.tta", "yes", "'yes'"),
        ("--net", "my_nets.py", "my_nets.NAME"),
    ):
        assert_refused(run_command(*S.split(), flag, value), 2, part)


def test_a_net_that_does_not_fit_the_data_is_refused_with_both_shapes_and_without_a_run_folder(files: Path) -> None:
    (files / "misfit.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n"
        "    def __init__(self, channels, image_size, num_classes, inputs=784, outputs=4):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(inputs, outputs))\n"
    )
    for options, parts in (
        ("{}", ["images of 3×16×16", "(2x768 and 784x4)"]),
        ("{inputs: 768, outputs: 3}", ["shape (2, 3) for 2 images, not (2, 4)", "the data have 4 classes"]),
    ):
        answer = run_command(*S.split(), "--net", "misfit.Net", "--model.net_options", options)
        assert_refused(answer, 2, "misfit.Net", *parts)
    assert not (files / "lightning_logs").exists()


@pytest.mark.parametrize(("line", "parts"), INVALID, ids=[line.replace(S, "…") for line, _ in INVALID])
def test_invalid_input_gives_one_line_and_exit_code_2_without_a_run_folder(
    files: Path, line: str, parts: list[str]
) -> None:
    assert_refused(run_command(*line.split()), 2, *parts)
    assert not (files / "lightning_logs").exists()


# ---- checkpoints


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        ("test", cut_short),
        ("validate", lambda path: path.write_bytes(b"")),
        ("predict", lambda path: torch.save({"epoch": 3}, path)),  # no weights
    ],
)
def test_a_damaged_checkpoint_is_named_and_unchanged(run_dir: Path, command: str, damage: Callable[..., Any]) -> None:
    shutil.copytree(run_dir, "copy")
    checkpoint = Path("copy/checkpoints/best.ckpt")
    damage(checkpoint)
    before = contents_of(Path("copy"))
    assert_refused(run_command(command, "--ckpt_path", checkpoint), 1, str(checkpoint))
    assert contents_of(Path("copy")) == before
    assert not Path("lightning_logs").exists()


def test_a_checkpoint_of_another_net_is_refused_with_both_nets(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints/best.ckpt"
    for flags, other in (
        (["--net", "tudui"], "not of tudui (3×16×16, 4 classes)"),
        (["--model.width", "2"], "not of lenet width 2.0 (3×16×16, 4 classes)"),
    ):
        answer = run_command("test", "--ckpt_path", checkpoint, *flags)
        assert_refused(answer, 1, f"{checkpoint} holds weights of lenet (3×16×16, 4 classes)", other)
    answer = run_command("test", "--ckpt_path", checkpoint, "--data.num_classes", "5")
    assert_refused(answer, 2, "the checkpoint was trained on other classes", "name the folder of its own data")
    assert not Path("lightning_logs").exists()


# ---- failed trainings


def test_a_non_finite_loss_stops_the_run_at_that_step_without_results() -> None:
    answer = run_command(*SMALL, "--lr", "1e30")
    (line,) = answer.error_lines
    assert answer.code == 1
    assert re.match("cifar-lit: the loss is nan .*step.*checkpoint.* lower --lr", line, re.IGNORECASE), line
    assert "test accuracy" not in answer.out
    assert not Path("lightning_logs/small-1/metrics.json").exists()


def test_a_logs_folder_that_cannot_be_created_is_refused() -> None:
    assert_refused(run_command(*SMALL, "--logs", "small.yaml/runs"), 1, "small.yaml/runs", "--logs")
