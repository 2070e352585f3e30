"""`cifar-lit export`: write the net of a run for other programs, and check the file against the net."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import Namespace

from cifar_lit.base.command_line import command_parser, parsed
from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.text import say
from cifar_lit.inference.export import CHECKED_IMAGES, FORMATS, check_format
from cifar_lit.inference.export import export as export_net
from cifar_lit.inference.model_file import load_model_file, weights_file

DESCRIPTION = (
    "Export the net of a run as ONNX or torch-export. Input: uint8 images, normalised inside. Output: "
    "probabilities. The metadata has the class names. The file is kept only if it reproduces the net's "
    "probabilities on generated images."
)


def export(argv: list[str]) -> None:
    """Export a net, and print the largest difference of a probability."""
    settings = _settings(argv)
    check_format(settings.to)
    net = load_model_file(settings.run)
    model = weights_file(settings.run)
    path = model.with_suffix(FORMATS[settings.to].suffix)
    if settings.out:
        path = Path(settings.out).expanduser()
    if path.exists() and path.samefile(model):
        raise UsageError(f"{path} is the model to export: name another file with --out FILE")
    difference = export_net(net, settings.to, path)
    say(f"checked on {CHECKED_IMAGES} generated images · largest difference of a probability {difference:.1e}")
    say(f"wrote {display_path(path)} · {path.stat().st_size / 1e6:.2f} MB · see docs/use-a-trained-net.md#export")


def _settings(argv: list[str]) -> Namespace:
    parser = command_parser("export", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="run folder, or its model.safetensors")
    formats = "onnx, torch-export, or hub DIR (export --to hub --help)"
    add("--to", type=str, required=True, help=f"format: {formats}")
    add("--out", type=str | None, default=None, help="file to write (default: beside model.safetensors)")
    return parsed(parser, argv)
