"""The table of what is typed, the line on stderr, and the exit code: 2 for what was typed, 1 for what failed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from command_line import draw_folder, matches, refused, typed

import cifar_lit.hardware
from cifar_lit.data import archives
from cifar_lit.hardware import Machine

S = "--recipe small.yaml"
OWN = "--data.num_classes null --data.image_size null"  # over what the recipe says of its shapes
TWO_CLASSES = {"train/cat": 3, "train/dog": 3, "test/cat": 2, "test/dog": 2}
NO_GPU = "this machine has no GPU, a CPU with 4 threads"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are those of a machine without GPUs, wherever the tests run."""
    monkeypatch.setattr(cifar_lit.hardware, "detect_machine", lambda: Machine(cpu="a CPU", threads=4, bf16=False))


NOWHERE = "nothing to resume: there is no checkpoint nowhere. Name another run, or start one without --resume."
TYPED: list[tuple[str, str]] = [
    # names
    ("trian", "no command is called 'trian'. Did you mean train? There are fit, train, …"),
    ("frobnicate", "no command is called 'frobnicate'. There are fit, …"),
    (f"{S} --trainer.max_epoch 3", "there is no flag --trainer.max_epoch. Did you mean --trainer.max_epochs?"),
    (f"{S} --data.shufle=true", "there is no flag --data.shufle. Did you mean --data.shuffle?"),
    (f"{S} --batchsize 3", "there is no flag --batchsize. Did you mean --batch-size?"),
    (f"{S} --model.optimzer sgd", "there is no flag --model.optimzer. Did you mean --model.optimizer?"),
    (f"{S} --qqq", "there is no flag --qqq."),
    (f"{S} --model.num_classes 3", "model.num_classes follows from the data: leave it out"),
    (f"{S} --model.input_shape [3,16,16]", "model.input_shape follows from the data: leave it out"),
    (f"{S} --data.seed 3", "data.seed follows from --seed: leave it out"),
    ("--recipe smal.yaml", "there is no recipe file smal.yaml"),
    ("--recipe quikstart", "no recipe is called 'quikstart'. Did you mean quickstart? There are …"),
    (f"{S} --net lenett", "There is no net named 'lenett'. Did you mean lenet? There are …"),
    (f"{S} --net resnt18", "There is no net named 'resnt18'. Did you mean resnet18? There are …"),
    (f"{S} --dataset cifar1O", "no data set is called 'cifar1O'. Did you mean cifar10? There are cifar10, cifar100, …"),
    ("recipes quikstart", "no recipe is called 'quikstart'. Did you mean quickstart? There are …"),
    ("recipes --all", "recipes knows no flag --all: use `cifar-lit recipes` or `cifar-lit recipes NAME`"),
    ("devices --net lenett", "There is no net named 'lenett'. Did you mean lenet? There are …"),
    ("devices --nte lenet", "there is no flag --nte. Did you mean --net?"),
    ("devices --batch-size 3", "there is no flag --batch-size.…"),
    ("devices --net lenet --image_size 8", "lenet cannot take 8×8 images; the least size is 16×16."),
    # abbreviations
    (f"{S} --epoch 3", "there is no flag --epoch. Did you mean --epochs?"),
    (f"{S} --trainer.max_epo 3", "there is no flag --trainer.max_epo. Did you mean --trainer.max_epochs?"),
    (f"{S} --acc cpu", "there is no flag --acc.…"),
    # values
    (f"{S} --epochs", "--epochs needs a value, as in --epochs 10"),
    (f"{S} --lr --seed 3", "--lr needs a value, as in --lr 0.1"),
    (f"{S} --model.lr", "--model.lr needs a value"),
    (f"{S} stray", "'stray' belongs to no flag; flags begin with --, see --help"),
    (f"{S} --epochs many", "--epochs (trainer.max_epochs) must be a whole number, not many"),
    (f"{S} --lr fast", "--lr (model.lr) must be a number, not fast"),
    (f"{S} --lr nan", "--lr (model.lr) must be a number, not nan"),
    (f"{S} --batch-size 1.5", "--batch-size (data.batch_size) must be a whole number, not 1.5"),
    (f"{S} --data.shuffle 3", "data.shuffle must be true or false, not 3"),
    (f"{S} --data.mean grey", "data.mean must be a number or a list of them, not grey"),
    (f"{S} --trainer.deterministic wran", "trainer.deterministic must be one of true, false, warn, not wran. Did you mean warn?"),
    (f"{S} --precision bf17-mixed", "--precision (trainer.precision) must be one of …, not bf17-mixed. Did you mean bf16-mixed?"),
    (f"{S} --model.schedule cosin", "model.schedule must be one of constant, cosine, …, not 'cosin'. Did you mean cosine?"),
    (f"{S} --model.optimizer adam", "model.optimizer must be one of sgd, adamw, muon, not 'adam'. Did you mean adamw?"),
    (f"{S} --data.flip randm", "data.flip must be one of none, random, alternating, not 'randm'. Did you mean random?"),
    (f"{S} --trainer.callbacks EarlyStoping", "trainer.callbacks: no class is called EarlyStoping; give its full path, …"),
    (f"{S} --trainer.callbacks EarlyStopping --trainer.callbacks.mod=x", "trainer.callbacks: EarlyStopping has no setting mod"),
    # numbers that cannot be meant
    (f"{S} --batch-size 0", "--batch-size must be at least 1, not 0"),
    (f"{S} --data.eval_batch_size 0", "data.eval_batch_size must be at least 1, not 0"),
    (f"{S} --epochs 0", "--epochs must be at least 1, not 0"),
    (f"{S} --devices 2 --accelerator cpu --trainer.strategy ddp_fork", "--trainer.strategy ddp_fork is for …: use ddp"),
    (f"{S} --lr 0", "the learning rate must be above 0, not 0: set --lr"),
    (f"{S} --model.width 0", "width multiplies the hidden widths, so it must be above 0, not 0.0."),
    (f"{S} --data.val_size 200", "data.val_size 200 must leave some of the 200 images to train on"),
    (f"{S} --data.val_size 0.001", "data.val_size 0.001 of 200 images is none: raise it, or use 0 to train on all"),
    (f"{S} --data.crop 16", "data.crop 16 is too much for 16×16 images: use less than 16"),
    (f"{S} --data.count 3", "data.count must be at least 10 images"),
    (f"{S} --data.image_size 8", "lenet cannot take 8×8 images; the least size is 16×16."),
    (f"{S} --data.std 0", "data.mean and data.std need 3 numbers (std above 0), one a channel, or one for all"),
    # files of settings
    (f"{S} --config nowhere.yaml", "there is no configuration file nowhere.yaml"),
    (f"{S} --config broken.yaml", "broken.yaml is not valid YAML at line 3, column …: check its …"),
    (f"{S} --config text.yaml", "text.yaml must hold settings by name (trainer:, model:, data:), not just text or a list"),
    (f"{S} --config key.yaml", "no setting is called trainer.max_epoch. Did you mean trainer.max_epochs?"),
    (f"{S} --config top.yaml", "no setting is called trainr.max_epochs. Did you mean trainer.max_epochs?"),
    (f"{S} --config value.yaml", "--lr (model.lr) must be a number, not fast"),
    ("--recipe key.yaml", "no setting is called trainer.max_epoch. Did you mean trainer.max_epochs?"),
    # devices
    (f"{S} --accelerator gpu", f"{NO_GPU}: leave --accelerator out, or use --accelerator cpu"),
    (f"{S} --accelerator gpus", "no accelerator is called 'gpus'. Did you mean gpu?"),
    (f"{S} --devices 0,1", f"--devices 0,1 names GPUs, but {NO_GPU}: --devices 2 runs two processes on it"),
    (f"{S} --devices [1]", f"--devices [1] names GPUs, but {NO_GPU}: --devices 2 runs two processes on it"),
    (f"{S} --devices -1", f"--devices -1 means every GPU, but {NO_GPU}: use --devices 1"),
    (f"{S} --devices=0", "--devices 0 leaves nothing to train on: use a number (2), ids (0,1) or auto"),
    (f"{S} --devices two", "--devices two is not understood: use a number (2), ids (0,1) or auto"),
    # checkpoints
    ("test", "which weights? Name a checkpoint: --ckpt_path lightning_logs/NAME/checkpoints/best.ckpt"),
    ("validate", "which weights? …"),
    ("predict", "which weights? …"),
    ("test --ckpt_path nowhere.ckpt", "there is no checkpoint nowhere.ckpt"),
    (f"test {S} --ckpt_path last", "there is no checkpoint last"),
    (f"test {S} --resume", "--resume goes on with a training; `test` takes --ckpt_path PATH"),
    ("--resume", "nothing to resume: lightning_logs holds no run with checkpoints. Start one without --resume."),
    ("--resume nowhere", NOWHERE),
    ("fit --ckpt_path nowhere", NOWHERE),
    ("--resume loose.ckpt", "loose.ckpt lies in no run folder: --resume takes a run, or a checkpoint in its checkpoints/"),
    # folders
    (f"{S} --dataset folder", "the data set `folder` needs --data-dir PATH, which holds train/<class>/… and test/<class>/…"),
    (f"{S} --dataset folder --data-dir nowhere", "nowhere does not exist: --data-dir must name a folder with ROOT/train/…"),
    (f"{S} --dataset folder --data-dir empty", "empty has no class folders: want ROOT/train/…"),
    (f"{S} --dataset folder --data-dir lone", "lone has one class only (cat), a classifier needs two or more."),
    (
        f"{S} --dataset folder --data-dir unlike",
        "the classes below unlike differ: train/ alone has dog and test/ alone has cow; both need a folder for every class",
    ),
    (f"{S} --dataset folder --data-dir tiny {OWN}", "lenet cannot take 8×8 images; the least size is 16×16."),
]  # fmt: skip


