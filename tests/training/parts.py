"""Our two classes, alone or with plain Lightning counterparts, under a plain Trainer."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cifar_lit import ImageClassifier, ImageData

IMAGES, TESTED = 90, 18  # generated images: 81 for training, 9 for validation

SMALL = {"count": IMAGES, "image_size": 16}


def our_data() -> ImageData:
    """Return generated images in global batches of 20. The last batch of an epoch has a single image."""
    augment = {"crop": 1, "flip": "random"}
    return ImageData("shapes", batch_size=20, augment=augment, images=SMALL, loading={"eval_batch_size": 5})


def our_model() -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier("lenet", lr=0.02, optimizer_options={"momentum": 0.9})


class PlainData(L.LightningDataModule):
    """A datamodule as in a tutorial."""

    class_count, input_shape = 10, [3, 16, 16]

    def loader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(IMAGES, 3, 16, 16, generator=generator)
        return DataLoader(TensorDataset(images, torch.arange(IMAGES) % 10), batch_size=20, num_workers=0)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class PlainModel(L.LightningModule):
    """A module as in a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val/accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("test/accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)
        self.log("test/loss", F.cross_entropy(self.net(images), labels), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).softmax(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


COMBINATIONS: dict[str, Any] = {
    "ours": (our_model, our_data),
    "our model": (our_model, PlainData),
    "our data": (PlainModel, our_data),
}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Fit, validate, test, predict and resume. Return the results."""
    make_model, make_data = COMBINATIONS[name]
    monitor: dict[str, Any] = {"monitor": "val/accuracy", "mode": "max"}
    best = ModelCheckpoint(folder / name, filename="best", enable_version_counter=False, **monitor)
    stop = EarlyStopping(**monitor, patience=9)
    settings: dict[str, Any] = {
        **{"accelerator": "cpu", "default_root_dir": folder, "accumulate_grad_batches": 2},
        **{"log_every_n_steps": 1, "enable_model_summary": False},
    }
    trainer = L.Trainer(max_epochs=3, callbacks=[best, stop], **settings)
    model, data = make_model(), make_data()
    trainer.fit(model, datamodule=data)
    (validated,) = trainer.validate(model, datamodule=data, verbose=False)
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    predicted = trainer.predict(model, datamodule=data)
    checkpoint = folder / name / "middle.ckpt"
    first_trainer = L.Trainer(max_epochs=2, **settings)
    first_trainer.fit(first := make_model(), datamodule=make_data())
    first_trainer.save_checkpoint(checkpoint)
    resumed_trainer = L.Trainer(max_epochs=3, **settings)
    resumed_trainer.fit(resumed := make_model(), datamodule=make_data(), ckpt_path=checkpoint)
    loaded = type(model).load_from_checkpoint(checkpoint, weights_only=True)
    return {
        "validated": validated,
        "tested": tested,
        "batches predicted": len(predicted or []),
        "steps": [trainer.global_step, resumed_trainer.global_step],
        "best": Path(best.best_model_path).name,
        "resumed equal": all(torch.equal(*pair) for pair in zip(model.parameters(), resumed.parameters(), strict=True)),
        "loaded equal": all(torch.equal(*pair) for pair in zip(first.parameters(), loaded.parameters(), strict=True)),
    }
