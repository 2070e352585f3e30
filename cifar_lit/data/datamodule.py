"""`ImageData`, the LightningDataModule: source, split, loaders and normalisation of one data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse.typing import NonNegativeInt
from torch import Tensor

from cifar_lit.data.augment import Augmentation, in_order, normalise, shuffled
from cifar_lit.data.balanced import balanced, check_balanced
from cifar_lit.data.cache import default_cache_dir
from cifar_lit.data.device_augment import DeviceAugmentation
from cifar_lit.data.hard_rounds import HardRoundsLoader, LastLosses, check_skipping, first_hard_batch
from cifar_lit.data.image_set import ImageSet, channel_statistics, spread_rows
from cifar_lit.data.loaders import Batch, EvalLoader, TrainLoader, count_batches
from cifar_lit.data.progress import note_once
from cifar_lit.data.resolution import check_resolutions, shrink, side_at
from cifar_lit.data.sources import SourceSettings, load_images
from cifar_lit.data.splits import fold_rows, split_validation
from cifar_lit.errors import UsageError, check_choice
from cifar_lit.hardware import free_memory

PLACEMENTS = ("auto", "device", "host")
SAMPLINGS = ("none", "balanced")
FEW_VALIDATION_IMAGES = 20  # one image is 5 % of the accuracy or more
MAX_MEMORY_SHARE = 0.5  # of free memory that images may take by themselves; net, activations and others need the rest


class ImageData(pl.LightningDataModule):
    """Images of one data set as uint8 in memory, split, batched, augmented and normalised.

    Args:
        dataset: cifar10, cifar100, fashion_mnist, folder, shapes, or the import path of a function; see `data.sources`.
        root: where archives are kept (`data` if not given), or own images: a folder, or a table that lists them (.csv, .tsv,
            .jsonl).
        batch_size: images a training step takes over all devices together.
        eval_batch_size: images a device takes at once in validation, test and prediction.
        val_size: number (1 or more) or fraction (below 1) of training images to validate on; 0 trains on all, but for validation
            images that the set itself names.
        test_size: fraction that becomes the test set where a folder or table of own images names none.
        split_seed: seed of these splits and of drawn images; apart from `seed`, so that runs with other seeds are
            validated and tested on the same images.
        seed: seed of order and augmentation; follows --seed.
        shuffle: draw a new order every epoch.
        sampling: none, each training image once an epoch; or balanced, as many in all, but each class equally often: images of
            rare classes come several times (in one epoch with the same crop and flip), those of common ones take turns.
        skip_easy: share of the training images that is left out late in the training, those whose loss was least when they were
            last trained on; an epoch goes through the others several times. In a short training they teach more.
        skip_from: share of the steps after which that begins.
        crop: pixels of reflect padding that a random crop moves in; 0 for none.
        flip: none, random, or alternating (each image mirrored in every second epoch).
        cutout: side in pixels of a square painted with the mean colour; 0 for none.
        resolutions: train on smaller images first: share of the epochs by side in pixels, in their order, such as
            {24: 0.4, 28: 0.3}; what is left, and every evaluation, is at full size.
        augment: further augmentations of training images, drawn for each image and computed on the training device, by name,
            such as {scale: [0.35, 1], brightness: 0.4}: scale (shares of the area that a random crop keeps) with its ratio,
            rotation (degrees), perspective (0 … 1), policy (trivial, or randaugment with its operations and magnitude),
            brightness, contrast, saturation, hue, blur (pixels), erasing (a probability), mixup and cutmix (alpha).
        placement: device, all images in the memory of the training device; host, read by worker processes ahead of
            the training; auto, device where they fit into half of its free memory.
        workers: how many such processes.
        mean: of the channels, in [0, 1] units; measured on the training images if not given.
        std: standard deviation of the channels, likewise.
        image_size: pixels to scale own images to, or to draw shapes in: one number for squares, or height and width,
            such as 96x128 or [96, 128].
        resize: how own images of other proportions get that size: crop, scaled until they cover it, and cut to their
            middle; letterbox, scaled as a whole to fit in, and grey around it; squash, scaled without regard to
            proportions.
        channels: 1 or 3, for own images and shapes.
        num_classes: of shapes.
        count: training images that `shapes` draws; its test set is a fifth of that.
        url: an address or path of one's own to fetch the archive from.
        skip_bad: leave damaged and missing images out instead of stopping.
        cache_dir: where decoded folders are kept; the user's cache folder if not given.
        labels: of cifar100: fine, its 100 classes (the default), or coarse, the 20 groups of five that they form.
        group: column of a table of own images whose equal cells keep images on one side of every split, such as patient;
            `group` if not given and there is one.
        folds: of a cross-validation, in how many parts the training images are cut, one of which takes the test set's place,
            stratified and by groups; of own images without a test set, all. 0 for none; `--folds 5` trains on each in turn.
        fold: which of them, from 0.
    """

    def __init__(
        self,
        dataset: str = "cifar10",
        root: str | None = None,
        batch_size: int = 128,
        eval_batch_size: int = 500,
        val_size: float = 0.1,
        test_size: float = 0.2,
        split_seed: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        sampling: str = "none",
        skip_easy: float = 0.0,
        skip_from: float = 0.6,
        crop: int = 0,
        flip: str = "none",
        cutout: int = 0,
        resolutions: dict[int, float] | None = None,
        augment: dict[str, Any] | None = None,
        placement: str = "auto",
        workers: int = 2,
        mean: list[float] | float | None = None,
        std: list[float] | float | None = None,
        image_size: NonNegativeInt | list[int] | str | None = None,  # int would take 0x10 for 16
        resize: str = "crop",
        channels: int | None = None,
        num_classes: int | None = None,
        count: int = 10_000,
        url: str | None = None,
        skip_bad: bool = False,
        cache_dir: str | None = None,
        labels: str | None = None,
        group: str | None = None,
        folds: int = 0,
        fold: int = 0,
    ) -> None:
        super().__init__()
        self.dataset, self.batch_size, self.eval_batch_size = dataset, batch_size, eval_batch_size
        self.val_size, self.split_seed, self.seed, self.shuffle = val_size, split_seed, seed, shuffle
        self.augmentation = Augmentation(crop, flip, cutout)
        check_choice("data.placement", placement, PLACEMENTS)
        check_choice("data.sampling", sampling, SAMPLINGS)
        check_balanced(sampling, shuffle)
        check_skipping(skip_easy, skip_from, sampling=sampling, shuffle=shuffle)
        if workers < 1:
            raise UsageError("data.workers must be at least 1")
        self.skip_easy, self.skip_from = skip_easy, skip_from
        self.last_losses: LastLosses | None = None  # of the current training, where they are needed
        self.sampling, self.resolutions, self.placement, self.workers = sampling, resolutions or {}, placement, workers
        self.device_augmentation = DeviceAugmentation.from_settings(augment) if augment else None
        self._mean, self._std = mean, std
        if folds and not (folds > 1 and 0 <= fold < folds):
            raise UsageError(f"data.fold {fold} of data.folds {folds} cannot be: folds are 2 or more, and counted from 0")
        self.folds, self.fold = folds, fold
        drawn = None if folds else test_size  # with folds every image is tested on in its turn
        image_size = tuple(image_size) if isinstance(image_size, list) else image_size  # hashable: sources may be cached by it
        self.settings = SourceSettings(
            root, url, image_size, channels, num_classes, count, drawn, split_seed, skip_bad, cache_dir, labels, resize, group
        )
        self._constants: Tensor | None = None  # mean and std where the batches are
        self._train_loader: TrainLoader | None = None
        self._resumed: dict[str, Any] | None = None
        self._placed: dict[tuple[str, torch.device], tuple[ImageSet, str]] = {}

    def setup(self, stage: str) -> None:
        """Reset the per-image losses used by `skip_easy`, and warn of classes and validation sets that are too small."""
        if stage == "fit":
            self._warn_of_few_images()
            trainer: Any = self.trainer
            skips = self.skip_easy > 0 and not (trainer and trainer.overfit_batches)
            self.last_losses = LastLosses(len(self.train_images), self.device) if skips else None
            if self.last_losses and trainer:
                self.last_losses.listen(trainer.lightning_module)
            self._resumed = None  # of an earlier fit

    def _warn_of_few_images(self) -> None:
        few = [name for name, count in zip(self.classes, self.class_counts.tolist(), strict=True) if count <= 1]
        if few:
            names = ", ".join(few[:3]) + (f" and {len(few) - 3:,} more" if len(few) > 3 else "")
            note_once(f"{len(few):,} of {self.class_count:,} classes have one training image or none ({names}): add some to them")
        count = len(self.split[1])
        if 0 < count < FEW_VALIDATION_IMAGES:
            images = "1 image chooses" if count == 1 else f"{count} images choose"
            note_once(f"{images} the best epoch: raise --data.val_size, or set it to 0 to train on all images and keep the last")

    @cached_property
    def train_images(self) -> ImageSet:
        """All images to train and validate on, with `folds` those to test on among them; the first look prepares them."""
        return load_images(self.dataset, self.settings, train=True)

    @cached_property
    def test_images(self) -> ImageSet:
        """All test images."""
        if not self.folds:
            return load_images(self.dataset, self.settings, train=False)
        images, rows = self.train_images, self.fold_rows
        names = [images.names[row] for row in rows.tolist()] if images.names else None
        groups = None if images.groups is None else images.groups[rows]
        return ImageSet(images.take(rows), images.labels[rows], images.classes, groups=groups, names=names)

    @cached_property
    def fold_rows(self) -> Tensor:
        """Rows of the images among `train_images` that are tested on in their place."""
        images = self.train_images
        return (fold_rows(images.labels, images.groups, self.folds, self.split_seed) == self.fold).nonzero().flatten()

    @cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """Rows of the train and the validation images among `train_images`: as the data set says, else by `split_seed`."""
        images = self.train_images
        if self.folds:
            is_left = torch.ones(len(images), dtype=torch.bool)
            is_left[self.fold_rows] = False
            rows = is_left.nonzero().flatten()
            groups = None if images.groups is None else images.groups[rows]
            train, val = split_validation(images.labels[rows], self.val_size, self.split_seed, groups)
            return rows[train], rows[val]
        if images.val_rows is not None and self.val_size == 0:
            of = self.settings.root or self.dataset
            note_once(f"{of}: data.val_size 0 is left aside, as there are validation images, which are not trained on")
        if images.val_rows is None:
            return split_validation(images.labels, self.val_size, self.split_seed, images.groups)
        is_val = torch.isin(torch.arange(len(images)), torch.tensor(images.val_rows))
        return (~is_val).nonzero().flatten(), is_val.nonzero().flatten()

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, in label order."""
        return self.train_images.classes

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def class_counts(self) -> Tensor:
        """How many images each class has to train on, int64 (classes,)."""
        return torch.bincount(self.train_images.labels[self.split[0]], minlength=self.class_count)

    @property
    def input_shape(self) -> list[int]:
        """Channels, height and width of the images."""
        return self.train_images.input_shape

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel that images are normalised with."""
        channels, mean, std = self.input_shape[0], self._mean, self._std
        if mean is None or std is None:
            measured = channel_statistics(self.train_images, self.split[0])
            mean, std = measured[0] if mean is None else mean, measured[1] if std is None else std
        mean, std = (value if isinstance(value, list) else [float(value)] * channels for value in (mean, std))
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise UsageError(f"data.mean and data.std need {channels} numbers (std above 0), one a channel, or one for all")
        return mean, std

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, in batches of the size that is saved with it.

        Lightning restores nothing of the loader's own state where a schedule has asked how long the training will be: the loaders
        are then set up before the checkpoint is read.
        """
        loader = self._train_loader
        rounds = loader.round_state() if isinstance(loader, HardRoundsLoader) else {}
        return {**loader.state_dict(), **rounds, "batch_size": self.batch_size} if loader else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position up for the next training loader; raises UsageError where it is one of other batches."""
        self._resumed = state_dict or None
        size, position = state_dict.get("batch_size", self.batch_size), state_dict.get("position", 0)
        if size != self.batch_size and 0 < position < count_batches(len(self.split[0]), size):
            raise UsageError(f"this run was stopped in the middle of an epoch of batches of {size}: leave --batch-size at that")

    @property
    def device(self) -> torch.device:
        """Where batches are made and trained on."""
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def placed(self, part: str) -> tuple[ImageSet, str]:
        """The `train` or `test` images where they are to be, and whether that is `device` or `host`."""
        key = (part, self.device)
        if key not in self._placed:
            images: ImageSet = getattr(self, f"{part}_images")
            where = self._place_of(images, free_memory(self.device))
            if where == "device":
                images.announce()  # once, rather than each batch's
                pixels, labels = (tensor.to(self.device) for tensor in (images.images, images.labels))
                images = replace(images, images=pixels, labels=labels, mapped=False)
            self._placed[key] = images, where
        return self._placed[key]

    def _place_of(self, images: ImageSet, free: int | None) -> str:
        """Where images are to be. free: bytes of the device's memory, None where the system does not tell."""
        if self.placement != "auto":
            return self.placement
        return "device" if free is None or images.images.nbytes <= MAX_MEMORY_SHARE * free else "host"

    def bytes_on_device(self, free: int) -> int:
        """What the training images will take of a device with so many free bytes."""
        return self.train_images.images.nbytes if self._place_of(self.train_images, free) == "device" else 0

    @property
    def reads_ahead(self) -> bool:
        """Whether training images stay in their file, and are read ahead of the training."""
        return self.placed("train")[1] == "host"

    @property
    def _share(self) -> dict[str, Any]:
        """The loaders' arguments that say which device this is, and whether the model knows `Batch.loss_weight`."""
        if not self.trainer:
            return {}
        return {"rank": self.trainer.global_rank, "world": self.trainer.world_size, "weighted": self._weighted}

    @property
    def _weighted(self) -> bool:
        """Whether the model counts images by `Batch.loss_weight` and `PADDING`, as ImageClassifier does."""
        module = self.trainer.lightning_module if self.trainer else None
        return module is None or getattr(module, "weighs_batches", False)

    def train_dataloader(self) -> TrainLoader:
        """The training loader of this device."""
        check_resolutions(self.resolutions, *self.input_shape[1:])
        if self.device_augmentation:
            self.device_augmentation.check(*self.input_shape[1:])
        images, _ = self.placed("train")
        trainer: Any = self.trainer
        overfits = trainer is not None and trainer.overfit_batches > 0  # the same batches in every epoch
        order = balanced(self.train_images.labels) if self.sampling == "balanced" else shuffled
        settings: dict[str, Any] = {
            "source": images,
            "indices": self.split[0],
            "batch_size": self.batch_size,
            "augmentation": self.augmentation,
            "order": order if self.shuffle and not overfits else in_order,
            "seed": self.seed,
            "fill": self._fill,
            "workers": self.workers if self.reads_ahead else 0,
            "pin_memory": self.reads_ahead and self.device.type != "cpu",
            **self._share,
        }
        if self.last_losses:
            begin = first_hard_batch(self.skip_from, self._total_batches, self._epoch_batches)
            rounds: dict[str, Any] = {"losses": self.last_losses, "skip_easy": self.skip_easy, "skip_from": begin}
            self._train_loader = HardRoundsLoader(**settings, **rounds)
        else:
            self._train_loader = TrainLoader(**settings)
        if self._resumed is not None:
            self._train_loader.load_state_dict(self._resumed)
        return self._train_loader

    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        """The validation loader of this device; none (an empty list) when nothing is held out."""
        loader = EvalLoader(self.placed("train")[0], self.split[1], self.eval_batch_size, **self._share)
        return loader if len(loader) else []

    def test_dataloader(self) -> EvalLoader:
        """The loader over this device's part of the test set."""
        return EvalLoader(self.placed("test")[0], torch.arange(len(self.test_images)), self.eval_batch_size, **self._share)

    predict_dataloader = test_dataloader

    def side(self, epoch: int) -> int | None:
        """The side that training images are scaled to in an epoch, None for their own size."""
        return side_at(self.resolutions, epoch, epochs) if self.resolutions and (epochs := self.epochs) else None

    @property
    def _epoch_batches(self) -> int:
        """How many batches the training makes of an epoch, at least 1."""
        parts = 1 if self._weighted or not self.trainer else self.trainer.world_size
        batches = count_batches(len(self.split[0]), self.batch_size, parts)
        limit = self.trainer.limit_train_batches if self.trainer else 1.0
        return max(1, min(batches, limit) if isinstance(limit, int) else int(limit * batches))

    @property
    def _total_batches(self) -> int | None:
        """How many batches the training has, by its epochs or its steps; None where it has no end."""
        trainer, batches = self.trainer, self._epoch_batches
        epochs = (trainer.max_epochs or -1) if trainer else -1
        ends = [batches * epochs] if epochs > 0 else []
        if trainer and trainer.max_steps > 0:
            accumulated = trainer.accumulate_grad_batches  # the last step of an epoch may have fewer
            epochs, steps = divmod(trainer.max_steps, -(-batches // accumulated))
            ends.append(epochs * batches + min(batches, steps * accumulated))
        return min(ends, default=None)

    @property
    def epochs(self) -> int | None:
        """How many epochs the training has, by its epochs or its steps; None where it has no end."""
        return None if (total := self._total_batches) is None else -(-total // self._epoch_batches)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Augments training images and scales them down if so set, and normalises all, where the Trainer has brought them."""
        trainer = self.trainer
        if trainer and trainer.training:
            return self.training_batch(batch, self.side(trainer.current_epoch))
        return replace(batch, images=self._normalised(batch.images))

    def example_batches(self, side: int | None) -> list[Batch]:
        """The first training images in batches of each size that an epoch on one device has, as they are trained on."""
        rows, images = self.split[0], self.placed("train")[0]
        parts = rows.split(self.batch_size)[: count_batches(len(rows), self.batch_size)]
        batches = []
        for size in sorted({len(part) for part in parts}, reverse=True):
            part = rows[:size].to(images.images.device)
            pixels, labels, part = (tensor.to(self.device) for tensor in (images.take(part), images.labels[part], part))
            batches.append(self.training_batch(Batch(pixels, labels, part), side))
        return batches

    def training_batch(self, batch: Batch, side: int | None = None) -> Batch:
        """A batch as an epoch trains on it: augmented on its device, scaled to a side, normalised."""
        return self._augmented(batch, partial(self._normalised, side=side))

    def _augmented(self, batch: Batch, finish: Callable[[Tensor], Tensor]) -> Batch:
        """A batch after all that is drawn. finish: makes float32 (B, C, H, W) of uint8 or float32 images (B, H, W, C)."""
        augmentation, rows, epoch = self.device_augmentation, batch.indices, batch.epoch
        batch = replace(batch, images=self._augmented_one_by_one(batch.images, rows, self.seed, epoch, finish))
        if augmentation and augmentation.mixes:
            images, targets = augmentation.mix(batch.images, batch.labels, self.class_count, rows, self.seed, epoch)
            batch = replace(batch, images=images, targets=targets)
        return batch

    def _augmented_one_by_one(
        self, images: Tensor, rows: Tensor, seed: int, epoch: int, finish: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Images after what each draws for itself, but for crop and flip, which the loader has made."""
        if self.device_augmentation is None:
            return finish(images)
        fill = self._constants_on(images.device)[0] * 255
        return self.device_augmentation.apply(images, rows, seed, epoch, fill, finish)

    def _constants_on(self, device: torch.device) -> Tensor:
        if self._constants is None or self._constants.device != device:
            self._constants = torch.tensor(self.statistics, dtype=torch.float32, device=device)
        return self._constants

    def _normalised(self, images: Tensor, side: int | None = None) -> Tensor:
        if side is not None:
            images = shrink(images, side)
        return normalise(images, *self._constants_on(images.device))

    def plain_images(self, count: int) -> Tensor:
        """So many training images as they are, from all over the set, normalised: float32 (B, C, H, W)."""
        images, _ = self.placed("train")
        return self._normalised(images.take(spread_rows(self.split[0], count).to(images.images.device)))

    def batches_of_view(self, rows: Tensor, view: int) -> Iterator[Tensor]:
        """Training images of int64 rows in batches, normalised, where they are trained on: as they are (view 0), or augmented.

        Views are drawn as the epochs of that number with seed 0, so that runs of all seeds share them.
        """
        images, _ = self.placed("train")
        loader = TrainLoader(images, rows, self.eval_batch_size, self.augmentation, order=in_order, fill=self._fill)
        make = loader.epoch_plan(view)[1]
        for part in rows.to(images.images.device).split(self.eval_batch_size):
            pixels = (make([(part, 1.0)])[0].images if view else images.take(part)).to(self.device)
            if view:
                yield self._augmented_one_by_one(pixels, part.to(self.device), 0, view, self._normalised)
            else:
                yield self._normalised(pixels)

    def describe_images(self, rows: Tensor) -> str:
        """What tells these images, as a net is given them, from all others."""
        images = self.train_images
        pixels = sha256()
        for part in rows.split(256):
            pixels.update(images.take(part).numpy().tobytes())
        return f"{pixels.hexdigest()} {images.input_shape} {self.statistics}"

    @property
    def cache_dir(self) -> Path:
        """Where what was computed of the images is kept."""
        return (Path(self.settings.cache_dir) if self.settings.cache_dir else default_cache_dir()).expanduser()

    @property
    def _fill(self) -> Tensor:
        """The mean colour, uint8 (C,), beside the images."""
        return (torch.tensor(self.statistics[0]) * 255).round().to(torch.uint8).to(self.placed("train")[0].images.device)

    def sample(self, count: int = 64, epoch: int = 0) -> Tensor:
        """The first training images of an epoch, augmented, uint8 (B, C, H, W), to look at."""
        order, make_batches = (self._train_loader or self.train_dataloader()).epoch_plan(epoch)
        batch = self._augmented(make_batches([(order[:count], 1.0)])[0], lambda images: images.permute(0, 3, 1, 2))
        return batch.images.float().round().clamp(0, 255).byte().cpu()