@pytest.fixture
def files(here: Path) -> Path:
    """The files that the rows of the table name."""
    for name, text in {
        "broken.yaml": "trainer:\n  max_epochs: [1\nmodel: {",
        "text.yaml": "hello\n",
        "key.yaml": "trainer:\n  max_epoch: 3\n",
        "top.yaml": "trainr:\n  max_epochs: 3\n",
        "value.yaml": "model:\n  lr: fast\n",
        "loose.ckpt": "",
    }.items():
        (here / name).write_text(text)
    (here / "empty").mkdir()
    draw_folder(here / "lone", {"cat": 3})
    draw_folder(here / "unlike", {"train/cat": 2, "train/dog": 2, "test/cat": 2, "test/cow": 2})
    draw_folder(here / "tiny", TWO_CLASSES, size=8)
    return here


@pytest.mark.parametrize(("words", "line"), TYPED, ids=[words.replace(S, "…") for words, _ in TYPED])
def test_what_cannot_be_meant_is_answered_in_one_line_and_leaves_no_run(files: Path, words: str, line: str) -> None:
    refused(typed(*words.split()), f"cifar-lit: {line}", 2)
    assert not (files / "lightning_logs").exists()


@pytest.mark.parametrize("words", ["--epochs many", "--dataset folder", "--config broken.yaml", "--devices two"])
def test_debug_shows_the_traceback_before_the_line(files: Path, words: str) -> None:
    plain, debugged = typed(*S.split(), *words.split()), typed(*S.split(), *words.split(), "--debug")
    assert "Traceback (most recent call last):" in debugged.err
    assert "UsageError" in debugged.err
    assert debugged.complaints[-1:] == plain.complaints
    assert debugged.code == plain.code == 2


