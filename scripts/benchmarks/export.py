"""What a net keeps of its accuracy in each exported form, and what it gains: python scripts/benchmarks/export.py RUN."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from script import run_script

from cifar_lit.bench.report import environment, headline, publish, settings_of, significant
from cifar_lit.errors import UsageError
from cifar_lit.inference.export import CALIBRATION_IMAGES, TIMED_BATCHES, Exported, Sample, check_request, export
from cifar_lit.runs.model_file import load_model_file
from cifar_lit.runs.run_data import RunData

WHAT = (
    "Exports a run's net as ONNX, as ONNX in int8 and for torch.export, and compares each file with the net in PyTorch (float32, "
    "on the CPU): accuracy on the test images, decisions that agree, size, and time for a batch, both run in turn."
)
FORMS: dict[str, tuple[str, str | None]] = {
    "onnx": ("onnx", None), "onnx int8": ("onnx", "int8"), "torch-export": ("torch-export", None),
}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("run", type=str, help="a run folder, or its model.safetensors")
    parser.add_argument("--data-dir", dest="root", type=str | None, default=None, help="where the run's images are, if moved")
    parser.add_argument("--images", type=int, default=0, help="test images, evenly spread; 0 for all")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    if settings.images < 0:
        raise UsageError("--images is a number of test images, or 0 for all")
    for to, quantize in FORMS.values():
        check_request(to, quantize)
    net = load_model_file(settings.run)
    model = Path(settings.run).expanduser()
    model = model / "model.safetensors" if model.is_dir() else model
    data = RunData(model, net.card, settings.root)
    images, labels, what = data.load(train=False, count=settings.images)
    calibration = data.load(train=True, count=CALIBRATION_IMAGES).images
    exported = {}
    with TemporaryDirectory() as folder:
        for form, (to, quantize) in FORMS.items():
            path = Path(folder) / form.replace(" ", ".")
            exported[form] = export(net, to, path, Sample(images, labels), calibration if quantize else None)
            print(f"{form}: {exported[form].check.agreement:.2%} of the decisions agree", file=sys.stderr, flush=True)
    figures = figures_of(settings, net.card.net, data.dataset, model.stat().st_size, exported)
    publish(
        figures,
        settings.json,
        f"export · {net.card.net} · {what}",
        ("", "accuracy", "agreement", "largest difference", "MB", *(f"ms, batch of {batch}" for batch in TIMED_BATCHES)),
        [
            (
                form,
                f"{entry['accuracy']:.2%}",
                f"{entry['agreement']:.2%}" if form != "PyTorch" else "",
                f"{entry['difference']:.1e}" if form != "PyTorch" else "",
                f"{entry['bytes'] / 1e6:.2f}",
                *(f"{value:.2f}" for value in entry["ms"].values()),
            )
            for form, entry in figures["forms"].items()
        ],
        "times are medians, each file's in turn with PyTorch's; PyTorch's own are those beside the first file",
        f"int8 is calibrated on {len(calibration)} training images",
    )


def figures_of(settings: Namespace, net: str, dataset: str, size: int, exported: dict[str, Exported]) -> dict[str, Any]:
    """The figures of the files by form, and under PyTorch those of the net that they are compared with.

    net: its name. size: bytes of its model.safetensors.
    """
    first = next(iter(exported.values()))
    forms: dict[str, dict[str, Any]] = {"PyTorch": _entry(first, 0, size)}
    forms |= {form: _entry(done, 1, done.size) for form, done in exported.items()}
    rows: list[tuple[str, float, str]] = [(f"accuracy, {form}", 100 * entry["accuracy"], "%") for form, entry in forms.items()]
    batch = TIMED_BATCHES[-1]
    rows += [
        (f"{form} against PyTorch, batch of {batch}", done.seconds[batch][0] / done.seconds[batch][1], "× as fast")
        for form, done in exported.items()
    ]
    own = {name: value for name, value in settings_of(settings).items() if name != "run"}
    return {
        "bench": "export",
        "settings": {**own, "net": net, "dataset": dataset},
        "environment": environment(),
        **headline(*rows),
        "images": first.check.images,
        "forms": forms,
    }


def _entry(done: Exported, side: int, size: int) -> dict[str, Any]:
    """One form's figures; side: 0 for the net, 1 for the file."""
    assert done.check.accuracy is not None  # the images are a data set's
    entry: dict[str, Any] = {"accuracy": done.check.accuracy[side], "bytes": size}
    if side:
        entry |= {"agreement": done.check.agreement, "difference": significant(done.check.difference)}
    return {**entry, "ms": {str(batch): significant(1e3 * pair[side]) for batch, pair in done.seconds.items()}}


if __name__ == "__main__":
    raise SystemExit(run_script(sys.modules[__name__]))
