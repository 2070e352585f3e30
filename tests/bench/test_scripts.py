"""The scripts in scripts/benchmarks."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import imbalance
import input as input_script
import pytest
import step
import torch
import tutorial
import variants
from curves import VARIABLE, AccuracyCurve
from lightning.pytorch.callbacks import Callback
from loops import BareLoop
from timed_fit import Stopwatch, fit

from cifar_lit.bench.commands import run_module
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.sources import SOURCES

SMALL = "--accelerator cpu --dataset shapes --data.count 90 --json f.json"


@pytest.mark.parametrize(
    ("module", "line", "label"),
    [
        (step, "--recipe folder --batch-size 16 --steps 2 --rounds 2", "ours / bare loop"),
        (tutorial, "--epochs 2", "ours / the tutorial's loop, float32"),
        (input_script, "--batch-size 16 --batches 2 --rounds 2", "ours / the strongest rival"),
    ],
)
def test_loops_are_measured_in_alternating_rounds(module: ModuleType, line: str, label: str) -> None:
    run_module("script.py", module, f"{line} {SMALL}".split())
    assert json.loads(Path("f.json").read_text())["headline"][label]["n"] == 2


def test_the_bare_loop_computes_the_weights_of_the_trainer(small_subject: Any) -> None:
    subject, loops = small_subject(optimizer="adamw", ema_decay=0.5, schedule="one_cycle"), list[BareLoop]()

    def start(trainer: Any, classifier: Any) -> Any:
        loops.append(BareLoop(trainer, classifier, subject.data))
        return loops[0].take

    watch = Stopwatch(4, 3, 2, start)
    fit(subject, watch, max_epochs=4)
    rounds = [(turn.steps, turn.images) for turn in watch.rounds]
    assert rounds == [(4, 64), (4, 52), (4, 52)]  # the seventh batch has 4 images
    net = loops[0].average.module if loops[0].average else loops[0].net  # the Trainer's model holds the average
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, subject.model.net.state_dict()[name], rtol=0, atol=1e-5)


def test_evaluating_test_images_during_training_leaves_the_weights_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_subject: Any
) -> None:
    monkeypatch.setenv(VARIABLE, f"3:{tmp_path / 'points.txt'}")

    def weights(*callbacks: Callback) -> dict[str, Any]:
        subject = small_subject(net="shapenet", ema_decay=0.9)  # a net with batch norm
        fit(subject, *callbacks, max_epochs=2)
        return subject.model.state_dict()

    before, after = weights(), weights(AccuracyCurve())
    assert all(torch.equal(before[name], after[name]) for name in before)
    points = [json.loads(line) for line in (tmp_path / "points.txt").read_text().splitlines()]
    assert [step for step, _, _ in points] == [3, 6, 7, 9, 12, 14]  # every third step, and the ends of both epochs
    seconds = [elapsed for _, elapsed, _ in points]
    assert seconds == sorted(seconds)


def test_a_variant_chooses_its_images_at_the_start_of_each_epoch() -> None:
    data = ImageData("shapes", count=40, image_size=8, val_size=0, batch_size=10)
    rows = data.split[0]
    choices = (rows, rows[:20], rows[5:15])
    batches = variants.batches(data, iter(choices).__next__)
    indices = torch.cat([batch[2] for batch in islice(batches, 4 + 2 + 1)])
    for epoch, choice in zip(indices.split([40, 20, 10]), choices, strict=True):
        assert torch.equal(epoch.sort().values, choice)


def test_every_method_for_imbalanced_classes_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]  # Cui et al., Class-Balanced Loss
    assert imbalance.class_sizes(5000, 100) == sizes
    monkeypatch.setitem(SOURCES, "cifar10", SOURCES["shapes"])
    monkeypatch.setitem(SOURCES, imbalance.LONG_TAILED, SOURCES["shapes"])  # removed at the end
    line = "--recipe small.yaml --images 20 --ratio 5 --epochs 1 --runs 1 --json f.json"
    flags = "--data.num_classes 10 --data.count 400 --trainer.logger false"
    run_module("imbalance.py", imbalance, f"{line} {flags}".split())
    figures = json.loads(Path("f.json").read_text())["headline"]
    assert list(figures) == [f"{way}: {text}" for way in imbalance.WAYS for text in ("balanced accuracy", "macro F1")]
