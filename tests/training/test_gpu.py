"""Training on a CUDA device: real commands with a compiled net, and images on the device."""

import shlex
from pathlib import Path

import pytest
import torch
from real_runs import metrics, only_run, run_here
from small_runs import BATCHES, assert_close, classifier, fitted, shapes_data, trainer, weights

import cifar_lit
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import TrainLoader
from cifar_lit.training.checkpoint import read_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

# The quickstart's images, net and schedule, for fewer epochs.
SHAPES = [
    *shlex.split("--recipe resnet18"),  # the default recipe whitens and changes image sizes
    *shlex.split("--dataset shapes --data.count 8000 --data.val_size 500 --batch-size 128 --net shapenet"),
    *shlex.split("--lr 0.1 --model.optimizer_options.momentum 0.9 --model.schedule one_cycle"),
    *shlex.split("--data.augment.crop 2 --devices 1"),
]


@pytest.mark.parametrize(("precision", "difference"), [("32-true", 0.005), ("bf16-mixed", 0.01), ("16-mixed", 0.005)])
def test_a_net_trained_on_the_gpu_scores_alike_on_the_cpu(tmp_path: Path, precision: str, difference: float) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flags = ["--epochs", "4", "--precision", precision, "--accelerator", "gpu"]
    answer = run_here(["train", *SHAPES, *flags], tmp_path / "gpu")
    assert answer.code == 0, answer.err
    assert "devices      1 × cuda" in answer.out
    results = metrics(tmp_path / "gpu")
    assert (results["accelerator"], results["devices"], results["precision"]) == ("gpu", 1, precision)
    assert results["test"]["images"] == 1600
    assert results["test"]["accuracy"] > 0.3  # chance is 0.1
    assert torch.cuda.max_memory_allocated() - before < 1 << 30  # a batch of 128 small images needs far less

    best = only_run(tmp_path / "gpu") / "checkpoints" / "best.ckpt"
    words = ["test", "--ckpt_path", str(best), "--accelerator", "cpu", "--precision", "32-true", "--devices", "1"]
    assert run_here(words, tmp_path / "cpu").code == 0
    assert metrics(tmp_path / "cpu")["test"]["accuracy"] == pytest.approx(results["test"]["accuracy"], abs=difference)
    assert {tensor.device.type for tensor in read_checkpoint(best)["state_dict"].values()} == {"cpu"}
    net = cifar_lit.load(only_run(tmp_path / "gpu"))
    assert {parameter.device.type for parameter in net.net.parameters()} == {"cpu"}
    assert net(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 10)


# ---- images on the device


def on_gpu(placement: str) -> tuple[ImageData, TrainLoader]:
    augment = {"crop": 3, "flip": "alternating", "cutout": 4}
    data = shapes_data(augment=augment, placement=placement, workers=2)
    data.trainer = trainer(accelerator="gpu")
    return data, data.train_dataloader()


def test_images_on_the_device_give_the_batches_of_the_cpu() -> None:
    data, loader = on_gpu("auto")
    assert data.placed("train").images.images.device.type == "cuda"
    assert (data.placed("train").place, data.placed("test").place) == ("device", "device")
    on_cpu = shapes_data(augment=data.augment).train_dataloader()
    for epoch in (0, 1):
        for each in (loader, on_cpu):
            each.set_epoch(epoch)
        for batch, expected in zip(loader, on_cpu, strict=True):
            assert batch.images.device.type == "cuda"
            for name in ("images", "labels", "indices"):
                assert torch.equal(getattr(batch, name).cpu(), getattr(expected, name))
            assert batch.loss_weight == expected.loss_weight


def test_an_epoch_of_batches_is_transferred_without_synchronisation() -> None:
    _, loader = on_gpu("auto")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(loader)) == BATCHES
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_images_on_the_host_arrive_in_pinned_memory_and_train_the_same_net(monkeypatch: pytest.MonkeyPatch) -> None:
    data, loader = on_gpu("host")
    assert data.placed("train").images.images.device.type == "cpu"
    batches = list(loader)
    assert [len(batch.labels) for batch in batches] == [16] * 6 + [4]
    assert all(batch.images.is_pinned() and batch.labels.is_pinned() for batch in batches)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device, host = classifier(lr=0.02), classifier(lr=0.02)
    for model, placement in ((device, "device"), (host, "host")):
        fitted(model, shapes_data(augment={"crop": 2}, placement=placement), accelerator="gpu", max_epochs=6)
    assert_close(weights(host), weights(device), rtol=1e-3, atol=1e-4)
