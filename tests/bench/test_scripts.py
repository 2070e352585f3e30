"""The scripts of scripts/benchmarks: tables of results, and what measurements make of their numbers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imbalance
import input as input_script
import pytest
import step
import table
import torch
import tutorial
import variants
from cold import seconds_of
from curves import VARIABLE, AccuracyCurve, first_pass, line_of, undisturbed
from lightning.pytorch.callbacks import Callback
from loops import BareLoop
from profile_step import covered
from timed_fit import Stopwatch, fit

from cifar_lit.bench.commands import run_module
from cifar_lit.bench.process import FinishedTraining
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.sources import SOURCES, SourceSettings
from cifar_lit.errors import Failure, UsageError

WHERE = {"date": "2026-01-02", "cpu": "a CPU", "threads": 2, "gpu": None, "versions": {"torch": "2"}}
# fmt: off
RUN = {
    "dataset": "cifar10", "accelerator": "cpu", "views": None, "seconds": 12.5, "images_per_second": 100.0, "memory_mb": 800,
    "device_memory_mb": None, "precision": "32-true", "accuracy": 0.9, "cold_seconds": 20.0, "first": True,
}
FLAGS = ["--data.dataset=folder", "--trainer.max_epochs", "3", "--trainer.devices=1"]
RUNS = [RUN, {**RUN, "accuracy": 0.92, "cold_seconds": None, "first": False}]
RESULTS: dict[str, dict[str, Any]] = {
    "a": {"bench": "recipe", "environment": WHERE, "settings": {"flags": FLAGS}, "recipes": {"laptop": {"runs": RUNS}}},
    "b": {
        "bench": "input", "environment": WHERE, "settings": {"batch_size": 64},
        "headline": {"ours / plain": {"n": 9, "median": 2.5, "low": 2.25, "high": 2.75}, "ours": 12345.6},
        "unit": {"ours / plain": "×", "ours": "images/s"},
    },
    "c": {
        "recipe": "tudui", "dataset": "folder", "devices": 1, "accelerator": "cpu", "train_seconds": 134.567,
        "test": {"accuracy": 0.5368, "tta": {"views": "mirror", "accuracy": 0.55, "loss": 1.0}},
    },
}
# fmt: on


HEADER = """# laptop — a recipe
# Score:    stale
# Time:     stale
# Hardware: stale
# Date:     stale
# Command:  python scripts/train.py --recipe laptop
# File:     results/cpu/a.json
seed_everything: 0
"""
README = """before [stale](results/cpu/a.json "laptop: test accuracy") amid
not measured on published pixels yet<!-- results/cpu/b.json "ours / plain" --> [2](results/cpu/later.json "of it")
<!-- results -->
stale
<!-- /results -->
after
"""


def main(line: str) -> None:
    run_module("table.py", table, line.split())


@pytest.fixture
def results(here: Path) -> Path:
    """results/: seeds of a recipe, a measurement, a single run's metrics; a README with figures and a table; a recipe."""
    folder = here / "results" / "cpu"
    folder.mkdir(parents=True)
    for name, figures in RESULTS.items():
        (folder / f"{name}.json").write_text(json.dumps(figures))
    (here / "README.md").write_text(README)
    (here / "cifar_lit" / "recipes").mkdir(parents=True)
    (here / "cifar_lit" / "recipes" / "laptop.yaml").write_text(HEADER)
    return folder


