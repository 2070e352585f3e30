"""`cifar-lit report`: the page about a run, with a look at its training images."""

from __future__ import annotations

import os
import webbrowser
from functools import partial
from pathlib import Path

from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.errors import UsageError
from cifar_lit.files import writing
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.inference.embeddings import logits_and_embeddings
from cifar_lit.inference.load import load
from cifar_lit.runs.report import inspected_page
from cifar_lit.runs.run_data import run_image_data
from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import say

DESCRIPTION = (
    "Writes report.html, a page about a run: results, curves, calibration, mistakes, and, from a pass over the "
    "training images, suspected label errors and duplicates between train and test."
)


def report(words: list[str]) -> None:
    """Makes report.html in a run's folder; raises UsageError without a run or data, Failure for data of another net."""
    parser = command_parser("report", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="a run folder, or a model.safetensors by itself")
    add("--open", action="store_true", help="show it in the browser")
    add("--out", type=str | None, default=None, help="where to write it, if not beside the model")
    add("--dataset", type=str | None, default=None, help="the data set, where there is no config.yaml")
    add("--data-dir", type=str | None, default=None, help="where its images are, if not where they were")
    add("--device", type=str, default="auto", help="where to compute: auto, cpu, gpu, cuda:1, mps")
    settings = parsed(parser, words)
    device = resolve_device(settings.device)
    classifier = load(settings.run, device)
    keep_freed_memory()
    run = Path(settings.run).expanduser()
    run = run if run.is_dir() else run.parent
    out = Path(settings.out).expanduser() if settings.out else run / "report.html"
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        raise UsageError(f"{out} cannot be written: name a file in a folder that can be, with --out")
    data = run_image_data(run, classifier.card, settings.dataset, settings.data_dir)
    page = inspected_page(run, data, partial(logits_and_embeddings, classifier), device)
    with writing(out, "Choose another place with --out.") as part:
        part.write_text(page, encoding="utf-8")
    say(f"report {display_path(out)} · {out.stat().st_size / 1e6:.1f} MB")
    if settings.open:
        webbrowser.open(out.absolute().as_uri())
