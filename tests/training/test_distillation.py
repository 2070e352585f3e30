"""model.teacher: a net is trained on the predictions of another, which is no part of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.command_line import SMALL, assert_refused, config_of, run_command
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from small_runs import BATCHES, At, assert_close, classifier, fitted, same, shapes_data, trainer, weights
from test_ranks import TWO, two_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cifar_lit import load
from cifar_lit.errors import UsageError
from cifar_lit.inference.load import Classifier
from cifar_lit.models.registry import build_net
from cifar_lit.runs.model_file import LoadedNet, ModelCard
from cifar_lit.training.checkpoint import read_checkpoint


def teacher(side: int = 24, seed: int = 1, **values: Any) -> Classifier:
    """Return a net with confident predictions, for images of another size and normalisation than `shapes_data`."""
    card: dict[str, Any] = {"input_shape": [3, side, side], "classes": [*shapes_data().classes]}
    card = {"net": "shapenet", "width": 1.0, "mean": [0.3, 0.4, 0.6], "std": [0.2, 0.3, 0.1], **card, **values}
    torch.manual_seed(seed)
    net: Any = build_net(card["net"], **ModelCard(**card).net_settings)
    net[-1].weight.data.mul_(30)
    return Classifier(LoadedNet(net, ModelCard(**card)).eval())


class Losses(Callback):
    """Record the loss and the rows of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append((outputs["loss"].detach(), batch.indices))