def test_every_figure_is_written_in_its_place_and_checked_there(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme, recipe = Path("README.md"), Path("cifar_lit/recipes/laptop.yaml")
    with pytest.raises(Failure, match=r"of README\.md, cifar_lit/recipes/laptop\.yaml are not those of their files"):
        main("--check")
    main("--write")
    written = readme.read_text()
    first, second, *others = written.splitlines()
    assert first == 'before [91.00 ± 1.41 % (n = 2)](results/cpu/a.json "laptop: test accuracy") amid'
    unmeasured = 'not measured on published pixels yet<!-- results/cpu/later.json "of it" -->'
    assert second == f'[2.5 × (2.25 … 2.75, n = 9)](results/cpu/b.json "ours / plain") {unmeasured}'
    assert others[:2] == ["<!-- results -->", ""] and written.endswith("|\n\n<!-- /results -->\nafter\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in others if line.startswith("|")]
    columns = ["recipe", "images", "machine", "test accuracy", "with views", "training", "start to end", "peak memory", "file"]
    assert rows[0] == columns
    laptop, link = "`laptop` with `--trainer.max_epochs 3`", "[a](results/cpu/a.json)"
    accuracy, training = "91.00 ± 1.41 % (n = 2)", "12.5 s (n = 1)"
    assert rows[2] == [laptop, "cifar10", "a CPU, 2 threads, 32-true", accuracy, "–", training, "20 s (n = 1)", "800 MB", link]
    assert rows[3][:6] == ["`tudui`", "folder", "1 × cpu", "53.68 % (n = 1)", "55.00 % (n = 1), mirror", "134.6 s (n = 1)"]
    assert rows[6][:4] == ["`input` (batch size 64)", "a CPU, 2 threads", "ours / plain", "2.5 × (2.25 … 2.75, n = 9)"]
    assert rows[7][2:4] == ["ours", "12,346 images/s"]
    assert recipe.read_text().splitlines()[1:5] == [
        "# Score:    91.00 ± 1.41 % (n = 2); cifar10",
        "# Time:     12.5 s (n = 1); 20 s (n = 1) from the start of the process to the tested net",
        "# Hardware: a CPU, 2 threads, 32-true",
        "# Date:     2026-01-02",
    ]
    main("--check")
    (results / "a.json").unlink()
    main("--write")
    assert readme.read_text().startswith("before not measured on published pixels yet<!-- results/cpu/a.json")
    assert "# Score:    not measured on published pixels yet\n# Time:     not measured\n" in recipe.read_text()
    assert capsys.readouterr().out.splitlines() == ["README.md: renewed", "cifar_lit/recipes/laptop.yaml: renewed"] * 2


def test_what_is_no_result_is_named(results: Path) -> None:
    with pytest.raises(UsageError, match="there is no nowhere"):
        main("nowhere")
    for text, answer in (('{"something": 1}', r"d\.json holds neither"), ('{"something', r"d\.json cannot be read")):
        (results / "d.json").write_text(text)
        with pytest.raises(UsageError, match=answer):
            main("")
    (results / "d.json").unlink()
    Path("README.md").write_text('[1](results/cpu/b.json "theirs")')
    with pytest.raises(UsageError, match=r"b\.json has no figure 'theirs'; it has date, machine, ours / plain, ours"):
        main("--check")


# ---- measurements

SMALL = "--accelerator cpu --dataset shapes --data.count 90 --json f.json"
SCRIPTS = {
    "step": (step, "--batch-size 16 --steps 2 --rounds 2", "ours / bare loop"),
    "step of a recipe": (step, "--recipe folder --batch-size 16 --steps 2 --rounds 2", "bare loop, a step"),
    "tutorial": (tutorial, "--epochs 2", "ours / the tutorial's loop, float32"),
    "input": (input_script, "--batch-size 16 --batches 2 --rounds 2", "ours / the strongest rival"),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_loop_beside_ours_is_measured_in_turn_with_it(what: str) -> None:
    module, line, label = SCRIPTS[what]
    run_module("script.py", module, f"{line} {SMALL}".split())
    assert json.loads(Path("f.json").read_text())["headline"][label]["n"] == 2


@pytest.mark.parametrize("model", [{"momentum": 0.9, "schedule": "one_cycle"}, {"optimizer": "adamw", "ema_decay": 0.5}])
def test_the_bare_loop_computes_the_weights_of_the_trainer(model: dict[str, Any], small_subject: Any) -> None:
    subject, loops = small_subject(**model), list[BareLoop]()

    def start(trainer: Any, classifier: Any) -> Any:
        loops.append(BareLoop(trainer, classifier, subject.data))
        return loops[0].take

    watch = Stopwatch(4, 3, 2, start)
    fit(subject, watch, max_epochs=4)
    assert [(turn.steps, turn.images) for turn in watch.rounds] == [(4, 64), (4, 52), (4, 52)]  # the seventh batch has 4 images
    net = loops[0].average.module if loops[0].average else loops[0].net  # the Trainer leaves its average in the model
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, subject.model.net.state_dict()[name], rtol=0, atol=1e-5)


def test_a_cold_run_is_cut_at_its_first_step() -> None:
    done = FinishedTraining({"train_seconds": 3.0}, 9.0, [(5.0, "data         d · train 8"), (8.5, "test accuracy 0.5")])
    parts = {"imports alone": 2.0, "to the first step": 5.0, "training": 3.0, "test and files": 1.0, "all": 9.0}
    assert {name: value["median"] for name, value in seconds_of([done], [2.0]).items()} == parts


def test_time_under_several_kernels_at_once_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4.0


def test_lines_are_as_long_as_the_shortest_curve_and_pass_at_the_first_point_above() -> None:
    points = [[1, 0.5, 0.3], [2, 1.0, 0.6], [3, 1.5, 0.5]]
    assert [first_pass(points, threshold) for threshold in (0.3, 0.31, 0.6, 0.61)] == [0.5, 1.0, 1.0, None]
    runs = [{"curve": points}, {"curve": [[1, 1.5, 0.5], [2, 3.0, 0.4]]}]
    assert line_of(runs) == ([1.0, 2.0], [pytest.approx(40), pytest.approx(50)], [30, 40], [50, 60])


@pytest.mark.parametrize("model", [{}, {"ema_decay": 0.9}])
def test_looking_at_the_test_images_on_the_way_changes_no_bit_of_the_weights(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_subject: Any
) -> None:
    monkeypatch.setenv(VARIABLE, f"3:{tmp_path / 'points.txt'}")

    def weights(*callbacks: Callback) -> dict[str, Any]:
        subject = small_subject(net="shapenet", **model)  # it has batch norms
        fit(subject, *callbacks, max_epochs=2)
        return subject.model.state_dict()

    before, after = weights(), weights(AccuracyCurve())
    assert all(torch.equal(before[name], after[name]) for name in before)
    points = [json.loads(line) for line in (tmp_path / "points.txt").read_text().splitlines()]
    assert [step for step, _, _ in points] == [3, 6, 7, 9, 12, 14]  # every third step, and the ends of both epochs
    seconds = [when for _, when, _ in points]
    assert seconds == sorted(seconds)


def test_looking_draws_no_number_and_turns_nothing_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).eval())
    before = torch.get_rng_state()
    with undisturbed(SimpleNamespace(callbacks=[]), model):  # type: ignore[arg-type]
        assert not any(module.training for module in model.modules())
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model] == [True, False]


