"""Strategies that share weights, gradients and optimizer states out among GPUs: why they are refused, and where they would pay.

FSDP (Y. Zhao et al., 2023), ZeRO (S. Rajbhandari et al., 2020, which DeepSpeed is made of) and tensor parallelism leave each
process with parts of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cifar_lit.errors import UsageError
from cifar_lit.hardware import Machine

NAMES = {"fsdp": "FSDP", "deepspeed": "DeepSpeed", "modelparallel": "ModelParallel"}
PAYS_FROM = 0.5  # of a GPU's memory: with more taken, too little is left for activations; with less, it only adds traffic
# float32 numbers or halves that an optimizer keeps for each parameter, as long as it has momentum
KEPT = {"sgd": 1, "muon": 1, "adamw": 2}
SHAPES = {"fashion_mnist": (1, 28, 10), "cifar100": (3, 32, 100)}  # channels, side, classes; elsewhere USUAL if not set
USUAL = (3, 32, 10)


def sharded(strategy: Any) -> str | None:
    """What shares weights out in a Trainer's `strategy`, such as "FSDP"; None if it leaves them whole.

    strategy: a name, a class path, or a mapping with a class_path.
    """
    given = strategy if isinstance(strategy, str) else str(getattr(strategy, "class_path", type(strategy).__name__))
    word = re.sub(r"[\W_]", "", given.rpartition(".")[2]).lower()
    return next((shown for name, shown in NAMES.items() if name in word), None)


def bytes_per_parameter(optimizer: str, precision: str = "32-true", momentum: float = 0.9) -> int:
    """Bytes of weight, gradient and optimizer state together: 12 under sgd with momentum in float32, 16 under adamw.

    Lightning's mixed precisions keep all of these in float32, its true ones in two bytes each.
    """
    kept = 0 if optimizer == "sgd" and momentum == 0 else KEPT.get(optimizer, 1)
    return (2 + kept) * {"bf16-true": 2, "16-true": 2, "64-true": 8}.get(precision, 4)


def parameter_count(model: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """The parameters of a net, without memory for them and before any data are read.

    model, data: the settings of these names. Of a folder, channels, size and classes are not known yet: the last layer, of which
    alone they decide, is taken as for CIFAR-10. Raises UsageError for a net that there is not.
    """
    from cifar_lit.models.registry import build_on_meta_device

    channels, side, classes = SHAPES.get(data["dataset"], USUAL)
    if data["dataset"] in ("folder", "shapes"):
        channels, side = data["channels"] or channels, data["image_size"] or side
        classes = data["num_classes"] or classes
    settings = {"channels": channels, "num_classes": classes, "width": model["width"], "options": model["net_options"]}
    try:
        net = build_on_meta_device(model["net"], image_size=side, **settings)
    except UsageError:
        if data["dataset"] != "folder" or data["image_size"]:
            raise
        net = build_on_meta_device(model["net"], image_size=224, **settings)
    return sum(parameter.numel() for parameter in net.parameters())


def refuse(settings: Any, machine: Machine) -> None:
    """Raises UsageError for a strategy that shares weights out, with the reason and what it would bring.

    settings: of a training command, with trainer, model and data.
    """
    trainer, model = settings.trainer, settings.model
    name = sharded(trainer.strategy)
    if name is None:
        return
    precision = str(trainer.precision or "32-true")
    each = bytes_per_parameter(model.optimizer, precision, model.momentum)
    total = each * parameter_count(vars(model), vars(settings.data))
    raise UsageError(refusal(name, f"{model.net} under {model.optimizer}", total, each, machine, precision, reason(model)))


def reason(model: Any) -> str:
    """Why the settings of a model need whole tensors; the most particular reason."""
    if model.optimizer == "muon":
        return "Muon makes whole filters orthogonal"
    if model.ema_decay:
        return "the average of the weights is of whole ones"
    return "its checkpoints hold whole weights"


def refusal(name: str, what: str, total: int, each: int, machine: Machine, precision: str, why: str) -> str:
    """The line for a strategy called `name`. total: bytes of all weights, gradients and states; each: of one parameter."""
    parts = f"{name} shares weights, gradients and optimizer states out among GPUs, which this program cannot do, as {why}"
    taken = f"{what} they take {shown(total)} ({each} bytes a parameter)"
    least = min((memory for _, memory in machine.gpus), default=None)
    if least is not None and total > PAYS_FROM * least:
        halved = "" if precision in ("bf16-true", "16-true") else ", or halve that with --precision bf16-true"
        return (
            f"{parts}; it would pay here, as for {taken}, more than half of a GPU's {shown(least)}: choose a smaller --net"
            f"{halved}; a smaller --batch-size leaves them more room"
        )
    where = "" if machine.gpus else f", and this machine has {machine}"
    pays = f"it would not pay: for {taken}, and it pays where that is more than half of a GPU's memory{where}"
    return f"{parts}; {pays}: use --trainer.strategy ddp"


def named(parameters: int) -> str:
    """Where sharding would pay for a net of so many parameters, for `cifar-lit devices --net`."""
    less, more = (bytes_per_parameter(optimizer) for optimizer in ("sgd", "adamw"))
    taken = [shown(each * parameters) for each in (less, more)]
    memory = [shown(int(each * parameters / PAYS_FROM)) for each in (less, more)]
    return (
        f"Weights, gradients and optimizer states take {taken[0]} under sgd with momentum and muon ({less} bytes a\n"
        f"parameter), {taken[1]} under adamw ({more}). FSDP, which shares them out among GPUs, would pay where a GPU has\n"
        f"less than about {memory[0]} and {memory[1]}; this program trains with DDP, which keeps them whole."
    )


def shown(size: int) -> str:
    """Bytes as MB or GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB" if size < 1e7 else f"{size / 1e6:,.0f} MB"
