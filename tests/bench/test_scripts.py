"""The scripts in scripts/benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import seeds
import step
import torch
import units
import variants
from contract.command_line import SMALL, run_command
from loops import Race

from cifar_lit import ImageClassifier, ImageData
from cifar_lit.features.weight_average import WeightAverage

pytestmark = pytest.mark.slow


def test_steps_are_timed_after_the_whitening_schedule_and_with_changed_settings() -> None:
    flags = [
        "--recipe",
        "fast94",
        "--batch-size",
        "20",
        "--data.count",
        "60",
        "--dataset",
        "shapes",
        "--accelerator",
        "cpu",
    ]
    flags += ["--model.net_options.widths", "[8,8,8]", "--model.optimizer_options.weight_decay", "1e-3"]
    step.run([*flags, "--steps", "2", "--rounds", "2", "--json", "f.json"])
    results = json.loads(Path("f.json").read_text())
    assert results["headline"]["ours / bare loop"]["n"] == 2
    assert (results["settings"]["batch_size"], results["settings"]["flags"]) == (20, flags)
    assert Race.latest.warmup == 3 * 3 + 10  # three steps in each of the `bias_epochs`


def test_units_are_the_seconds_of_a_training_over_those_of_the_tutorial() -> None:
    units.run(["quickstart", "--dataset", "shapes", "--rounds", "1", "--json", "f.json"])
    values = {label: value["median"] for label, value in json.loads(Path("f.json").read_text())["headline"].items()}
    expected = values["quickstart: training"] / values[units.UNIT]
    assert values["quickstart: units"] == pytest.approx(expected, rel=1e-3)
    assert values["quickstart: typical training"] == pytest.approx(220.3 * expected, rel=1e-3)


def test_the_bare_loop_computes_the_weights_of_the_trainer() -> None:
    images = {"count": 120, "image_size": 16, "mean": 0.5, "std": 0.25}
    data = ImageData("shapes", val_size=20, batch_size=16, images=images)
    model = ImageClassifier("lenet", lr=0.05, optimizer="adamw", schedule="one_cycle")
    race = Race(4, 3, 2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=4, limit_val_batches=0, callbacks=[race, WeightAverage(0.5)], **quiet
    )
    trainer.fit(model, data)
    rounds = [(turn.steps, turn.images) for turn in race.rounds]
    assert rounds == [(4, 64), (4, 52), (4, 52)]  # the seventh batch has 4 images
    assert race.loop.average  # the Trainer's model holds the average
    for name, value in race.loop.average.module.state_dict().items():
        torch.testing.assert_close(value, model.net.state_dict()[name], rtol=0, atol=1e-5)


def test_variants_are_compared_seed_by_seed_on_held_out_images_and_a_finished_training_is_not_repeated() -> None:
    Path("v.json").write_text('{"small": ["--batch-size", "10"]}')
    line = ["v.json", "--recipe", "quickstart", "--held-out", "100", "--json", "f.json"]
    line += ["--data.count", "300", "--epochs", "2", "--accelerator", "cpu"]
    variants.run([*line, "--runs", "1"])
    first = json.loads(Path("f.json").read_text())
    unchanged, small = (same[0] for same in first["runs"].values())
    assert unchanged["loss"] != small["loss"]
    difference = first["headline"]["small: difference"]
    assert (difference["n"], difference["low"]) == (1, pytest.approx(100 * (small["accuracy"] - unchanged["accuracy"])))
    variants.run([*line, "--runs", "1"])
    assert json.loads(Path("f.json").read_text())["runs"] == first["runs"]  # new trainings would have other times


def test_several_seeds_are_recorded_in_a_file(working_folder: Path) -> None:
    assert run_command("train", *SMALL, "--epochs", "1", "--seeds", "0-1").code == 0
    seeds.run(Path("lightning_logs/small-seeds-1"), Path("new/f.json"))
    record = json.loads(Path("new/f.json").read_text())
    runs = record["recipes"]["small"]["runs"]
    assert [(run["seed"], run["first"]) for run in runs] == [(0, True), (1, False)]
    assert record["settings"]["flags"] and runs[1]["calibration"]["error"]