def test_a_variant_trains_in_each_epoch_on_the_images_that_are_chosen_as_it_begins() -> None:
    data = ImageData("shapes", count=40, image_size=8, val_size=0, batch_size=10)
    rows = data.split[0]
    choices = iter((rows, rows[:20], rows[5:15]))
    seen = torch.cat([batch[2] for batch in islice(variants.batches(data, lambda: next(choices)), 4 + 2 + 1)])
    epochs = seen.split([40, 20, 10])
    assert all(torch.equal(one.sort().values, part) for one, part in zip(epochs, (rows, rows[:20], rows[5:15]), strict=True))


def test_unequal_classes_are_made_of_cifar_10_and_each_way_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imbalance.class_sizes(5000, 100) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]  # as Cui et al. have them
    monkeypatch.setitem(SOURCES, "cifar10", SOURCES["shapes"])
    monkeypatch.setitem(SOURCES, imbalance.LONG_TAILED, SOURCES["shapes"])  # taken away at the end
    settings = SourceSettings(image_size=16, count=400)
    counts = [
        imbalance.drawn(settings, train, imbalance.class_sizes(20, 5), 0).labels.bincount().tolist() for train in (True, False)
    ]
    assert counts[0] == imbalance.class_sizes(20, 5) and sum(counts[1]) == 80
    line = "--recipe small.yaml --images 20 --ratio 5 --epochs 1 --runs 1 --json f.json"
    flags = "--data.num_classes 10 --data.count 400 --trainer.logger false"
    run_module("imbalance.py", imbalance, f"{line} {flags}".split())
    figures = json.loads(Path("f.json").read_text())["headline"]
    assert list(figures) == [f"{way}: {text}" for way in imbalance.WAYS for text in ("balanced accuracy", "macro F1")]
    assert len({value["median"] for value in figures.values()}) > 2 and all(0 <= one["median"] <= 100 for one in figures.values())
    with pytest.raises(UsageError, match="--images between"):
        run_module("imbalance.py", imbalance, ["--images", "20"])
