"""Trainings on a CUDA device, where there is one: real commands, recorded steps, images on the device."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from real_runs import here, metrics, only_run
from small_runs import (
    BATCHES,
    Rows,
    assert_close,
    best_and_last,
    broken_data,
    classifier,
    fitted,
    shapes_data,
    stop_at,
    trainer,
    weights,
)
from torch import Tensor

import cifar_lit
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import TrainLoader
from cifar_lit.data.resolution import shrink
from cifar_lit.training.callbacks import Clock, Interrupted, NotFiniteLoss, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.cuda_graph import WARM_UP_STEPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.usefixtures("dropout_net"),
]

# The quickstart's images, net and schedule, for fewer epochs.
SHAPES = [
    *("--recipe", "resnet18"),  # not the default, which whitens and changes sizes
    *("--dataset", "shapes", "--data.count", "8000", "--data.val_size", "500", "--batch-size", "128", "--net", "shapenet"),
    *("--lr", "0.1", "--model.momentum", "0.9", "--model.schedule", "one_cycle", "--data.crop", "2", "--devices", "1"),
]


@pytest.mark.parametrize(("precision", "difference"), [("32-true", 0.005), ("bf16-mixed", 0.01), ("16-mixed", 0.005)])
def test_a_training_on_the_gpu_learns_and_scores_alike_on_the_cpu(tmp_path: Path, precision: str, difference: float) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    done = here(["train", *SHAPES, "--epochs", "4", "--precision", precision, "--accelerator", "gpu"], tmp_path / "gpu")
    assert done.code == 0, done.err
    assert "devices      1 × cuda" in done.out
    results = metrics(tmp_path / "gpu")
    assert (results["accelerator"], results["devices"], results["precision"]) == ("gpu", 1, precision)
    assert results["test"]["images"] == 1600
    assert results["test"]["accuracy"] > 0.3  # chance is 0.1
    assert torch.cuda.max_memory_allocated() - before < 1 << 30  # a batch of 128 small images needs far less

    best = only_run(tmp_path / "gpu") / "checkpoints" / "best.ckpt"
    words = ["test", "--ckpt_path", str(best), "--accelerator", "cpu", "--precision", "32-true", "--devices", "1"]
    assert here(words, tmp_path / "cpu").code == 0
    assert metrics(tmp_path / "cpu")["test"]["accuracy"] == pytest.approx(results["test"]["accuracy"], abs=difference)
    assert {tensor.device.type for tensor in read_checkpoint(best)["state_dict"].values()} == {"cpu"}
    net = cifar_lit.load(only_run(tmp_path / "gpu"))
    assert {parameter.device.type for parameter in net.net.parameters()} == {"cpu"}
    assert net(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 10)


def test_a_stopped_training_on_the_gpu_goes_on_from_its_step(tmp_path: Path) -> None:
    words = ["train", *SHAPES, "--epochs", "2", "--accelerator", "gpu", "--trainer.callbacks=at_step.AtStep"]
    assert here(words, tmp_path, AT_STEP="80", AT_STEP_SIGNAL="2").code == 130
    resumed = here(["train", "--resume"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert "at epoch 2, step 81" in resumed.out
    assert metrics(tmp_path)["accelerator"] == "gpu"


# ---- steps


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Without TensorFloat32, so that what is compared is not the rounding of products."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(products)


CLOSE = {"rtol": 1e-3, "atol": 1e-4}
LOOSE = {"rtol": 0.05, "atol": 0.02}  # of Muon, whose products are of bfloat16


class Recorded(Callback):
    """Counts the shapes of batches whose step was recorded, as the training ends."""

    shapes = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        graphs: Any = pl_module._graphs
        self.shapes = len(graphs._captured) if graphs else 0


def gpu_fit(model: Any, data: ImageData, *callbacks: Callback, **settings: Any) -> pl.Trainer:
    return fitted(model, data, *callbacks, **{"accelerator": "gpu", "max_epochs": 6, "log_every_n_steps": 4, **settings})


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "momentum, a schedule by the step": ({"momentum": 0.9, "schedule": "one_cycle", "lr": 0.02}, {}, {}),
    "Nesterov, clipped, a schedule by the epoch": (
        {"momentum": 0.9, "nesterov": True, "schedule": "cosine", "schedule_every": "epoch", "lr": 0.02},
        {},
        {"gradient_clip_val": 0.1},
    ),
    "muon": (
        {
            "net": "whitened",
            "net_options": {"widths": [8, 12]},
            "optimizer": "muon",
            "momentum": 0.6,
            "lr": 0.02,
            "schedule": "triangular",
        },
        {},
        {"max_epochs": 4},
    ),
    "smaller images first": ({"net": "shapenet", "lr": 0.02}, {"resolutions": {8: 0.5}}, {}),
    "an average, adamw": ({"optimizer": "adamw", "ema_decay": 0.9, "lr": 0.001}, {}, {}),
}


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_train_and_log_as_single_ones_within_rounding(name: str) -> None:
    model_settings, data_settings, settings = SETTINGS[name]
    ends, curves, counts = [], [], []
    for capture in (False, True):
        rows, recorded, clock = Rows(), Recorded(), Clock()
        model = classifier(**model_settings, capture=capture)
        data = shapes_data(crop=2, flip="random", **data_settings)
        done = gpu_fit(model, data, recorded, clock, logger=rows, **settings)
        assert recorded.shapes == (2 if capture else 0)
        ends.append(weights(model))
        curves.append(rows.rows)
        counts.append((done.global_step, clock.images))
    assert_close(ends[1], ends[0], **(LOOSE if name == "muon" else CLOSE))
    assert counts[0] == counts[1]
    for (step, values), (usual_step, usual) in zip(curves[1], curves[0], strict=True):
        assert step == usual_step
        for each in {"train/loss", "lr"} & usual.keys():
            assert values[each] == pytest.approx(usual[each], rel=0.02, abs=1e-6)


def test_recorded_steps_in_bfloat16_learn_alike() -> None:
    losses = []
    for capture in (False, True):
        rows, model = Rows(), classifier(capture=capture, momentum=0.9, lr=0.02)
        gpu_fit(model, shapes_data(), logger=rows, precision="bf16-mixed")
        losses.append(list(rows.of("train/loss").values()))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_dropout_draws_anew_at_every_replay() -> None:
    rows, model = Rows(), classifier(net="dropout", lr=1e-12, capture=True)
    gpu_fit(model, shapes_data(shuffle=False), logger=rows, log_every_n_steps=7)
    replayed = list(rows.of("train/loss").values())[WARM_UP_STEPS + 1 :]
    assert len(set(replayed)) == len(replayed) == 2


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("step", [0, 4, 26])
def test_a_loss_that_is_not_finite_stays_out_of_weights_and_checkpoints(step: int, optimizer: str, tmp_path: Path) -> None:
    settings = {"capture": True, "optimizer": optimizer, "lr": 0.01, "momentum": 0.0 if optimizer == "adamw" else 0.9}
    expected, model, (_, last) = classifier(**settings), classifier(**settings), best_and_last(tmp_path)
    if step:
        gpu_fit(expected, shapes_data(), max_steps=step, max_epochs=-1)
    used = trainer(last, accelerator="gpu", max_epochs=6, enable_checkpointing=True, log_every_n_steps=100)
    with pytest.raises(NotFiniteLoss, match=f"the loss is not finite at step {step} of epoch {step // BATCHES}$"):
        used.fit(model, datamodule=broken_data(step))
    assert used.global_step == step
    assert_close(
        {name: tensor.cpu() for name, tensor in weights(model).items()},
        {name: tensor.cpu() for name, tensor in weights(expected).items()},
        **(LOOSE if optimizer == "muon" else CLOSE),
    )
    for path in tmp_path.iterdir():
        checkpoint = read_checkpoint(path)
        assert checkpoint["global_step"] == step // BATCHES * BATCHES
        assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())


# ---- images on the device


def placed(placement: str, **settings: Any) -> tuple[ImageData, TrainLoader]:
    data = shapes_data(crop=3, flip="alternating", cutout=4, placement=placement, workers=2, **settings)
    data.trainer = trainer(accelerator="gpu")
    return data, data.train_dataloader()


def test_images_are_on_the_device_and_batches_are_those_of_the_cpu() -> None:
    data, loader = placed("auto")
    assert data.placed("train")[0].images.device.type == "cuda"
    assert (data.placed("train")[1], data.placed("test")[1]) == ("device", "device")
    on_cpu = shapes_data(crop=3, flip="alternating", cutout=4).train_dataloader()
    for epoch in (0, 1):
        for each in (loader, on_cpu):
            each.set_epoch(epoch)
        for found, expected in zip(loader, on_cpu, strict=True):
            assert found.images.device.type == "cuda"
            for name in ("images", "labels", "indices"):
                assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
            assert found.loss_weight == expected.loss_weight


def test_images_that_stay_on_the_host_come_in_page_locked_memory() -> None:
    data, loader = placed("host")
    assert data.placed("train")[0].images.device.type == "cpu"
    batches = list(loader)
    assert [len(batch.labels) for batch in batches] == [16] * 6 + [4]
    assert all(batch.images.is_pinned() and batch.labels.is_pinned() for batch in batches)


@pytest.mark.usefixtures("full_precision")
def test_a_fit_from_the_host_trains_the_net_of_one_on_the_device() -> None:
    ends = []
    for placement in ("device", "host"):
        model = classifier(lr=0.02)
        gpu_fit(model, shapes_data(crop=2, placement=placement))
        ends.append(weights(model))
    assert_close(ends[1], ends[0], **CLOSE)


def test_images_shrink_on_the_device_as_on_the_cpu() -> None:
    images = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8)
    torch.testing.assert_close(shrink(images.cuda(), 24).cpu(), shrink(images, 24), rtol=0, atol=1e-3)


def test_a_plan_of_an_epoch_is_brought_to_the_device_without_waiting_for_it() -> None:
    _, loader = placed("auto")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(batches) == BATCHES


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("step", [3, 9, 31])
def test_a_recorded_run_that_was_stopped_goes_on_from_its_step(step: int, tmp_path: Path) -> None:
    def run(folder: Path, stop: int = -1, resume: Path | None = None) -> dict[str, Tensor]:
        model, (_, last) = classifier(momentum=0.9, lr=0.02, schedule="one_cycle", capture=True), best_and_last(folder)
        orderly = OrderlyStop(last)
        callbacks = [RandomState(), last, stop_at(orderly, stop), orderly]
        gpu_fit(model, shapes_data(crop=2), *callbacks, resume=resume, enable_checkpointing=True)
        return weights(model)

    expected, last = run(tmp_path / "whole"), tmp_path / "parts" / "last.ckpt"
    with pytest.raises(Interrupted):
        run(last.parent, stop=step)
    checkpoint = read_checkpoint(last)
    assert checkpoint["global_step"] == step
    rates = [group["lr"] for group in checkpoint["optimizer_states"][0]["param_groups"]]
    assert all(isinstance(rate, float) and math.isfinite(rate) for rate in rates)
    assert_close(run(last.parent, resume=last), expected, **CLOSE)
