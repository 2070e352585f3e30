"""Recorded steps, images on the device, and chunks, where there is a device for them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Rows, StopAt, broken_data, classifier, fitted, shapes_data, trainer, weights
from torch import Tensor

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import TrainLoader
from cifar_lit.data.resolution import shrink
from cifar_lit.training.callbacks import Clock, Interrupted, NotFiniteLoss, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import last_checkpoint, read_checkpoint
from cifar_lit.training.cuda_graph import WARM_UP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.usefixtures("dropout_net"),
]

BATCHES = 7  # of an epoch: six of 16 images and one of 4


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """Without TensorFloat32, so that what is compared is not the rounding of products."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(products)


class Recorded(Callback):
    """Counts the shapes of batches whose step was recorded, as the training ends."""

    shapes = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step: Any = pl_module._step
        self.shapes = sum(each._replay is not None for each in step._captured.values())


def on_gpu(model: Any, data: ImageData, *callbacks: Callback, **settings: Any) -> pl.Trainer:
    return fitted(model, data, *callbacks, **{"accelerator": "gpu", "max_epochs": 6, "log_every_n_steps": 4, **settings})


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-3, atol: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=name)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "momentum, a schedule by the step": ({"momentum": 0.9, "schedule": "one_cycle", "lr": 0.02}, {}, {}),
    "Nesterov, clipped, a schedule by the epoch": (
        {"momentum": 0.9, "nesterov": True, "schedule": "cosine", "schedule_every": "epoch", "lr": 0.02},
        {},
        {"gradient_clip_val": 0.1},
    ),
    "clipped by value": ({"lr": 0.02}, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "adamw": ({"optimizer": "adamw", "lr": 0.001, "schedule": "triangular"}, {}, {}),
    "muon": (
        {"net": "whitened", "net_options": {"widths": [8, 12]}, "optimizer": "muon", "momentum": 0.6, "lr": 0.02},
        {},
        {"max_epochs": 4},
    ),
    "smaller images first": ({"net": "shapenet", "lr": 0.02}, {"resolutions": {8: 0.5}}, {}),
    "an average": ({"ema_decay": 0.9, "lr": 0.02}, {"chunk": 1}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_train_and_log_as_single_ones_within_rounding(name: str) -> None:
    model_settings, data_settings, settings = SETTINGS[name]
    ends, curves, counts = [], [], []
    for capture in (False, True):
        rows, recorded, clock = Rows(), Recorded(), Clock()
        model = classifier(**model_settings, capture=capture)
        data = shapes_data(crop=2, flip="random", **data_settings)
        done = on_gpu(model, data, recorded, clock, logger=rows, **settings)
        assert recorded.shapes == (2 if capture else 0)
        ends.append(weights(model))
        curves.append(rows.rows)
        counts.append((done.global_step, clock.images))
    loose = {"rtol": 0.05, "atol": 0.02} if name == "muon" else {}  # whose products are of bfloat16
    assert_close(ends[1], ends[0], **loose)
    assert counts[0] == counts[1]
    for (step, values), (usual_step, usual) in zip(curves[1], curves[0], strict=True):
        assert step == usual_step
        for each in {"train/loss", "lr"} & usual.keys():
            assert values[each] == pytest.approx(usual[each], rel=0.02, abs=1e-6)


def test_recorded_steps_in_bfloat16_learn_alike() -> None:
    losses = []
    for capture in (False, True):
        rows, model = Rows(), classifier(capture=capture, momentum=0.9, lr=0.02)
        on_gpu(model, shapes_data(), logger=rows, precision="bf16-mixed")
        losses.append(list(rows.of("train/loss").values()))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_dropout_draws_anew_at_every_replay() -> None:
    rows, model = Rows(), classifier(net="dropout", lr=1e-12)
    on_gpu(model, shapes_data(shuffle=False), logger=rows, log_every_n_steps=7)
    replayed = list(rows.of("train/loss").values())[WARM_UP + 1 :]
    assert len(set(replayed)) == len(replayed) == 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("step", [0, 4, 26])
def test_a_loss_that_is_not_finite_stays_out_of_weights_and_checkpoints(step: int, optimizer: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "momentum": 0.9 if optimizer != "adamw" else 0.0}
    expected, model, last = classifier(**settings), classifier(**settings), last_checkpoint()
    if step:
        on_gpu(expected, shapes_data(), max_steps=step, max_epochs=-1)
    last.dirpath = str(tmp_path)
    used = trainer(last, accelerator="gpu", max_epochs=6, enable_checkpointing=True, log_every_n_steps=100)
    with pytest.raises(NotFiniteLoss, match=f"the loss is not finite at step {step} of epoch {step // BATCHES}$"):
        used.fit(model, datamodule=broken_data(step))
    assert used.global_step == step
    assert_close(
        {name: tensor.cpu() for name, tensor in weights(model).items()},
        {name: tensor.cpu() for name, tensor in weights(expected).items()},
        rtol=0.05 if optimizer == "muon" else 1e-3,
        atol=0.02 if optimizer == "muon" else 1e-4,
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
    on_cpu = shapes_data(
        crop=3,
        flip="alternating",
        cutout=4,
    ).train_dataloader()
    for epoch in (0, 1):
        for each in (loader, on_cpu):
            each.set_epoch(epoch)
        for found, expected in zip(loader, on_cpu, strict=True):
            assert found.images.device.type == "cuda"
            for name in ("images", "labels", "indices"):
                assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
            assert (found.sizes, found.shares) == (expected.sizes, expected.shares)


def test_images_that_stay_on_the_host_come_in_page_locked_memory() -> None:
    data, loader = placed("host")
    assert data.placed("train")[0].images.device.type == "cpu"
    chunks = list(loader)
    assert [list(chunk.sizes) for chunk in chunks] == [[16] * 3, [16] * 3, [4]]
    assert all(chunk.images.is_pinned() and chunk.labels.is_pinned() for chunk in chunks)


def test_a_fit_from_the_host_trains_the_net_of_one_on_the_device() -> None:
    ends = []
    for placement in ("device", "host"):
        model = classifier(lr=0.02)
        on_gpu(
            model,
            shapes_data(
                crop=2,
                placement=placement,
            ),
        )
        ends.append(weights(model))
    assert_close(ends[1], ends[0])


def test_images_shrink_on_the_device_as_on_the_cpu() -> None:
    images = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8)
    torch.testing.assert_close(shrink(images.cuda(), 24).cpu(), shrink(images, 24), rtol=0, atol=1e-3)


def test_a_plan_of_an_epoch_is_brought_to_the_device_without_waiting_for_it() -> None:
    _, loader = placed("auto")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunks = list(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(chunks) == 3


# ---- chunks


def test_a_run_counts_its_steps_however_many_a_call_makes() -> None:
    found = {}
    for chunk in (1, 4, 0):
        rows, clock = Rows(), Clock()
        done = on_gpu(classifier(lr=0.02), shapes_data(chunk=chunk), clock, logger=rows, max_epochs=3)
        found[chunk] = (done.global_step, clock.images, [step for step, _ in rows.rows])
    assert found[1][:2] == (3 * BATCHES, 300)
    assert found[1] == found[4] == found[0]


@pytest.mark.parametrize("step", [3, 9, 31])
def test_a_recorded_run_that_was_stopped_goes_on_from_its_step(step: int, tmp_path: Path) -> None:
    def run(folder: str, stop_at: int = 0, resume: bool = False) -> dict[str, Tensor]:
        last, model = last_checkpoint(), classifier(momentum=0.9, lr=0.02, schedule="one_cycle")
        last.dirpath = str(tmp_path / folder)
        stop = OrderlyStop(last)
        path = tmp_path / folder / "last.ckpt" if resume else None
        callbacks = [RandomState(), last, StopAt(stop, stop_at), stop]
        try:
            on_gpu(
                model,
                shapes_data(
                    crop=2,
                ),
                *callbacks,
                resume=path,
                enable_checkpointing=True,
            )
        except Interrupted:
            assert stop_at
        return weights(model)

    expected = run("whole")
    run("parts", stop_at=step)
    kept = read_checkpoint(tmp_path / "parts" / "last.ckpt")
    position = -(-(step % BATCHES) // 3) * 3
    assert kept["global_step"] == step // BATCHES * BATCHES + position
    rates = [group["lr"] for group in kept["optimizer_states"][0]["param_groups"]]
    assert all(isinstance(rate, float) and math.isfinite(rate) for rate in rates)
    assert_close(run("parts", resume=True), expected)
