"""`cifar-lit export`: write the net of a run for other programs, and check the file against the net."""

from __future__ import annotations

from pathlib import Path
from string import Template

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt

from cifar_lit.base.command_line import add_coverage, add_data_dir, command_parser, parsed
from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.text import say
from cifar_lit.inference.export import CALIBRATION_IMAGES, FORMATS, RESIZED, Check, Options, check_request, default_path
from cifar_lit.inference.export import export as export_net
from cifar_lit.inference.model_file import load_model_file, weights_file
from cifar_lit.inference.rejection import check_rate
from cifar_lit.inference.sets import check_coverage
from cifar_lit.run.images import run_images, run_or_drawn_images

DESCRIPTION = (
    "Export the net of a run as ONNX or torch-export. Input: uint8 images, normalised inside. Output: "
    "probabilities. The metadata has the class names. The file is kept only if it reproduces the net's predictions on "
    "test images."
)


def export(argv: list[str]) -> None:
    """Export a net, and print the differences in predictions and size."""
    settings = _settings(argv)
    check_request(settings.to, settings.quantize)
    net = load_model_file(settings.run)
    check_rate(settings.reject, net.card.reject)
    check_coverage(settings.coverage, net.card.coverage)
    options = Options(reject=settings.reject, coverage=settings.coverage)
    model = weights_file(settings.run)
    path = default_path(model, settings.to, settings.quantize)
    if settings.out:
        path = Path(settings.out).expanduser()
    if path.exists() and path.samefile(model):
        raise UsageError(f"{path} is the model to export: name another file with --out FILE")
    if settings.quantize:
        calibration = run_images(model.parent, net.card, settings.data_dir, train=True, count=CALIBRATION_IMAGES)
        say(f"calibrating on {calibration.what}")
        options = options._replace(calibration=calibration)
    sample = run_or_drawn_images(model.parent, net.card, settings.data_dir, settings.images)
    say(f"checking on {sample.what}")
    _print_check(export_net(net, settings.to, path, sample, options))
    file = display_path(path)
    say(f"wrote {file} · {path.stat().st_size / 1e6:.2f} MB", "", "use it:")
    lines = Template("\n".join(FORMATS[settings.to].usage))
    mode = "L" if net.card.input_shape[0] == 1 else "RGB"
    say(*lines.substitute(FILE=repr(file), MODE=mode, RESIZED=RESIZED[net.card.resize]).splitlines())


def _settings(argv: list[str]) -> Namespace:
    parser = command_parser("export", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="run folder, or its model.safetensors")
    formats = "onnx, torch-export, or hub DIR (export --to hub --help)"
    add("--to", type=str, required=True, help=f"format: {formats}")
    add("--out", type=str | None, default=None, help="file to write (default: beside model.safetensors)")
    add("--quantize", type=str | None, default=None, help="int8: 8-bit ONNX, calibrated on training images")
    reject = "add an output `unknown` for this false-alarm rate, up to 0.5"
    add("--reject", type=float | None, default=None, help=reject)
    add_coverage(parser)
    add_data_dir(parser)
    add("--images", type=NonNegativeInt, default=1000, help="number of test images for the check; 0 for all")
    return parsed(parser, argv)


def _print_check(result: Check) -> None:
    agree = f"predicted classes agree on {result.agreeing:,} of {result.images:,} images"
    say(f"{agree} · largest difference of a probability {result.difference:.1e}")
    if result.accuracy:
        before, after = result.accuracy
        say(f"accuracy {before:.2%} of the net, {after:.2%} of the file")
