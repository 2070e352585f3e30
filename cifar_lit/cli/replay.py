"""`cifar-lit replay FILE`: repeat the step that ended a training with a loss that is not finite, and inspect it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torchvision.transforms.functional import to_pil_image

from cifar_lit.cli.console import for_tables
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import Command
from cifar_lit.cli.quiet import quieten
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import write_text
from cifar_lit.inference.classify import is_picture_name, save_picture
from cifar_lit.runs.figures import gallery
from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import say
from cifar_lit.training.callbacks import NotFiniteLoss
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.not_finite import RECORD

DESCRIPTION = (
    "Repeat the step at which the loss of a training was not finite. Print the largest values in each module of the "
    "net, name the first module with a value that is not finite, and draw the images of the batch."
)
IMAGES = 64  # on the sheet


class Inspected(Exception):
    """The step has ended."""


class Inspection(Callback):
    """Record the largest values in all modules of the net in one step, and raise Inspected after it."""

    def __init__(self, step: int) -> None:
        self.step, self.faulty = step, ""
        self.rows: list[list[str]] = []
        self.batch: Any = None
        self.values: dict[str, str] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Watch the modules in this step."""
        if trainer.global_step != self.step:
            return
        if self.batch is None:
            torch.autograd.set_detect_anomaly(True)
            for name, module in pl_module.net.named_modules(prefix="net"):
                module.register_forward_hook(lambda *call, name=name: self._record(name, *call))
        self.data, self.batch, self.rows = trainer.datamodule, batch, []
        rates = [f"{float(group['lr']):.4g}" for group in trainer.optimizers[0].param_groups]
        self.values["learning rates"] = ", ".join(rates)

    def _record(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        values = [largest(tensors) for tensors in (inputs, [output], module.parameters(recurse=False))]
        self.rows.append([name, type(module).__name__, *(f"{value:.4g}" for value in values)])
        self._check(values[1], f"output of {name} ({type(module).__name__})")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self._check(largest([gradient]), f"gradient of the output of {name}"))

    def _check(self, value: float, what: str) -> None:
        self.faulty = self.faulty or ("" if math.isfinite(value) else what)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Raise Inspected after the step, or after the batch in it whose loss is not finite."""
        loss = math.nan if self.batch is None else float(outputs["loss"])
        if trainer.global_step > self.step or (self.batch is not None and not math.isfinite(loss)):
            gradients = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
            norm = float(get_total_norm(gradients))
            self.values |= {"loss": f"{loss:.9g}", "norm of the gradients": f"{norm:.4g}"}
            self._check(largest(pl_module.parameters()), "weights after the step")
            raise Inspected


def largest(tensors: Iterable[Any]) -> float:
    """Return the largest absolute value in tensors: NaN if there is one, 0 without numbers."""
    numbers = [each.detach().float().abs().max() for each in tensors if isinstance(each, Tensor) and each.numel()]
    return float(torch.stack(numbers).max()) if numbers else 0.0


def replay(argv: list[str]) -> None:
    """Repeat and inspect a step."""
    parser = command_parser("replay", DESCRIPTION)
    add = parser.add_argument
    add("file", type=str, help="not-finite.ckpt of a run")
    add("--data-dir", type=str | None, default=None, help="folder of the images, if they were moved")
    add("--accelerator", type=str | None, default=None, help="cpu, gpu or mps, if not that of the training")
    add("--out", type=str, default="replay.png", metavar="FILE.png", help="sheet of the images to write")
    settings = parsed(parser, argv)
    checkpoint, out = read_checkpoint(Path(settings.file).expanduser()), Path(settings.out).expanduser()
    record = checkpoint.pop(RECORD, None)
    if not isinstance(record, dict) or [type(record.get(key)) for key in ("config", "step")] != [str, int]:
        raise UsageError(f"{settings.file} does not hold a failed step: name the not-finite.ckpt of a run")
    if not is_picture_name(out):
        raise UsageError(f"--out {out}: give an image file, such as replay.png")
    inspection = Inspection(record["step"])
    # One process whose steps run Python code, and no packages of trackers, which may be missing here.
    flags = ["--trainer.devices=1", "--trainer.num_nodes=1", "--model.capture=false"]
    flags += ["--trainer.logger=false", "--logger=csv"]
    moved = {"data.root": settings.data_dir, "trainer.accelerator": settings.accelerator}
    flags += [f"--{name}={value}" for name, value in moved.items() if value is not None]
    quieten()
    with TemporaryDirectory() as folder:
        run = Path(folder, "replay-1")
        (run / "checkpoints").mkdir(parents=True)
        write_text(run / "config.yaml", record["config"])
        command = Command("fit", logs=folder, flags=flags, trust=settings.trust)
        if checkpoint["state_dict"]:
            torch.save(checkpoint, run / "checkpoints/last.ckpt")
            command.resume = str(run)
        else:
            command.configs = [str(run / "config.yaml")]
        try:
            TrainingCLI(command, inspection)
        except (Inspected, NotFiniteLoss) as end:
            inspection.values.setdefault("loss", str(end).removeprefix("the loss is "))
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            inspection.values["backward pass"] = str(error)
        finally:
            torch.autograd.set_detect_anomaly(False)
    if inspection.batch is None:
        raise Failure(f"the training ended before step {inspection.step}: replay it with the versions that trained it")
    table = Table("module", "type", "input", "output", "weights", box=None, pad_edge=False, title="largest values")
    for row in inspection.rows:
        table.add_row(*row)
    for_tables().print(table)
    say(f"step {inspection.step}", *(f"{name}: {value}" for name, value in inspection.values.items()))
    save_picture(to_pil_image(sheet(inspection)), out)
    say(f"images of the batch: {display_path(out)}")
    if not inspection.faulty:
        raise Failure("all values are finite in this replay: use the device and the versions of the training")
    say(f"first value that is not finite: {inspection.faulty}")


def sheet(inspection: Inspection) -> Tensor:
    """Return a picture, uint8 (3, height, width), of the first images of the batch with their classes."""
    images, labels = inspection.batch
    mean, std = (torch.tensor(values)[:, None, None] for values in inspection.data.statistics)
    pixels = (images[:IMAGES].detach().float().cpu() * std + mean).nan_to_num(0).clamp(0, 1).mul(255).round().byte()
    names = [(inspection.data.classes[label],) for label in labels[:IMAGES].tolist()]
    return gallery(pixels.permute(0, 2, 3, 1), names, columns=8)
