"""Repositories of the Hugging Face hub: `cifar-lit export RUN --to hub DIR` writes one, `hf://USER/NAME` loads one."""

from __future__ import annotations

import os
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cifar_lit.base.command_line import command_parser, parsed
from cifar_lit.base.errors import Failure, UsageError, check_packages, first_line
from cifar_lit.base.files import display_path, write_text, writing
from cifar_lit.base.text import note, printable_lines, quoted, say
from cifar_lit.inference.load import HUB
from cifar_lit.inference.model_file import MODEL, load_model_file, save_weights
from cifar_lit.run.record import read_metrics
from cifar_lit.runs.report import summary

DESCRIPTION = "Write a repository for the Hugging Face hub, with a model card, into a folder. Nothing is uploaded."
FILES = (MODEL, "README.md")


def export_to_hub(argv: list[str]) -> None:
    """Write the repository; raise UsageError if one of its files exists."""
    parser = command_parser("export", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="folder of a tested run")
    add("folder", type=str, help="folder to write")
    add("--to", type=str, required=True, help="hub")
    add("--license", type=str, default="unknown", help="licence of the weights by its name on the hub: apache-2.0, …")
    options = parsed(parser, argv)
    run, folder = Path(options.run).expanduser(), Path(options.folder).expanduser()
    metrics = read_metrics(run)
    if not metrics.get("test"):
        raise UsageError(f"{display_path(run)} has no test results for a model card: name the folder of a tested run")
    for name in FILES:
        if os.path.lexists(folder / name):
            raise UsageError(f"{display_path(folder / name)} exists: name another folder, or move that file away")
    net = load_model_file(run)
    front = {"license": options.license, "library_name": "cifar-lit", "pipeline_tag": "image-classification"}
    pages = Environment(
        loader=PackageLoader("cifar_lit.extras", ""), autoescape=True, finalize=printable_lines,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    card = pages.get_template("hub.md.j2").render(
        front=Markup(yaml.safe_dump(front)), card=net.card, metrics=metrics, test=metrics["test"],
        facts=summary(metrics), license=options.license,
    )  # fmt: skip
    with writing(folder / MODEL, "Choose another folder.", parents=True) as partial:
        save_weights(partial, net.net.state_dict(), net.card)
    write_text(folder / "README.md", card)
    place = quoted(display_path(folder))
    say(f"wrote {place} · licence {options.license} (--license)", "", "next: read README.md, then")
    say(f"  hf upload USER/NAME {place}")


def fetch(name: str) -> Path:
    """Return the path of a repository's model file in the hub's cache, and print its commit. Nothing else is fetched.

    Raise Failure if it cannot be downloaded.
    """
    check_packages(HUB, ["huggingface_hub"], "hub")
    from huggingface_hub import snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=[MODEL]))
    except Exception as error:  # also of its HTTP and transfer libraries
        remedy = "check the name (hf://USER/NAME@REVISION), the connection, and `hf auth login` for a private one"
        raise Failure(f"{name} cannot be loaded ({type(error).__name__}: {first_line(error)}): {remedy}") from None
    note(f"{name} is {HUB}{repository}@{folder.name}")
    return folder / MODEL
