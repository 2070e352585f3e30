"""`cifar-lit export`: write the net of a run for other programs, and check the file against the net."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from rich.table import Column, Table

from cifar_lit.cli.console import for_tables
from cifar_lit.cli.coverage import add_coverage, coverage_of
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.errors import UsageError
from cifar_lit.runs.run_folder import display_path, weights_file
from cifar_lit.text import say

DESCRIPTION = (
    "Export the net of a run as ONNX, torch-export or safetensors. Input: uint8 images, normalised inside. Output: "
    "probabilities. The metadata has the class names. The file is kept only if it reproduces the net's predictions on "
    "test images."
)


def export(
    argv: list[str],
    command: str = "export",
    description: str = DESCRIPTION,
    to: str = "onnx, torch-export, safetensors, or hub DIR (export --to hub --help)",
) -> None:
    """Export a net, and print the differences in predictions, size and speed.

    command, description, to: name, help and formats of the command, which may be that of an extra with further formats.
    """
    parser = command_parser(command, description)
    add = parser.add_argument
    add("run", type=str, help="run folder, or its model.safetensors")
    add("--to", type=str, required=True, help=f"format: {to}")
    add("--out", type=str | None, default=None, help="file to write (default: beside model.safetensors)")
    add("--quantize", type=str | None, default=None, help="int8: 8-bit ONNX, calibrated on training images")
    reject = "add an output `unknown` for this false-alarm rate, up to 0.5"
    add("--reject", type=float | None, default=None, help=reject)
    add_coverage(parser)
    add("--data-dir", type=str | None, default=None, help="folder of the run's images, if they were moved")
    add("--images", type=int, default=1000, help="number of test images for the check; 0 for all")
    settings = parsed(parser, argv)
    if settings.images < 0:
        raise UsageError(f"--images must be at least 0, not {settings.images}")

    from cifar_lit.inference.export import CALIBRATION_IMAGES, FORMATS, Options, check_request, default_path
    from cifar_lit.inference.export import export as export_net
    from cifar_lit.runs.card import check_rate
    from cifar_lit.runs.model_file import load_model_file
    from cifar_lit.runs.run_data import RunData

    check_request(settings.to, settings.quantize, settings.reject, covers=settings.coverage is not None)
    net = load_model_file(settings.run)
    if settings.reject is not None:
        check_rate(settings.reject, net.card.reject)
    coverage = coverage_of(settings, net.card)
    model = weights_file(settings.run)
    path = Path(settings.out).expanduser() if settings.out else default_path(model, settings.to, settings.quantize)
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"--out {path} {reason}: name a file in an existing folder")
    if path.exists() and path.samefile(model):
        raise UsageError(f"--out {path} is the model to export: name another file")
    data = RunData(model, net.card, settings.data_dir)
    calibration = data.load(train=True, count=CALIBRATION_IMAGES) if settings.quantize else None
    sample = data.load_or_draw(settings.images)
    say(f"checking on {sample.what}")
    options = Options(calibration, settings.reject, coverage)
    result, seconds = export_net(net, settings.to, path, sample, options)

    right_aligned = partial(Column, justify="right")
    table = Table("", right_aligned("PyTorch"), right_aligned(f"{settings.to} {settings.quantize or ''}".strip()))
    table.add_row("file", *(f"{size / 1e6:.2f} MB" for size in (model.stat().st_size, path.stat().st_size)))
    if result and result.accuracy:
        table.add_row("accuracy", *(f"{accuracy:.2%}" for accuracy in result.accuracy))
    for batch, times in seconds.items():
        table.add_row(f"batch of {batch}", *(f"{1e3 * time:.2f} ms" for time in times))
    for_tables().print(table)
    file = display_path(path)
    checked = "only the structure of the file was checked: it cannot run here"
    calibrated: list[str] = []
    if calibration:
        calibrated = [f"calibrated on {calibration.what}"]
        if result and result.accuracy:
            before, after = result.accuracy
            calibrated.insert(0, f"accuracy {before:.2%} before, {after:.2%} in int8, on {sample.what}")
    if result:
        checked = f"predicted classes agree on {result.agreeing:,} of {result.images:,} images · "
        checked += f"largest difference of a probability {result.difference:.1e}"
    say(
        checked,
        *calibrated,
        f"wrote {file}",
        "",
        "use it:",
        *(line.replace("FILE", repr(file)).replace("PATH", shlex.quote(file)) for line in FORMATS[settings.to].usage),
    )
