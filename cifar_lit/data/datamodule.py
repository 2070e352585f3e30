"""`ImageData`, the LightningDataModule: one data set with its split, loaders and preprocessing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.plugins import NameOrObject, part_name
from cifar_lit.base.settings import group_of, plain_settings, saved_settings
from cifar_lit.base.text import listed, note_once
from cifar_lit.base.trust import TrustedNames
from cifar_lit.data.augment import Augment
from cifar_lit.data.image_set import Batch, ImageSet, spread_rows
from cifar_lit.data.loaders import EvalLoader, FitLength, TrainLoader, count_batches, fit_length, in_order
from cifar_lit.data.preprocessing import Placed, Preprocessing, place_images
from cifar_lit.data.settings import DataSettings, Images, Loading, Split
from cifar_lit.data.split import SplitImages, recorded_rows, split_fault, split_record


def full_size(epoch: int) -> None:
    """Return None, the size of images in an epoch that does not scale them."""


class ImageData(TrustedNames, pl.LightningDataModule):
    """Load one data set, split it, and yield batches that are augmented and normalised on the device.

    `parts` holds the images and their split. `preprocessing` works on whole batches. A batch unpacks as (images,
    labels), so any LightningModule can train on it.

    Features set `make_train_loader` and `side` in their `setup("fit")`; before it, each fit resets them.

    Args:
        dataset: cifar10, cifar100, fashion_mnist, folder or shapes; or a function (see `data.sources`), or the import
            path of one.
        root: folder of the archives (default `data`), or your own images: a folder, or a table (.csv, .tsv, .jsonl).
        batch_size: images per training step, over all devices.
        val_size: number (1 or more) or fraction (below 1) of training images to validate on. 0 trains on all of them.
            A validation set that comes with the data set is never trained on.
        split: further settings of the split; see `Split`.
        augment: augmentation of the training images: an `Augment`, or its settings by name, such as {crop: 4, flip:
            random}; null for none.
        images: size, labels and statistics of the images: an `Images`, or its settings by name.
        loading: where images come from and are held: a `Loading`, or its settings by name.
        seed: seed of order and augmentation; --seed sets it.

    Attributes:
        make_train_loader: returns the training loader. It is called with the arguments of `TrainLoader`, the default.
        side: returns the height in pixels to which the training images of an epoch are scaled; None for full size.
    """

    # Settings that may change when a fit is resumed.
    may_change = ("data.root", "data.images.groups", *(f"data.loading.{field.name}" for field in fields(Loading)))

    def __init__(
        self,
        dataset: NameOrObject = "cifar10",
        root: str | None = None,
        batch_size: int = 128,
        val_size: float = 0.1,
        split: Split = Split(),  # noqa: B008 (frozen, as the other groups); a Python program may pass a mapping
        augment: Augment = Augment(),  # noqa: B008
        images: Images = Images(),  # noqa: B008
        loading: Loading = Loading(),  # noqa: B008
        seed: int = 0,
    ) -> None:
        super().__init__()
        split = group_of(Split, split, "data.split")
        self.augment = group_of(Augment, augment, "data.augment")
        self.images = group_of(Images, images, "data.images")
        self.loading = group_of(Loading, loading, "data.loading")
        self.dataset = part_name(dataset)
        self.batch_size = batch_size
        self.seed = seed
        self.settings = DataSettings(root, self.images, self.loading, split)
        self._val_size = val_size
        # Settings by name, for checkpoints. Statistics only if given: else a resumed fit uses those of the checkpoint.
        plain = {"dataset": dataset, "root": root, "batch_size": batch_size, "val_size": val_size, "seed": seed}
        self.given = plain_settings("data", plain)
        self.given |= plain_settings("data.split", asdict(split))
        self.given |= plain_settings("data.augment", asdict(self.augment))
        self.given |= plain_settings("data.images", asdict(self.images))
        for name in ("data.images.mean", "data.images.std"):
            if self.given[name] is None:
                del self.given[name]
        self.given |= plain_settings("data.loading", asdict(self.loading))
        self._build_parts()
        self._resumed: dict[str, object] | None = None
        self.make_train_loader: Callable[..., TrainLoader] = TrainLoader
        self.side: Callable[[int], int | None] = full_size

    def __str__(self) -> str:
        """Return the name of the data set. Lightning's text, also part of jsonargparse's errors, loads the images."""
        return f"{type(self).__name__}({self.dataset!r})"

    def _build_parts(self) -> None:
        self._train_loader: TrainLoader | None = None
        self.parts = SplitImages(self.dataset, self.settings, self._val_size)
        self._placed: dict[tuple[str, torch.device], Placed] = {}
        self.preprocessing = self._preprocessing()
        self._record: dict[str, object] = {}

    def _preprocessing(self) -> Preprocessing:
        mean, std = self.images.mean, self.images.std
        return Preprocessing(self.parts, mean=mean, std=std, augment=self.augment, seed=self.seed)

    # ---- images

    @property
    def train_images(self) -> ImageSet:
        """Training and validation images (loaded on first access). With `folds`, also the test images."""
        return self.parts.train_images

    @property
    def test_images(self) -> ImageSet:
        """Test images (loaded on first access)."""
        return self.parts.test_images

    @property
    def split(self) -> tuple[Tensor, Tensor]:
        """Rows of `train_images` for training and for validation, both int64."""
        return self.parts.split

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in label order."""
        return self.train_images.classes

    @property
    def class_count(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def has_several_labels(self) -> bool:
        """Whether an image may have several labels, or none."""
        return self.train_images.has_several_labels

    @property
    def class_counts(self) -> Tensor:
        """Number of training images of each class, int64 (classes,)."""
        return self.parts.class_counts

    @property
    def input_shape(self) -> list[int]:
        """Channels, height and width of an image."""
        return self.train_images.input_shape

    @property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, used to normalise images."""
        return self.preprocessing.statistics

    @property
    def device(self) -> torch.device:
        """The training device."""
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def placed(self, part: str) -> Placed:
        """Return the `train` or `test` images, on the device or the host."""
        key = (part, self.device)
        if key not in self._placed:
            images = self.train_images if part == "train" else self.test_images
            self._placed[key] = place_images(images, self.loading.placement, self.device)
        return self._placed[key]

    @property
    def reads_ahead(self) -> bool:
        """Whether worker processes prefetch the training images from their file."""
        return self.placed("train").place == "host"

    def plain_images(self, count: int) -> Tensor:
        """Return evenly spaced training images, normalised but not augmented: float32 (count, C, H, W)."""
        images = self.placed("train").images
        rows = spread_rows(self.split[0], count).to(images.images.device)
        return self.preprocessing.normalise(images.take(rows))

    # ---- loaders

    def setup(self, stage: str) -> None:
        """Reset the state of an earlier fit and warn about small classes."""
        if stage != "fit":
            return
        self.parts.warn_of_few_images()
        self._train_loader = self._resumed = None
        self.make_train_loader, self.side = TrainLoader, full_size

    @property
    def train_loader(self) -> TrainLoader:
        """Training loader of the current fit, created on first access."""
        return self._train_loader or self.train_dataloader()

    def train_dataloader(self) -> TrainLoader:
        """Create the training loader of this rank."""
        self.keep_record()  # before any image is added to their folder
        if self.augment.mixes and not self._rank_settings["weighted"]:
            fault = "data.augment mixup and cutmix need a model that reads batch.targets"
            raise UsageError(f"{fault}: use ImageClassifier, or remove mixup and cutmix")
        images = self.placed("train").images
        mean_colour = (torch.tensor(self.statistics[0]) * 255).round().to(torch.uint8)
        settings: dict[str, Any] = {
            "source": images, "indices": self.split[0], "batch_size": self.batch_size,
            "augment": self.augment, "fill": mean_colour.to(images.images.device),
            "seed": self.seed,
            "workers": self.loading.workers if self.reads_ahead else 0,
            "pin_memory": self.device.type != "cpu",
            **self._rank_settings,
        }  # fmt: skip
        if self.trainer and self.trainer.overfit_batches > 0:  # type: ignore[attr-defined]
            loader = TrainLoader(**settings, order=in_order)
        else:
            loader = self.make_train_loader(**settings)
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        """Create the validation loader of this rank, or an empty list if there are no validation images."""
        loader = EvalLoader(
            self.placed("train").images, self.split[1], self.loading.eval_batch_size, **self._rank_settings
        )
        return loader if len(loader) else []

    def test_dataloader(self) -> EvalLoader:
        """Create the loader of this rank's test batches."""
        rows = torch.arange(len(self.test_images))
        return EvalLoader(self.placed("test").images, rows, self.loading.eval_batch_size, **self._rank_settings)

    predict_dataloader = test_dataloader

    @property
    def _rank_settings(self) -> dict[str, Any]:
        """Arguments of loaders: rank, world size, and whether the model uses `Batch.loss_weight`."""
        if not self.trainer:
            return {"rank": 0, "world": 1, "weighted": True}
        module = self.trainer.lightning_module
        # ImageClassifier uses `Batch.loss_weight` and ignores `PADDING`. Other modules do neither.
        weighted = getattr(module, "weighs_batches", module is None)
        return {"rank": self.trainer.global_rank, "world": self.trainer.world_size, "weighted": weighted}

    # ---- batches on the device

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augment, resize and normalise a training batch; only normalise other batches."""
        trainer = self.trainer
        if trainer and trainer.training:
            return self.preprocessing.train_batch(batch, self.side(trainer.current_epoch))
        return replace(batch, images=self.preprocessing.normalise(batch.images))

    # ---- length and position of a fit

    @property
    def epochs(self) -> int | None:
        """Number of epochs of the fit, from the Trainer's limits of epochs and steps; None without limits."""
        return self.fit_length.epochs

    @property
    def fit_length(self) -> FitLength:
        """Length of the fit in batches, from the Trainer's limits."""
        parts = 1 if self._rank_settings["weighted"] else self._rank_settings["world"]
        return fit_length(self.trainer, count_batches(len(self.split[0]), self.batch_size, parts))

    def keep_record(self) -> dict[str, Any]:
        """Record the images and their split once, for checkpoints; see `data.split_record`."""
        if not self._record:
            self._record = split_record(self.parts)
        return self._record

    def state_dict(self) -> dict[str, object]:
        """Return the split, the settings, and the position in the epoch, in batches.

        If a schedule needs the length of the fit, Lightning sets up the loaders before it reads the checkpoint, and
        does not restore them.
        """
        mean, std = self.statistics
        state: dict[str, object] = {
            "split": self.keep_record(),
            "settings": json.dumps({**self.given, "data.images.mean": mean, "data.images.std": std}, sort_keys=True),
            "classes": [*self.classes],
        }
        if self._train_loader is not None:
            state |= self._train_loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Resume a fit with the split and the statistics of a checkpoint, at its position. Evaluate with its split.

        The module compares the settings, see `ImageClassifier.changes_since`. Raise UsageError for other images.
        """
        if self.trainer is not None and self.trainer.state.fn != "fit":
            self.evaluate_split_of(state_dict)
            return
        saved = saved_settings(state_dict)
        self.images = replace(self.images, mean=saved["data.images.mean"], std=saved["data.images.std"])
        self._keep_split(state_dict)
        self.preprocessing = self._preprocessing()
        if "position" in state_dict:
            self._resumed = state_dict

    def evaluate_split_of(self, state: Mapping[str, Any]) -> None:
        """Use the split of a checkpoint to evaluate it on the images of its training.

        Images that were added since are left out, because the split of all images could test on training images. A note
        reports other changes, also of the split. Raise UsageError for other classes, whose score would mean nothing.
        """
        if "split" not in state:  # a checkpoint of another program
            return
        if self._selects_same_images(saved_settings(state), "rows" in state["split"]):
            try:
                self._keep_split(state)
            except UsageError as error:
                note_once(f"scores may be too high, because images or their split have changed: {error}")
        classes = state["classes"]
        if classes != [*self.classes]:
            fault = f"the checkpoint was trained on other classes ({listed(classes)}) than these"
            raise UsageError(f"{fault} ({listed(self.classes)}): name the folder of its own data")

    def _selects_same_images(self, saved: Mapping[str, object], has_names: bool) -> bool:
        """Return whether the settings of the images are those of a checkpoint, except where downloads come from."""
        selecting = ["data.dataset", "data.root", "data.images."]
        if not has_names:  # Another split does not move the test images of a published data set.
            selecting += ["data.val_size", "data.split."]
        for name, value in self.given.items():
            if name.startswith(tuple(selecting)) and name != "data.images.groups" and saved.get(name) != value:
                return False
        return True

    def keep_images(self, names: Iterable[str]) -> None:
        """Leave out all images but those with these NFC names, with the classes that have no other image."""
        self.settings = replace(self.settings, only=frozenset(names))
        self._build_parts()

    def _keep_split(self, state: Mapping[str, Any]) -> None:
        """Leave out images that were added since the training began. Raise UsageError if its images have changed."""
        record = state["split"]
        rows = recorded_rows(record)
        # Leave out new images, unless these images are already known to be those of the checkpoint.
        if rows is not None and self._record.get("digest") != record["digest"]:
            self.keep_images(name for name, _, _ in rows)
        if self.keep_record()["digest"] != record["digest"]:
            raise UsageError(split_fault(self.parts, rows))
