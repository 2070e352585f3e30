"""The scripts of scripts/benchmarks: tables of results, and what measurements make of their numbers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
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
SCRIPTS = {
    "step": (step, "--recipe folder --batch-size 16 --steps 2 --rounds 2", "ours / bare loop"),
    "tutorial": (tutorial, "--epochs 2", "ours / the tutorial's loop, float32"),
    "input": (input_script, "--batch-size 16 --batches 2 --rounds 2", "ours / the strongest rival"),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_loop_beside_ours_is_measured_in_turn_with_it(what: str) -> None:
    module, line, label = SCRIPTS[what]
    run_module("script.py", module, f"{line} {SMALL}".split())
    assert json.loads(Path("f.json").read_text())["headline"][label]["n"] == 2


def test_the_bare_loop_computes_the_weights_of_the_trainer(small_subject: Any) -> None:
    subject, loops = small_subject(optimizer="adamw", ema_decay=0.5, schedule="one_cycle"), list[BareLoop]()

    def start(trainer: Any, classifier: Any) -> Any:
        loops.append(BareLoop(trainer, classifier, subject.data))
        return loops[0].take

    watch = Stopwatch(4, 3, 2, start)
    fit(subject, watch, max_epochs=4)
    assert [(turn.steps, turn.images) for turn in watch.rounds] == [
        (4, 64),
        (4, 52),
        (4, 52),
    ]  # the seventh batch has 4 images
    net = loops[0].average.module if loops[0].average else loops[0].net  # the Trainer leaves its average in the model
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, subject.model.net.state_dict()[name], rtol=0, atol=1e-5)


def test_looking_at_the_test_images_on_the_way_changes_no_bit_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_subject: Any
) -> None:
    monkeypatch.setenv(VARIABLE, f"3:{tmp_path / 'points.txt'}")

    def weights(*callbacks: Callback) -> dict[str, Any]:
        subject = small_subject(net="shapenet", ema_decay=0.9)  # it has batch norms
        fit(subject, *callbacks, max_epochs=2)
        return subject.model.state_dict()

    before, after = weights(), weights(AccuracyCurve())
    assert all(torch.equal(before[name], after[name]) for name in before)
    points = [json.loads(line) for line in (tmp_path / "points.txt").read_text().splitlines()]
    assert [step for step, _, _ in points] == [3, 6, 7, 9, 12, 14]  # every third step, and the ends of both epochs
    seconds = [when for _, when, _ in points]
    assert seconds == sorted(seconds)


def test_a_variant_trains_in_each_epoch_on_the_images_that_are_chosen_as_it_begins() -> None:
    data = ImageData("shapes", count=40, image_size=8, val_size=0, batch_size=10)
    rows = data.split[0]
    choices = iter((rows, rows[:20], rows[5:15]))
    seen = torch.cat([batch[2] for batch in islice(variants.batches(data, lambda: next(choices)), 4 + 2 + 1)])
    epochs = seen.split([40, 20, 10])
    assert all(
        torch.equal(one.sort().values, part) for one, part in zip(epochs, (rows, rows[:20], rows[5:15]), strict=True)
    )


def test_each_way_with_unequal_classes_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imbalance.class_sizes(5000, 100) == [
        5000,
        2997,
        1796,
        1077,
        645,
        387,
        232,
        139,
        83,
        50,
    ]  # as Cui et al. have them
    monkeypatch.setitem(SOURCES, "cifar10", SOURCES["shapes"])
    monkeypatch.setitem(SOURCES, imbalance.LONG_TAILED, SOURCES["shapes"])  # taken away at the end
    line = "--recipe small.yaml --images 20 --ratio 5 --epochs 1 --runs 1 --json f.json"
    flags = "--data.num_classes 10 --data.count 400 --trainer.logger false"
    run_module("imbalance.py", imbalance, f"{line} {flags}".split())
    figures = json.loads(Path("f.json").read_text())["headline"]
    assert list(figures) == [f"{way}: {text}" for way in imbalance.WAYS for text in ("balanced accuracy", "macro F1")]
