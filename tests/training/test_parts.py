"""Both classes work under a plain Lightning Trainer, together and each with a foreign counterpart."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from parts import COMBINATIONS, IMAGES, PlainData, PlainModel, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cifar_lit import ImageClassifier, ImageData
from cifar_lit.base.errors import UsageError


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_plain_trainer_fits_validates_tests_predicts_and_resumes(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    assert result["best"] == "best.ckpt"
    assert result["resumed equal"] and result["loaded equal"]
    assert result["steps"][0] == result["steps"][1] > 0
    assert {"test/accuracy", "test/loss"} <= result["tested"].keys()
    assert "val/accuracy" in result["validated"]
    assert result["batches predicted"] > 0


def test_the_net_takes_its_shape_from_the_datamodule(tmp_path: Path) -> None:
    model = ImageClassifier("lenet")
    trainer = L.Trainer(fast_dev_run=True, accelerator="cpu", default_root_dir=tmp_path)
    trainer.fit(model, ImageData("shapes", images={"count": IMAGES, "image_size": 20, "channels": 1, "num_classes": 4}))
    assert model.net(torch.zeros(2, 1, 20, 20)).shape == (2, 4)
    assert (model.hparams["input_shape"], model.hparams["num_classes"]) == ([1, 20, 20], 4)


def test_a_plain_loader_needs_the_number_of_classes(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 3, 32, 32), torch.arange(8)), 4)
    trainer = L.Trainer(fast_dev_run=True, accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(UsageError, match=r"the number of classes is unknown: use ImageClassifier\(num_classes=…\)"):
        trainer.fit(ImageClassifier("lenet"), loader)
    trainer.fit(ImageClassifier("lenet", num_classes=8), loader)


def test_mixed_images_are_refused_for_a_plain_model(tmp_path: Path) -> None:
    trainer = L.Trainer(fast_dev_run=True, accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(UsageError, match=r"data\.augment mixup and cutmix need a model that reads batch\.targets"):
        trainer.fit(
            PlainModel(), ImageData("shapes", augment={"mixup": 0.2}, images={"count": IMAGES, "image_size": 16})
        )


def test_predict_accepts_a_loader_of_images_without_labels(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_progress_bar=False)
    loader: Any = DataLoader(torch.randn(6, 3, 32, 32), batch_size=6)
    (batch,) = trainer.predict(ImageClassifier("lenet", num_classes=5), loader)  # type: ignore[misc]
    assert batch["probabilities"].shape == (6, 5)


def test_a_users_module_trains_and_is_needed_again_to_load_the_checkpoint(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    trainer.fit(ImageClassifier(net, lr=0.01), datamodule=PlainData())
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    other = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "own.ckpt", net=other, weights_only=True)
    assert loaded.net is other and torch.equal(other[1].weight, net[1].weight)
    with pytest.raises(UsageError, match="There is no net named 'Sequential'"):
        ImageClassifier.load_from_checkpoint(tmp_path / "own.ckpt", weights_only=True)