@pytest.mark.parametrize("side", [16, 24])
def test_the_loss_is_the_mean_of_cross_entropy_and_divergence(side: int) -> None:
    """The reference gives the teacher the pixels, as `classify` does. A step does not move the net."""
    taught, losses, data = teacher(side), Losses(), shapes_data()
    own = {name: values.clone() for name, values in taught.net.state_dict().items()}
    model = classifier(lr=1e-30, teacher=taught, teacher_weight=0.7, teacher_temperature=3.0)
    fitted(model, data, losses, max_epochs=1)
    model.requires_grad_(False)
    for loss, rows in losses.steps:
        pixels = data.train_images.take(rows).permute(0, 3, 1, 2)
        logits = model(pixels.float().div(255).sub(0.5).div(0.25))
        if side == 16:
            answers = taught(pixels)
        else:
            scaled = F.interpolate(pixels.float().div(255), (24, 24), mode="bilinear", antialias=True)
            answers = taught.net.net((scaled - taught.net.mean) / taught.net.std)
        expected, found = ((values.double() / 3).softmax(1) for values in (answers, logits))
        divergence = (expected * (expected / found).log()).sum(1).mean()
        entropy = F.cross_entropy(logits, data.train_images.labels[rows])
        assert float(loss) == pytest.approx(float(0.3 * entropy + 0.7 * 9 * divergence), rel=1e-4)
    assert same(taught.net.state_dict(), own)  # norms too: the teacher is in evaluation mode


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_the_teacher_has_the_precision_of_the_training(precision: Any) -> None:
    dtypes: set[torch.dtype] = set()
    taught, model = teacher(), classifier(net="shapenet")

    class Seen(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            net = pl_module.loss_hooks[0]._net
            net.register_forward_hook(lambda net, inputs, output: dtypes.add(output.dtype))

    model.teacher = taught
    fitted(model, shapes_data(), Seen(), max_epochs=1, precision=precision)
    assert dtypes == {torch.float64 if precision == "64-true" else torch.bfloat16}
    assert taught.net.mean.dtype == next(taught.net.parameters()).dtype == torch.float32


@pytest.mark.parametrize("step", [3, BATCHES + 2])
def test_a_taught_run_resumes_bit_equal_with_the_same_teacher_only(step: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"net": "shapenet", "momentum": 0.9}
    save = At(step, lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"), after=True)
    whole = classifier(**settings, teacher=teacher())
    fitted(whole, shapes_data(), save)
    model = classifier(**settings, teacher=teacher())
    fitted(model, shapes_data(), resume=tmp_path / "a.ckpt")
    assert same(weights(model), weights(whole))
    checkpoint = read_checkpoint(tmp_path / "a.ckpt")
    assert checkpoint["state_dict"].keys() == weights(classifier(net="shapenet")).keys()
    assert (tmp_path / "a.ckpt").stat().st_size < 2.5 * sum(4 * tensor.numel() for tensor in weights(model).values())
    for other in (teacher(seed=2), teacher(std=[0.2, 0.3, 0.2])):
        with pytest.raises(UsageError, match="teacher has changed since the training began"):
            fitted(classifier(**settings, teacher=other), shapes_data(), resume=tmp_path / "a.ckpt")


def taught_on_two_ranks(folder: str) -> list[int]:
    """Train on two ranks and on one, with a teacher and averaged weights, and write whether the ranks agree."""

    def train(**settings: Any) -> dict[str, Tensor]:
        model = classifier(teacher=teacher(), ema_decay=0.9)
        fitted(model, shapes_data(), **settings)
        return weights(model)

    def command() -> int:
        state = train(**TWO)
        torch.save(state, Path(folder, f"{os.environ['RANK']}.pt"))
        return 0

    return two_ranks(command, folder)


def test_two_ranks_train_as_one_does(forking: Callable[..., Any], tmp_path: Path) -> None:
    assert forking(taught_on_two_ranks, folder=str(tmp_path)) == [0, 0], (tmp_path / "rank-0.txt").read_text()
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    alone = classifier(teacher=teacher(), ema_decay=0.9)
    fitted(alone, shapes_data())
    assert same(*states)
    assert_close(states[0], weights(alone), atol=1e-5)


def test_a_taught_net_is_closer_to_its_teacher(tmp_path: Path) -> None:
    data = shapes_data(count=400)
    model = classifier(net="shapenet", lr=0.1, momentum=0.9)
    fitted(model, data, max_epochs=6)
    taught = teacher(16, mean=[0.5] * 3, std=[0.25] * 3)
    taught.net.net.load_state_dict(model.net.state_dict())
    images = data.test_images.take(torch.arange(len(data.test_images))).permute(0, 3, 1, 2)
    divergences = []
    for settings in ({}, {"teacher": taught}):
        student = classifier(lr=0.05, momentum=0.9, **settings)
        fitted(student, data, max_epochs=6)
        own = student((images.float() / 255 - 0.5) / 0.25).log_softmax(1)
        divergences.append(float(F.kl_div(own, taught(images).softmax(1), reduction="batchmean")))
    assert divergences[1] < 0.8 * divergences[0]


def test_unsuitable_teachers_are_refused() -> None:
    other = [*teacher().classes[:-1], "other"]
    for taught, data, fault in (
        (teacher(classes=other), shapes_data(), r"other classes \(3 channels, .*other\) than these"),
        (
            teacher(input_shape=[1, 16, 16], mean=[0.5], std=[0.5]),
            shapes_data(),
            r"other classes \(1 channels, .*\) than these \(3 channels",
        ),
        (
            teacher(classes=[", ".join(teacher().classes[:2]), *teacher().classes[2:]]),
            shapes_data(),
            r"other classes \(3 channels, 9 classes: .*\) than these \(3 channels, 10 classes: ",
        ),
        ("lightning_logs/x", shapes_data(), r"give cifar_lit.load\('lightning_logs/x'\)"),
    ):
        with pytest.raises(UsageError, match=fault):
            fitted(classifier(teacher=taught), data)
    loader = DataLoader(TensorDataset(torch.zeros(4, 3, 16, 16), torch.arange(4)))
    with pytest.raises(UsageError, match="needs classes, input_shape and statistics of the datamodule"):
        trainer().fit(classifier(teacher=teacher()), loader)
    for settings in ({"teacher_weight": 1.5}, {"teacher_temperature": 0.0}, {"teacher_temperature": float("inf")}):
        with pytest.raises(UsageError, match="|".join(settings)):
            classifier(**settings)


# ---- the command line


def test_a_run_with_a_teacher_records_it_and_resumes_only_with_it(working_folder: Path, run_dir: Path) -> None:
    shutil.copytree(run_dir, "big")
    words = ("--net", "tudui", "--epochs", "1", "--model.teacher")
    assert run_command(*SMALL, *words, "big").code == 0
    run = Path("lightning_logs/small-1")
    assert config_of(run)["model"]["teacher"] == "big"
    (state,) = (
        state for state in read_checkpoint(run / "checkpoints/last.ckpt")["callbacks"].values() if "hash" in state
    )
    assert load_file(run / "model.safetensors").keys() == load(run).net.net.state_dict().keys()
    assert run_command(*SMALL, *words, "big/model.safetensors").code == 0  # the same file by another name
    last = read_checkpoint(Path("lightning_logs/small-2/checkpoints/last.ckpt"))
    assert state in last["callbacks"].values()

    (run / "metrics.json").unlink()
    before = json.dumps(config_of(run))
    shutil.move("big", "moved")
    resume = ("--resume", run)
    assert run_command("test", "--ckpt_path", run / "checkpoints/last.ckpt").code == 0  # needs no teacher
    assert_refused(run_command(*resume), 2, "there is no big")
    assert_refused(run_command(*resume, "--model.teacher", "lightning_logs/small-2"), 2, "model.teacher has changed")
    assert json.dumps(config_of(run)) == before
    assert run_command(*resume, "--model.teacher", "moved").code == 0


def test_a_teacher_of_other_classes_leaves_no_run_folder(working_folder: Path, run_dir: Path) -> None:
    answer = run_command(*SMALL, "--data.num_classes", "5", "--model.teacher", run_dir)
    assert_refused(answer, 2, "model.teacher was trained on other classes")
    assert not Path("lightning_logs").exists()


OWN_NET = """import torch
def build(channels, image_size, num_classes, width):
    layers = torch.nn.Flatten(), torch.nn.Linear(channels * image_size[0] * image_size[1], num_classes)
    return torch.nn.Sequential(*layers)
"""


def test_a_teacher_with_a_net_of_its_own_needs_trust_unless_this_user_trained_it(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_folder / "own_teacher.py").write_text(OWN_NET)
    monkeypatch.syspath_prepend(working_folder)
    monkeypatch.setattr("cifar_lit.plugins._allowed", set())
    assert run_command(*SMALL, "--net", "own_teacher.build", "--epochs", "1", "--logs", "own").code == 0
    words = (*SMALL, "--epochs", "1", "--model.teacher", "own/small-1")
    monkeypatch.setattr("cifar_lit.plugins._allowed", set())
    assert run_command(*words).code == 0
    monkeypatch.setattr("cifar_lit.plugins._allowed", set())
    with Path("own/small-1/config.yaml").open("a") as file:  # no longer the text of a run of this user
        file.write("\n")
    assert_refused(run_command(*words), 2, "own_teacher.build would run code", "--trust")
    assert run_command(*words, "--trust").code == 0
