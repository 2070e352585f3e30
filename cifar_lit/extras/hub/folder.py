"""`cifar-lit export RUN --to hub DIR`: write the files of a Hugging Face repository: weights, settings and model card.

model.safetensors has all that `cifar_lit.load` needs. config.json shows its metadata. For a net of timm, it is what
`timm.create_model("hf-hub:USER/NAME")` reads, and is checked by loading it so.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.errors import Failure, UsageError, check_packages
from cifar_lit.files import writing
from cifar_lit.inference.export import MAX_DIFFERENCE
from cifar_lit.models.pretrained import import_timm, scaled_size, takes_any_size, timm_name
from cifar_lit.models.spec import TIMM
from cifar_lit.runs.config_file import PLACES, plain_values
from cifar_lit.runs.model_file import LoadedNet, ModelCard, load_model_file, save_weights
from cifar_lit.runs.report import summary
from cifar_lit.runs.run_folder import MODEL, display_path, read_metrics
from cifar_lit.text import printable, say

DESCRIPTION = "Write a repository for the Hugging Face hub, with a model card, into a folder. Nothing is uploaded."
FILES = (MODEL, "config.json", "config.yaml", "README.md")
DATASETS = {  # names on the hub
    "cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "fashion_mnist": "zalando-datasets/fashion_mnist"
}  # fmt: skip
PRIVATE = PLACES - {"recipe", "labels", "name"}  # settings that are places on the owner's machine
_MARKDOWN = re.compile(r"[\\`*_\[\]<>#|~$&:@!]|(?<=www)\.", re.IGNORECASE)  # also links and names of people
_PLACE = re.compile(r"^[~/\\]|:[/\\]")  # paths and addresses


def export_to_hub(argv: list[str]) -> None:
    """Write the repository; raise UsageError if one of its files exists."""
    parser = command_parser("export", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="folder of a tested run")
    add("folder", type=str, help="folder to write")
    add("--to", type=str, required=True, help="hub")
    add("--license", type=str, default="unknown", help="licence of the weights by its name on the hub: apache-2.0, …")
    options = parsed(parser, argv)
    check_packages("--to hub", ["huggingface_hub"], "hub")
    run, folder = Path(options.run).expanduser(), Path(options.folder).expanduser()
    metrics = read_metrics(run)
    if not metrics.get("test"):
        raise UsageError(f"{display_path(run)} has no test results for a model card: name the folder of a tested run")
    for name in FILES:
        if os.path.lexists(folder / name):
            raise UsageError(f"{display_path(folder / name)} exists: name another folder, or move that file away")
    net, settings = load_model_file(run), None
    if (run / "config.yaml").is_file():
        settings = without_places(plain_values(run / "config.yaml"))
    with TemporaryDirectory() as temporary:
        part = Path(temporary)
        save_weights(part / MODEL, net.net.state_dict(), net.card)
        write_config(part, net)
        card = model_card(net.card, metrics, settings, options.license)
        (part / "README.md").write_text(card, encoding="utf-8")
        if settings:
            (part / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        for file in part.iterdir():
            with writing(folder / file.name, "Choose another folder.", parents=True) as partial:
                shutil.copyfile(file, partial)
    place = shlex.quote(display_path(folder))
    say(f"wrote {place} · licence {options.license} (--license)", "", "next: read its README.md, then")
    say(f"  hf upload USER/NAME {place}")


def without_places(settings: object) -> Any:
    """Return settings without those of `PRIVATE`, and with null for paths and addresses."""
    if isinstance(settings, dict):
        return {name: without_places(value) for name, value in settings.items() if name not in PRIVATE}
    if isinstance(settings, list):
        return [without_places(value) for value in settings]
    if isinstance(settings, str) and _PLACE.search(settings):
        return None
    return settings


def write_config(folder: Path, net: LoadedNet) -> None:
    """Write config.json beside the weights. Raise Failure if timm does not build the same net of timm from both."""
    card, config = net.card, folder / "config.json"
    if not card.net.startswith(TIMM):
        config.write_text(json.dumps(asdict(replace(card, coverage=None)), indent=2) + "\n", encoding="utf-8")
        return
    channels, height, width = card.input_shape
    size = scaled_size((height, width), card.net_settings["options"].get("side"))
    arguments: dict[str, object] = {"in_chans": channels}
    if not takes_any_size(card.net):
        arguments["img_size"] = size
    images = {"input_size": [channels, *size], "fixed_input_size": "img_size" in arguments}
    images |= {"mean": card.mean, "std": card.std, "interpolation": "bicubic", "crop_pct": 1.0}
    images["crop_mode"] = {"crop": "center", "letterbox": "border", "squash": "squash"}[card.resize]
    about: dict[str, object] = {"architecture": timm_name(card.net).partition(".")[0], "model_args": arguments}
    about |= {"pretrained_cfg": images, "num_classes": len(card.classes), "label_names": card.classes}
    config.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    loaded = import_timm().create_model(f"local-dir:{folder}", pretrained=True).eval()
    noise = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = float((net.net(noise).softmax(1) - loaded(noise).softmax(1)).abs().max())
    if not difference <= MAX_DIFFERENCE:
        raise Failure(f"timm loads another net from these files (a probability differs by {difference:.2g}): update it")


def markdown(value: object) -> object:
    """Return text without meaning in Markdown, HTML and tables. Numbers and `Markup` stay as they are."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _MARKDOWN.sub(r"\\\g<0>", printable(value))
    return value


def model_card(card: ModelCard, metrics: Mapping[str, Any], settings: object, license_name: str) -> str:
    """Return the model card of a tested run as Markdown, with the front matter of the hub."""
    from huggingface_hub import EvalResult, ModelCardData

    dataset, library = printable(str(metrics["dataset"])), "cifar-lit"
    title = printable(f"{metrics.get('recipe') or card.net} on {dataset}")
    if card.net.startswith(TIMM):
        library = "timm"
    result = EvalResult(
        task_type="image-classification", dataset_type=DATASETS.get(dataset, dataset), dataset_name=dataset,
        dataset_split="test", metric_type="accuracy", metric_value=round(metrics["test"]["accuracy"], 6),
    )  # fmt: skip
    front = ModelCardData(
        license=license_name, library_name=library, pipeline_tag="image-classification", tags=["cifar-lit"],
        datasets=DATASETS.get(dataset), metrics=["accuracy"], model_name=title, eval_results=[result],
    )  # fmt: skip
    pages = Environment(
        loader=PackageLoader("cifar_lit.extras.hub", "pages"), finalize=markdown, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return pages.get_template("README.md.j2").render(
        front=Markup(front.to_yaml()), title=title, card=card,
        metrics=metrics, test=metrics["test"], settings=settings, facts=summary(metrics), code=Markup, dataset=dataset,
        percent=lambda share: Markup(f"{100 * share:.2f} %"), license=license_name, library=library,
    )  # fmt: skip
