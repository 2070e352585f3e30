"""Errors: one line on stderr, exit code 2 for invalid input and 1 for a failure, and no damaged file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.cli.fit import nested_settings
from cifar_lit.cli.flags import OWN, SHORT, SYNONYMS
from cifar_lit.data import split_images

from .command_line import SMALL, assert_refused, checkpoint_of, contents_of, copy_run, run_command

S = "--recipe small.yaml"
INVALID: list[tuple[str, list[str]]] = [
    # misspelt names
    (f"{S} --trainer.max_epoch 3", ["--trainer.max_epoch", "Did you mean --trainer.max_epochs?"]),
    (f"{S} --data.shufle=true", ["--data.shufle", "Did you mean --data.shuffle?"]),
    (f"{S} --qqq", ["no flag --qqq"]),
    ("trian", ["trian", "Did you mean train?", "validate"]),
    ("--recipe quikstart", ["'quikstart'", "Did you mean quickstart?"]),
    ("--recipe nowhere.yaml", ["nowhere.yaml"]),
    ("recipes quikstart", ["'quikstart'", "Did you mean quickstart?"]),
    (f"{S} --net resnt18", ["'resnt18'", "Did you mean resnet18?"]),
    (f"{S} --dataset cifar1O", ["'cifar1O'", "Did you mean cifar10?", "fashion_mnist"]),
    (f"{S} --config key.yaml", ["trainer.max_epoch", "Did you mean trainer.max_epochs?"]),
    (f"{S} --config top.yaml", ["trainr", "Did you mean trainer"]),
    (f"{S} --class_weights.kind balancd", ["class_weights.kind must be one of balanced, effective", "mean balanced?"]),
    (f"{S} --trainer.deterministic wran",
     ["trainer.deterministic must be one of true, false, warn", "Did you mean warn?"]),
    (f"{S} --model.optimizer adam", ["model.optimizer", "'adam'", "Did you mean adamw?"]),
    (f"{S} --precision bf17-mixed", ["--precision", "bf17-mixed", "Did you mean bf16-mixed?"]),
    (f"{S} --model.schedule cosin", ["model.schedule", "constant, cosine", "'cosin'", "Did you mean cosine?"]),
    (f"{S} --model.monitor macro-f1",
     ["must be one of accuracy, loss, balanced_accuracy, macro_f1", "Did you mean macro_f1?"]),
    (f"{S} --trainer.callbacks EarlyStoping", ["trainer.callbacks: no class is called EarlyStoping"]),
    (f"{S} --trainer.callbacks EarlyStopping --trainer.callbacks.mod=x",
     ["trainer.callbacks: EarlyStopping has no setting mod"]),
    ("recipes --all", ["no flag --all", "cifar-lit recipes NAME"]),
    ("devices --nte lenet", ["no flag --nte", "Did you mean --net?"]),
    (f"{S} --model.metrics.f1 torchmetrics.classification.MulticlasF1", ["Did you mean MulticlassF1Score?"]),
    # names from other programs
    (f"{S} --learning-rate 0.1", ["no flag --learning-rate", "Did you mean --lr?"]),
    (f"{S} --data.split nofile.yaml", ["--data.split takes a YAML file, and there is no file nofile.yaml"]),
    (f"{S} --data.augment nofile", ["--data.augment takes a YAML file, and there is no file nofile"]),
    (f"{S} --model resnet18", ["--model takes a YAML file", "Did you mean --net resnet18?"]),
    (f"{S} --amp", ["no flag --amp", "Did you mean --precision 16-mixed?"]),
    (f"{S} --precision fp16", ["--precision", "Did you mean 16-mixed?"]),
    (f"{S} --config epochs.yaml", ["no setting is called epochs", "Did you mean trainer.max_epochs?"]),
    ("serve small.yaml --device cpu", ["no flag --device", "Did you mean --accelerator?"]),
    ("evaluate", ["no command is called 'evaluate'", "Did you mean test?"]),
    ("quickstart", ["no command is called 'quickstart'", "Did you mean train --recipe quickstart?"]),
    (f"{S} --devices gpu", ["--devices gpu", "Did you mean --accelerator gpu?"]),
    (f"{S} --dataset CIFAR-10", ["'CIFAR-10'", "Did you mean cifar10?"]),
    # paths in the wrong place
    ("--recipe quickstart.yaml", ["no recipe file quickstart.yaml", "Did you mean --recipe quickstart?"]),
    ("--recipe small", ["'small'. Your own file: small.yaml."]),
    ("--recipe a/b", ["no recipe is called 'a/b'"]),
    ("--recipe run-1", ["run-1 is a run folder", "run-1/config.yaml"]),
    (f"{S} --config run-1", ["run-1/config.yaml"]),
    (f"{S} --config quickstart", ["no configuration file quickstart", "Did you mean --recipe quickstart?"]),
    ("--dataset photos", ["'photos'", "Did you mean --dataset folder --data-dir photos?"]),
    ("test --ckpt_path photos", ["photos is a folder: name a checkpoint of a run"]),
    ("classify photos", ["classify needs a run before the images"]),
    ("export photos", ["--to must be given"]),
    # abbreviations
    (f"{S} --epoch 3", ["no flag --epoch", "Did you mean --epochs?"]),
    (f"{S} --trainer.max_epo 3", ["no flag --trainer.max_epo", "Did you mean --trainer.max_epochs?"]),
    # values
    (f"{S} --model.lr", ["--model.lr needs a value"]),
    (f"{S} --checkpoint-every often", ["--checkpoint-every", "often", "500", "10m"]),
    (f"{S} --epochs many", ["--epochs", "whole number", "many"]),
    (f"{S} --epochs 0", ["--epochs", "at least 1"]),
    (f"{S} --epochs -1", ["--epochs must be at least 1, not -1"]),
    (f"{S} --trainer.barebones true", ["--trainer.barebones true leaves out what a run records: remove it"]),
    (f"{S} --config stops.yaml", ["two callbacks EarlyStopping{'monitor': 'val/loss', 'mode': 'min'}", "remove one"]),
    (f"{S} --lr nan", ["--lr", "nan"]),
    (f"{S} --batch-size 0", ["--batch-size", "at least 1"]),
    (f"{S} --data.eval_batch_size 0", ["data.eval_batch_size must be at least 1"]),
    (f"{S} --data.image_size 0x10", ["from 1 to 2,048 pixels a side, not 0×10"]),
    (f"{S} --lr fast", ["--lr (model.lr) must be a number, not fast"]),
    (f"{S} --data.shuffle 3", ["data.shuffle must be true or false, not 3"]),
    (f"{S} --lr 0", ["learning rate", "above 0", "--lr"]),
    (f"{S} --data.count 3", ["data.count must be at least 10 images"]),
    (f"{S} --data.val_size 200", ["data.val_size 200", "train on"]),
    (f"{S} --model.width 0", ["width", "above 0"]),
    (f"{S} --data.augment.crop 16", ["data.augment.crop 16", "16×16"]),
    (f"{S} --data.augment.cutou 4", ["--data.augment.cutou.", "mean --data.augment.cutout?"]),
    (f"{S} --data.augment.transform rand", ["data.augment.transform must be one of none, trivial_augment_wide"]),
    (f"{S} --data.image_size 8x40", ["lenet", "8×40", "16×16"]),
    (f"{S} --data.image_size 96x",
     ["data.image_size must be a number of pixels for squares, or height x width", "not '96x'"]),
    (f"{S} --data.image_size 96x2049", ["2,048", "96×2049"]),
    (f"{S} --data.resize letterbx", ["data.resize must be one of crop, letterbox, squash", "Did you mean letterbox?"]),
    (f"{S} --data.resize squash", ["shapes are drawn at their final size", "leave data.resize out"]),
    (f"{S} --model.num_classes 3", ["model.num_classes", "leave it out"]),
    (f"{S} --data.seed 3", ["data.seed is set from --seed: leave it out"]),
    (f"{S} --model.monitor loss --data.val_size 0", ["model.monitor loss", "set --data.val_size 0.1"]),
    (f"{S} --balanced --data.shuffle false", ["balanced draws a new order", "leave data.shuffle at true"]),
    (f"{S} --balanced --class_weights.kind effective", ["balance the classes twice: leave one of them out"]),
    (f"{S} --balanced --skip_easy", ["skip_easy sets the order of images: leave balanced out"]),
    # features
    (f"{S} --class_weights effective", ["--class_weights takes true or false, not effective", "--class_weights.kind"]),
    (f"{S} --weight_average", ["weight_average needs a decay: give --weight_average.decay"]),
    (f"{S} --weight_average.decy 0.9", ["no setting decy", "Did you mean --weight_average.decay?"]),
    (f"{S} --early_stop.patience soon", ["early_stop.patience must be a number, not soon"]),
    (f"{S} --model.ema_decay 0.9", ["no flag --model.ema_decay", "Did you mean --weight_average.decay?"]),
    (f"{S} --model.class_weights balanced", ["no flag --model.class_weights", "Did you mean --class_weights.kind?"]),
    (f"{S} --model.margins true", ["no flag --model.margins", "Did you mean --margins?"]),
    (f"{S} --model.compile true", ["no flag --model.compile", "Did you mean --compile?"]),
    (f"{S} --model.weights imagenet", ["no flag --model.weights", "Did you mean --weights?"]),
    (f"{S} --model.weight_decay 0.1", ["Did you mean --model.optimizer_options.weight_decay?"]),
    (f"{S} --model.frozen 0.5", ["Did you mean --finetune.frozen?"]),
    (f"{S} --config old-names.yaml", ["no setting is called model.patience", "Did you mean early_stop.patience?"]),
    # strategies
    (f"{S} --devices 2 --trainer.strategy ddp_fork", ["--trainer.strategy ddp_fork", "use --trainer.strategy ddp"]),
    (f"{S} --config fsdp.yaml", ["--trainer.strategy FSDP", "use --trainer.strategy ddp"]),
    # devices
    (f"{S} --devices two", ["two"]),
    (f"{S} --accelerator gpus", ["Did you mean gpu?"]),
    (f"{S} --rank-timeout 0", ["--rank-timeout"]),
    (f"{S} --nodes 2", ["--nodes 2", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"]),
    (f"{S} --devices 2 --accelerator cpu --trainer.sync_batchnorm true",
     ["--trainer.sync_batchnorm true needs GPUs", "leave it out"]),
    # options of data sets, refused before a download
    ("--dataset cifar10 --data.labels coarse", ["cifar10 has no labels called 'coarse': leave data.labels out"]),
    ("--dataset cifar100 --data.labels rough", ["cifar100 has no labels called 'rough': use fine or coarse"]),
    ("--dataset cifar10 --data.resize letterbox", ["all images of cifar10 have the same size: leave data.resize out"]),
    # missing runs and checkpoints
    *((f"{command} --ckpt_path nowhere.ckpt", ["nowhere.ckpt"]) for command in ("validate", "test", "predict")),
    *((command, ["--ckpt_path"]) for command in ("validate", "test", "predict")),
    ("test --resume", ["--resume", "--ckpt_path"]),
    *((f"{command} nowhere-1", ["nowhere-1"]) for command in ("report", "serve", "export --to safetensors")),
    ("classify nowhere-1 cat.png", ["nowhere-1"]),
    ("compare nowhere-1 nowhere-2", ["nowhere-1"]),
    ("--resume", ["nothing to resume", "lightning_logs"]),
    ("--ckpt_path nowhere", ["nothing to resume", "nowhere"]),
    # missing files
    (f"{S} --config nowhere.yaml", ["no configuration file nowhere.yaml"]),
    (f"{S} --config ~0", ["begins with an unknown home folder"]),
    (f"{S} --config {'x' * 400}", ["a file name is too long"]),
    ("--resume loose.ckpt", ["loose.ckpt is not in a run folder"]),
]  # fmt: skip


@pytest.fixture
def files(working_folder: Path) -> Path:
    """The working folder with the files named in INVALID."""
    for name, text in {
        "key.yaml": "trainer:\n  max_epoch: 3\n",
        "stops.yaml": "trainer: {callbacks: [&one {class_path: EarlyStopping, init_args: {monitor: val/loss}}, *one]}",
        "top.yaml": "trainr:\n  max_epochs: 3\n",
        "epochs.yaml": "epochs: 3\n",
        "fsdp.yaml": "trainer: {strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}}",
        "old-names.yaml": "model: {patience: 3}",
        "loose.ckpt": "",
        "run-1/config.yaml": "",
    }.items():
        (working_folder / name).parent.mkdir(exist_ok=True)
        (working_folder / name).write_text(text)
    (working_folder / "photos").mkdir()
    return working_folder


def test_every_synonym_stands_for_an_existing_flag() -> None:
    flags = set(re.findall(r"--([\w.-]+)", run_command("fit", "--help").out))
    flags |= {"config", *SHORT.values(), *OWN, *nested_settings()}
    settings = {setting.partition(" ")[0] for setting in SYNONYMS.values()}
    assert settings - flags == set()
    assert SYNONYMS.keys() & {*SHORT, *OWN} == set()


def test_a_misspelt_name_is_refused_before_images_are_loaded(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("the images were loaded")

    monkeypatch.setattr(split_images, "load_images", fail)
    (files / "my_nets.py").write_text("class MyNet:\n    pass\n")
    for flag, value, part in (
        ("--model.net_options", "{depth: 3}", "lenet has no 'depth'"),
        ("--model.optimizer", "torch.optim.Adma", "torch.optim has no 'Adma'"),
        ("--model.monitor", "acuracy", "'acuracy'"),
        ("--model.tta", "yes", "'yes'"),
        ("--net", "my_nets.py", "my_nets.MyNet"),
    ):
        assert_refused(run_command(*S.split(), flag, value), 2, part)


def test_a_net_that_does_not_fit_the_data_is_refused_with_both_shapes_and_without_a_run_folder(files: Path) -> None:
    (files / "misfit.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n"
        "    def __init__(self, channels, image_size, num_classes, width, inputs=784, outputs=4):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(inputs, outputs))\n"
    )
    for options, parts in (
        ("{}", ["images of 3×16×16", "its layer 1, Linear(in_features=784", "(2x768 and 784x4)"]),
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


def test_a_training_resolution_too_small_for_the_net_is_refused_before_training(files: Path) -> None:
    words = ("--net", "alexnet", "--data.image_size", "64", "--resolutions.sides", "{32: 0.5}")
    assert_refused(run_command(*S.split(), *words), 2, "alexnet cannot take 32×32 images; the smallest size is 63×63")
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
        (["--model.width", "2"], "not of lenet width 2 (3×16×16, 4 classes)"),
    ):
        answer = run_command("test", "--ckpt_path", checkpoint, *flags)
        assert_refused(answer, 1, f"{checkpoint} holds weights of lenet (3×16×16, 4 classes)", other)
    answer = run_command("test", "--ckpt_path", checkpoint, "--data.num_classes", "5")
    assert_refused(answer, 2, "the checkpoint was trained on other classes", "name the folder of its own data")
    assert not Path("lightning_logs").exists()


class MakeFolder:
    """Creates the folder `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, ("ran",)


def test_a_checkpoint_that_would_execute_code_is_refused_without_executing_it(
    run_dir: Path, working_folder: Path
) -> None:
    shutil.copytree(run_dir, "copy")
    checkpoint = Path("copy/checkpoints/best.ckpt")
    torch.save({**checkpoint_of(checkpoint), "hyper_parameters": MakeFolder()}, checkpoint)
    assert_refused(run_command("test", "--ckpt_path", checkpoint), 1, str(checkpoint), "execute code")
    assert not (working_folder / "ran").exists()
    torch.load(checkpoint, weights_only=False)
    assert (working_folder / "ran").exists(), "the payload does nothing, so this test proves nothing"


# ---- failed trainings


def test_a_non_finite_loss_stops_the_run_at_that_step_without_results() -> None:
    answer = run_command(*SMALL, "--lr", "1e30")
    (line,) = answer.error_lines
    assert answer.code == 1
    assert re.match("cifar-lit: the loss is nan .*step.*checkpoint.* lower --lr", line, re.IGNORECASE), line
    assert "test accuracy" not in answer.out
    assert not Path("lightning_logs/small-1/metrics.json").exists()


def test_a_resumed_run_with_a_non_finite_loss_keeps_its_checkpoint(interruption: Any) -> None:
    last = copy_run(interruption.run_dir) / "checkpoints/last.ckpt"
    checkpoint = checkpoint_of(last)
    checkpoint["lr_schedulers"][0]["base_lrs"] = [1e30, 1e30]
    torch.save(checkpoint, last)
    before = last.read_bytes()
    answer = run_command("--resume")
    assert answer.code == 1
    assert "the loss is" in answer.error_lines[-1]
    assert last.read_bytes() == before


def test_a_logs_folder_that_cannot_be_created_is_refused() -> None:
    assert_refused(run_command(*SMALL, "--logs", "small.yaml/runs"), 1, "small.yaml/runs", "--logs")
