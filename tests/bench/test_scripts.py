"""The scripts in scripts/benchmarks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import gradients
import input as input_script
import limit
import profile_step
import pytest
import step
import torch
import units
import variants
from limit import Kind
from loops import BareLoop
from timed_fit import Stopwatch, fit, model_settings

from cifar_lit.bench.commands import run_module
from cifar_lit.errors import UsageError

pytestmark = pytest.mark.slow

SMALL = "--accelerator cpu --dataset shapes --data.count 90 --json f.json"


@pytest.mark.parametrize(
    ("module", "line", "label"),
    [
        (step, "--recipe folder --batch-size 16 --steps 2 --rounds 2", "ours / bare loop"),
        (input_script, "--batch-size 16 --batches 2 --rounds 2", "ours / the strongest rival"),
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


def test_steps_with_fast_gradients_are_compared_with_those_without_and_in_float32() -> None:
    Path("small.yaml").write_text(
        "model: {net: whitened, net_options: {widths: [4]}}\ndata: {batch_size: 4}\nfinetune: {frozen: 0.5}\n"
    )
    run_module("script.py", gradients, ["small.yaml:12", "--rounds", "2", "--json", "f.json"])
    headline = json.loads(Path("f.json").read_text())["headline"]
    assert {label: row["n"] for label, row in headline.items()} == {
        "small.yaml, 12 px: fast / plain": 2,
        "small.yaml, 12 px: fast / float32": 2,
    }


def test_variants_are_compared_seed_by_seed_on_held_out_images_and_a_finished_training_is_not_repeated() -> None:
    Path("v.json").write_text('{"small": ["--batch-size", "10"]}')
    line = ["v.json", "--recipe", "quickstart", "--held-out", "100", "--json", "f.json"]
    line += ["--data.count", "300", "--epochs", "2", "--accelerator", "cpu"]
    run_module("script.py", variants, [*line, "--runs", "1"])
    first = json.loads(Path("f.json").read_text())["runs"]
    run_module("script.py", variants, [*line, "--runs", "2"])
    figures = json.loads(Path("f.json").read_text())
    runs = figures["runs"]
    assert {name: same[:1] for name, same in runs.items()} == first  # their seconds would differ
    assert [[one["seed"] for one in same] for same in runs.values()] == [[0, 1], [0, 1]]
    assert len({one["loss"] for same in runs.values() for one in same}) == 4  # another seed or flag, another training
    pairs = zip(runs["unchanged"], runs["small"], strict=True)
    differences = sorted(100 * (small["accuracy"] - unchanged["accuracy"]) for unchanged, small in pairs)
    headline = figures["headline"]["small: difference"]
    assert (headline["n"], headline["low"], headline["high"]) == (2, *map(pytest.approx, differences))


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


# ---- limit.py


@pytest.fixture
def tiny_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limit.MATRIX_SIDE, "cpu", 8)


@pytest.fixture
def whitened_subject(small_subject: Any) -> Any:
    """Return a training of a small whitened net. Its images grow from 12 to 16 pixels."""
    options = {"widths": [4, 6], "depth": 1}
    features = {"whitening": {"bias_epochs": 1.5}, "resolutions": {"sides": {12: 0.5}}}
    return small_subject(features, net="whitened", net_options=options, optimizer="muon", schedule="one_cycle")


def test_the_computation_of_a_training_equals_a_count_by_hand(tiny_matrices: None) -> None:
    run_module("limit.py", limit, f"--recipes small.yaml --rounds 2 {SMALL}".split())
    figures = json.loads(Path("f.json").read_text())["headline"]
    convolutions = 12 * 12 * 6 * 3 * 25, 2 * 2 * 16 * 6 * 25  # multiplications of an image
    layers = 16 * 120 + 120 * 84 + 84 * 4
    # Forward, gradient of the weights, gradient of the input, which the first layer does not compute.
    multiplications = 2 * convolutions[0] + 3 * (convolutions[1] + layers)
    assert figures.pop("small.yaml: computation") == pytest.approx(2e-12 * multiplications * 70)
    speeds = [*limit.RATES, "share of the matrix product", "share of the convolutions"]
    assert list(figures) == [f"small.yaml, {way}: {speed}" for way in ("32-true", "bf16-mixed") for speed in speeds]
    assert all(value["n"] == 2 and value["low"] > 0 for value in figures.values())


def test_the_images_of_a_training_are_counted_by_size_and_state_of_the_whitening_bias(whitened_subject: Any) -> None:
    images = {Kind(12, False): 100 + 64, Kind(12, True): 36, Kind(None, True): 200}  # batches of 16 and one of 4
    assert limit.images_by_kind(whitened_subject, 4) == images
    whitened_subject.features["skip_easy"] = {"share": 0.5, "start": 0.75}  # the last epoch, of full batches
    assert limit.images_by_kind(whitened_subject, 4) == images | {Kind(None, True): 100 + 112}


def test_a_final_whitening_bias_saves_the_gradient_at_full_resolution(whitened_subject: Any) -> None:
    trained, final = (limit.recorded_step(whitened_subject, Kind(12, is_final)) for is_final in (False, True))
    assert trained.operations - final.operations == 2 * 11 * 11 * 24 * 4 * 9
    assert len(trained.convolutions) == 3 + 3  # forward and backward
    assert len(final.convolutions) == 3 + 2


@pytest.mark.parametrize("is_final", [False, True])
def test_timed_steps_have_the_size_and_the_state_of_their_kind(
    whitened_subject: Any, tiny_matrices: None, is_final: bool
) -> None:
    kind, net, steps = Kind(12, is_final), whitened_subject.model.net, list[tuple[int, bool]]()
    step = limit.recorded_step(whitened_subject, kind)
    net.register_forward_pre_hook(lambda net, images: steps.append((images[0].shape[2], net.bias_is_final)))
    rates = limit.measured_rates(whitened_subject, kind, step, Namespace(steps=2, rounds=2))
    assert steps == [(12, False), *[(12, is_final)] * 5]  # the first two warm up
    assert [len(values) for values in rates.values()] == [2, 2, 2]
