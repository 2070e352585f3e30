"""The scripts in scripts/benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import profile_step
import pytest
import step
import torch
import units
import variants
from loops import BareLoop
from script import run_module
from timed_fit import Stopwatch, fit, model_settings

from cifar_lit.base.errors import UsageError

pytestmark = pytest.mark.slow

SMALL = "--accelerator cpu --dataset shapes --data.count 90 --json f.json"


@pytest.mark.parametrize(
    ("module", "line", "label"),
    [
        (step, "--recipe folder --batch-size 16 --steps 2 --rounds 2", "ours / bare loop"),
    ],
)
def test_loops_are_measured_in_alternating_rounds(module: ModuleType, line: str, label: str) -> None:
    run_module("script.py", module, f"{line} {SMALL}".split())
    assert json.loads(Path("f.json").read_text())["headline"][label]["n"] == 2


def test_units_are_the_seconds_of_a_training_over_those_of_the_tutorial() -> None:
    run_module("script.py", units, ["quickstart", "--dataset", "shapes", "--rounds", "1", "--json", "f.json"])
    values = {label: value["median"] for label, value in json.loads(Path("f.json").read_text())["headline"].items()}
    expected = values["quickstart: training"] / values[units.UNIT]
    assert values["quickstart: units"] == pytest.approx(expected, rel=1e-3)
    assert values["quickstart: typical training"] == pytest.approx(220.3 * expected, rel=1e-3)


def test_the_bare_loop_computes_the_weights_of_the_trainer(small_subject: Any) -> None:
    average = {"weight_average": {"decay": 0.5}}
    subject, loops = small_subject(average, optimizer="adamw", schedule="one_cycle"), list[BareLoop]()

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


@pytest.mark.parametrize(("module", "least"), [(step, 2), (profile_step, 20)])
def test_steps_are_timed_after_the_whitening_schedule_and_with_changed_settings(module: ModuleType, least: int) -> None:
    flags = ["--model.net_options.widths", "[8,8,8]", "--model.optimizer_options.weight_decay", "1e-3"]
    line = f"--recipe fast94 --batch-size 20 --steps 2 {' '.join(flags)}"
    line += " --rounds 1" if module is step else ""
    run_module("script.py", module, f"{line} {SMALL} --data.count 60".split())
    settings = json.loads(Path("f.json").read_text())["settings"]
    assert (settings["warmup"], settings["batch_size"]) == (3 * 3 + least, 20)  # bias_epochs is 3
    assert settings["flags"] == flags


def test_settings_of_a_model_are_read_as_in_a_training() -> None:
    flags = "--margins false --model.optimizer_options.momentum 1e-3 --model.net_options.depth=[2,3,3] --lr 1"
    values = {"margins": None, "optimizer_options.momentum": 0.001, "net_options.depth": [2, 3, 3], "lr": 1}
    assert model_settings(flags.split()) == values
    for flags in ("--epochs 3", "--data.augment.crop 2", "--model.tta"):
        with pytest.raises(UsageError, match="not a flag of this measurement"):
            model_settings(flags.split())


def test_variants_are_compared_seed_by_seed_on_held_out_images_and_a_finished_training_is_not_repeated() -> None:
    Path("v.json").write_text('{"small": ["--batch-size", "10"]}')
    line = ["v.json", "--recipe", "quickstart", "--held-out", "100", "--json", "f.json"]
    line += ["--data.count", "300", "--epochs", "2", "--accelerator", "cpu"]
    run_module("script.py", variants, [*line, "--runs", "1"])
    first = json.loads(Path("f.json").read_text())
    unchanged, small = (same[0] for same in first["runs"].values())
    assert unchanged["loss"] != small["loss"]
    difference = first["headline"]["small: difference"]
    assert (difference["n"], difference["low"]) == (1, pytest.approx(100 * (small["accuracy"] - unchanged["accuracy"])))
    run_module("script.py", variants, [*line, "--runs", "1"])
    assert json.loads(Path("f.json").read_text())["runs"] == first["runs"]  # new trainings would have other times


@pytest.mark.parametrize(
    ("flags", "recipe", "named"),
    [('["--lr", "0.2"]', "quickstart", "variant 'low'"), ('["--lr", "0.1"]', "cpu91", "recipe")],
)
def test_trainings_of_other_variants_or_of_another_recipe_are_not_continued(
    flags: str, recipe: str, named: str
) -> None:
    earlier = {"recipe": "quickstart", "held_out": 100, "changes": {"unchanged": [], "low": ["--lr", "0.1"]}}
    Path("f.json").write_text(json.dumps({"settings": earlier, "runs": {"unchanged": [], "low": []}}))
    Path("v.json").write_text(f'{{"low": {flags}}}')
    with pytest.raises(UsageError, match=f"another {named}: choose another --json file"):
        line = ["v.json", "--recipe", recipe, "--held-out", "100", "--runs", "1", "--json", "f.json"]
        run_module("script.py", variants, line)
