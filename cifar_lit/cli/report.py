"""`cifar-lit report`: write the report of a run, with an inspection of its training images."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

from cifar_lit.base.command_line import add_data_dir, add_device, command_parser, parsed
from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path, writing
from cifar_lit.base.hardware import resolve_device
from cifar_lit.base.memory import keep_freed_memory
from cifar_lit.base.text import say
from cifar_lit.inference.model_file import load_model_file, weights_file
from cifar_lit.run.images import run_image_data
from cifar_lit.runs.report import inspected_page

DESCRIPTION = (
    "Write report.html for a run: results, curves, calibration and mistakes. A pass over the training images adds "
    "suspected label errors, and duplicates between training and test images."
)


def report(words: list[str]) -> None:
    """Write report.html."""
    parser = command_parser("report", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, metavar="RUN", help="run folder, or a model.safetensors file")
    add("--open", action="store_true", help="open the report in the browser")
    add("--out", type=str | None, default=None, help="file to write (default: report.html in the run's folder)")
    add_data_dir(parser)
    add_device(parser)
    settings = parsed(parser, words)
    device = resolve_device(settings.accelerator)
    net = load_model_file(settings.run).on(device)
    keep_freed_memory()
    run = weights_file(settings.run).parent
    out = Path(settings.out).expanduser() if settings.out else run / "report.html"
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        raise UsageError(f"{out} cannot be written: name a file in another folder with --out")
    data = run_image_data(run, net.card, settings.data_dir)
    page = inspected_page(run, data, net)
    with writing(out, "Choose another place with --out.") as part:
        part.write_text(page, encoding="utf-8")
    say(f"report {display_path(out)} · {out.stat().st_size / 1e6:.1f} MB")
    if settings.open:
        webbrowser.open(out.absolute().as_uri())
