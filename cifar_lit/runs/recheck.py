"""Compare what a run says with its weights, its settings and its data, for runs that somebody else may have made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.compare import RunRecord
from cifar_lit.runs.data_record import data_record
from cifar_lit.runs.label_errors import identical_rows
from cifar_lit.runs.model_file import READ_AT_ONCE, LoadedNet
from cifar_lit.runs.predictions import fingerprint, read_predictions

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

# Settings of config.yaml and their entries in metrics.json.
SAME = {
    "seed_everything": "seed", "model.net": "net", "data.dataset": "dataset", "data.batch_size": "batch_size",
    "recipe": "recipe",
}  # fmt: skip
MAX_CHANGE = 0.1  # difference of a probability from predictions.csv, and lead of another class over the one there
MAX_IDENTICAL = 0.01  # share of test images that are also training images; CIFAR-10 has a few


def setting_faults(run: RunRecord, net: LoadedNet) -> list[str]:
    """Return where config.yaml, metrics.json and the model file disagree."""
    faults = []
    for setting, name in SAME.items():
        value, recorded = run.settings.get(setting), run.metrics.get(name)
        if value != recorded:
            faults.append(f"config.yaml has {setting} {value}, metrics.json has {name} {recorded}")
    if net.card.net != run.metrics.get("net"):
        faults.append(f"model.safetensors holds another net ({net.card.net}) than metrics.json says")
    return faults


def data_faults(metrics: Mapping[str, Any], data: ImageData) -> list[str]:
    """Return how the data differ from those in metrics.json, and whether test images were trained on."""
    faults = []
    recorded, now = metrics.get("data"), data_record(data)
    if not isinstance(recorded, dict):
        return ["metrics.json does not say which data were used"]
    for name, what in {"images": "other images", "labels": "other labels", "split": "another split"}.items():
        if recorded.get(name) != now[name]:
            counts = f"{recorded.get('train')} training images then, {now['train']} now"
            faults.append(f"the run used {what} than these data have ({counts})")
            break  # the others follow from it
    train, _ = data.split
    test = data.test_images
    seen = int(torch.isin(identical_rows(data.train_images, test), train).sum())
    if seen > MAX_IDENTICAL * len(test):
        faults.append(f"{seen:,} of {len(test):,} test images are also training images")
    return faults


def retested(net: LoadedNet, images: ImageSet) -> Tensor:
    """Return the probabilities of images in float32, (N, classes), on the CPU and without temperature."""
    net = net.on("cpu")
    parts = torch.arange(len(images)).split(READ_AT_ONCE)
    return torch.cat([net.logits(images.take(rows).permute(0, 3, 1, 2)) for rows in parts]).softmax(1)


def result_faults(run: RunRecord, data: ImageData, probabilities: Tensor) -> list[str]:
    """Return how the results in metrics.json and predictions.csv differ from those of the weights."""
    test, labels = data.test_images, data.test_images.labels
    claimed = run.test["accuracy"]
    if run.test.get("fingerprint") != fingerprint(test.images, labels):
        return ["the run was tested on other images than these data have"]
    table = read_predictions(run.path / "predictions.csv", data.classes, len(test))
    if table is None or len(table.labels) != len(test) or not torch.equal(table.labels, labels[table.indices]):
        return ["predictions.csv is missing, or does not fit the test images"]
    faults = []
    written = float(table.hits.double().mean())
    if abs(written - claimed) > 0.5 / len(test):
        faults.append(f"metrics.json has accuracy {claimed:.4f}, but predictions.csv has {written:.4f}")
    own = probabilities[table.indices]
    given = own.gather(1, table.predicted[:, None])[:, 0]
    other = int(((own.amax(1) - given > MAX_CHANGE) | ((given - table.probability).abs() > MAX_CHANGE)).sum())
    if other:
        what = f"{other:,} of {len(test):,} predictions"
        faults.append(f"model.safetensors contradicts {what} in predictions.csv: other weights were tested")
    again = float((probabilities.argmax(1) == labels).double().mean())
    # A test in bfloat16 changes close predictions, as often to the better as to the worse: three standard deviations.
    changed = int((own.argmax(1) != table.predicted).sum())
    if abs(again - claimed) * len(test) > 1 + 3 * math.sqrt(changed):
        faults.append(f"metrics.json has accuracy {claimed:.4f}, the weights reach {again:.4f}")
    return faults