# ---- what fails


def test_a_damaged_image_is_named_and_can_be_left_out(here: Path) -> None:
    draw_folder(here / "own", TWO_CLASSES)
    whole = (here / "own/train/dog/1.png").read_bytes()
    (here / "own/train/dog/1.png").write_bytes(whole[:40])
    words = [*S.split(), "--dataset", "folder", "--data-dir", "own", "--data.val_size", "0", *OWN.split()]
    expected = "cifar-lit: 1 of 10 images below own are damaged: train/dog/1.png (…); …--data.skip_bad true"
    answer = typed(*words)
    assert matches(expected, answer.complaints[-1])
    assert answer.code == 1
    assert not (here / "lightning_logs").exists()
    skipped = typed(*words, "--data.skip_bad", "true")
    assert skipped.code == 0
    assert "1 of 6 train images below own are damaged and left out: train/dog/1.png" in skipped.err


def test_logs_that_cannot_be_written_are_told(here: Path) -> None:
    answer = typed(*S.split(), "--logs", "small.yaml/runs")
    line = "cifar-lit: cannot make a run folder in small.yaml/runs: Not a directory. Choose another with --logs DIR."
    refused(answer, line, 1)


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root may write everywhere")
def test_logs_without_permission_are_told(here: Path) -> None:
    (here / "closed").mkdir(mode=0o500)
    refused(
        typed(*S.split(), "--logs", "closed/runs"), "cifar-lit: cannot make a run folder in closed/runs: Permission denied. …", 1
    )


def test_without_network_each_source_is_told_with_the_way_round_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound but not listening: a connection is refused
        sources = [f"http://localhost:{port}/one.tar.gz", f"http://127.0.0.1:{port}/two.tar.gz"]
        monkeypatch.setattr(archives, "CIFAR_MIRRORS", {"cifar-10-python.tar.gz": sources})
        answer = typed(*S.split(), "--dataset", "cifar10", *OWN.split())
    told = answer.complaints[-1]
    assert answer.code == 1
    assert "Traceback" not in answer.err
    for part in (
        "localhost",
        "127.0.0.1",
        "refused",
        "data/cifar-10-python.tar.gz",
        "--data.url",
        "`--recipe quickstart` needs no download",
    ):
        assert part in told
    assert not (here / "lightning_logs").exists()


def test_a_loss_that_is_not_finite_stops_the_training_in_one_line(here: Path) -> None:
    answer = typed(*S.split(), "--lr", "1e30")
    assert matches(
        "cifar-lit: the loss is nan at step … of epoch 0; stopped before it reached the weights. …lower --lr…",
        answer.complaints[-1],
    )
    assert (len(answer.complaints), answer.code) == (1, 1)
