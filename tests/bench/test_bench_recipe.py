from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cifar_lit.bench import curve, recipe
from cifar_lit.bench.commands import bench
from cifar_lit.bench.curve import accuracy_of, first_pass, undisturbed
from cifar_lit.bench.plot import line_of
from cifar_lit.bench.records import Records
from cifar_lit.bench.summary import summary
from cifar_lit.bench.training_run import images_held, process_age, run_once
from cifar_lit.data.sources import SourceSettings, load_images
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.compare import mean_interval, t_quantile
from cifar_lit.training.callbacks import Interrupted
from cifar_lit.training.classifier import ImageClassifier

SMALL = """trainer: {accelerator: cpu, max_epochs: 2, precision: 32-true}
model: {net: lenet, lr: 0.05, momentum: 0.9}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 200, val_size: 40, batch_size: 32}
"""
AVERAGED = ["--model.ema_decay", "0.9"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder with the recipe small.yaml; what a command sets for the whole process is put back."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def stopping_at(seed: int, error: BaseException, made: list[int]) -> Any:
    """`run_once`, but ended by `error` at one seed; `made` takes the seeds of the others."""

    def run(name: str, words: Any, now: int, *rest: Any) -> dict[str, Any]:
        if now == seed:
            raise error
        made.append(now)
        return run_once(name, words, now, *rest)

    return run


def test_seeds_become_means_with_an_interval_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    bench(["recipe", "small.yaml", "--runs", "3", "--json", "out/f.json", "--plot", "out/p.png", "--passes", "0.01,1"])
    figures = json.loads(Path("out/f.json").read_text())
    entry = figures["recipes"]["small"]
    accuracies = [run["accuracy"] for run in entry["runs"]]
    assert [run["seed"] for run in entry["runs"]] == [0, 1, 2]
    assert entry["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 3)
    assert entry["accuracy"]["low"] < entry["accuracy"]["mean"] < entry["accuracy"]["high"]
    assert [run["first"] for run in entry["runs"]] == [True, False, False]
    assert entry["seconds"]["n"] == 2  # of the warm runs
    assert [run["cold_seconds"] is None for run in entry["runs"]] == [process_age() is None, True, True]
    assert [len(run["curve"]) for run in entry["runs"]] == [2, 2, 2]
    assert entry["passes"]["0.01"]["n"] == 2
    assert entry["passes"]["1"] is None
    with Image.open("out/p.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) >= 700
    shown = capsys.readouterr().out
    assert "small seed 2 (3 of 3)" in shown
    assert "small first passes 100.00 %: never" in shown
    assert "share one process" in shown
    assert "train loss" not in shown
    assert sorted(path.name for path in Path().rglob("*") if path.is_file()) == ["f.json", "p.png", "small.yaml"]


def test_a_seed_gives_in_company_what_it_gives_alone() -> None:
    with images_held():
        together = [run_once("small.yaml", [], seed, None, None, False) for seed in (5, 6)]
    alone = run_once("small.yaml", [], 6, None, None, False)
    assert together[1]["loss"] == alone["loss"] != together[0]["loss"]
    assert together[1]["accuracy"] == alone["accuracy"]


@pytest.mark.parametrize("words", [[], AVERAGED])
def test_looking_at_the_test_images_on_the_way_changes_no_bit_of_the_weights(words: list[str]) -> None:
    words = ["--net", "shapenet", "--data.val_size", "0", *words]  # it has batch norms
    plain = run_once("small.yaml", words, 1, "plain", None, False)
    looked = run_once("small.yaml", words, 1, "looked", 2, False)
    before, after = (load_file(f"{logs}/small-1/model.safetensors") for logs in ("plain", "looked"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert plain["curve"] is None
    # 200 images in batches of 32 are 7 steps an epoch: every second step, and the ends of both epochs
    assert [step for step, _, _ in looked["curve"]] == [2, 4, 6, 7, 8, 10, 12, 14]
    assert looked["curve"][-1][2] == looked["accuracy"]  # of the averaged weights where there is an average
    seconds = [second for _, second, _ in looked["curve"]]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= looked["seconds"]


def test_the_time_of_looking_is_not_charged_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, real = [0.0], time.perf_counter

    def slow(*words: Any) -> float:
        looked[0] += 1000  # seconds that pass meanwhile
        return accuracy_of(*words)

    monkeypatch.setattr(curve, "accuracy_of", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: real() + looked[0])
    run = run_once("small.yaml", ["--data.val_size", "0"], 1, None, 0, False)
    assert looked == [2000]
    assert run["seconds"] < 1000
    assert run["curve"][1][1] < 1000
    assert run["images_per_second"] > 400 / 1000


def test_looking_draws_no_number_and_turns_nothing_on() -> None:
    model = ImageClassifier("shapenet", [3, 16, 16], 4)
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)).eval()
    modes = [module.training for module in model.modules()]
    trainer: Any = SimpleNamespace(callbacks=[])
    before = torch.get_rng_state()
    with undisturbed(trainer, model):
        assert not any(module.training for module in model.modules())
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert not frozen.training


def test_a_measurement_that_was_killed_goes_on_with_the_seeds_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["small.yaml", "--runs", "4", "--json", "f.json", "--epochs", "1"]
    made: list[int] = []
    monkeypatch.setattr(recipe, "run_once", stopping_at(2, KeyboardInterrupt(), made))
    with pytest.raises(KeyboardInterrupt):
        recipe.main(words)
    assert not Path("f.json").exists()
    partial = Path("f.json.partial.jsonl")
    with partial.open("a") as lines:
        lines.write('{"recipe": "small", "run": {"se')  # killed while writing the third
    monkeypatch.setattr(recipe, "run_once", stopping_at(9, KeyboardInterrupt(), made))
    recipe.main(words)
    assert made == [0, 1, 2, 3]
    assert "2 runs are done already (in f.json.partial.jsonl); 2 to go" in capsys.readouterr().out
    runs = json.loads(Path("f.json").read_text())["recipes"]["small"]["runs"]
    assert [run["seed"] for run in runs] == [0, 1, 2, 3]
    assert [run["first"] for run in runs] == [True, False, True, False]
    assert not partial.exists()
    recipe.main([*words, "--runs", "5"])
    assert made == [0, 1, 2, 3, 4]


def test_a_measurement_without_a_file_goes_on_too_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    words = ["small.yaml", "--runs", "2", "--epochs", "1", "--logs", "logs"]
    monkeypatch.setattr(recipe, "run_once", stopping_at(1, Interrupted(signal.SIGTERM), made))
    with pytest.raises(Interrupted) as stopped:
        recipe.main(words)
    assert str(stopped.value.resume).endswith("bench recipe small.yaml --runs 2 --epochs 1 --logs logs")
    monkeypatch.setattr(recipe, "run_once", stopping_at(9, KeyboardInterrupt(), made))
    recipe.main(words)
    assert made == [0, 1]
    assert sorted(path.name for path in Path("logs").iterdir()) == ["small-1", "small-2"]


@pytest.mark.parametrize(
    ("words", "differs"),
    [
        (["small.yaml", "--epochs", "2"], "other flags"),
        (["small.yaml", "--curve"], "other curve"),
        (["quickstart"], "holds runs of small, which is not measured"),
    ],
)
def test_runs_of_other_settings_are_not_mixed(words: list[str], differs: str) -> None:
    recipe.main(["small.yaml", "--runs", "1", "--epochs", "1", "--json", "f.json"])
    if "--curve" in words:
        words = [*words, "--epochs", "1"]
    before = Path("f.json").read_bytes()
    with pytest.raises(UsageError, match=differs):
        recipe.main([*words, "--json", "f.json"])
    assert Path("f.json").read_bytes() == before


def test_two_processes_do_not_write_the_same_measurement() -> None:
    first = Records(Path("f.json"), Path("logs"), {"small": {}})
    with pytest.raises(Failure, match="another process is writing"):
        Records(Path("f.json"), Path("logs"), {"small": {}})
    first.release()
    Records(Path("f.json"), Path("logs"), {"small": {}}).release()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "which recipe"),
        (["quickstrat"], "Did you mean quickstart"),
        (["quickstart", "--rusn", "3"], "Did you mean --runs"),
        (["quickstart", "--runs", "0"], "--runs must be at least 1"),
        (["quickstart", "--runs", "many"], "invalid int"),
        (["quickstart", "--seed", "1"], "--seed0 and --runs"),
        (["quickstart", "small.yaml", "./small.yaml"], "called alike"),
        (["quickstart", "--devices", "2"], "one device"),
        (["quickstart", "--plot", "p.jpg"], "FILE.png"),
        (["quickstart", "--passes", "53.7"], "fractions"),
        (["quickstart", "--curve-every", "0"], "at least 1 step"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(words: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        recipe.main(words)
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]


def test_a_file_with_something_else_is_left_alone() -> None:
    Path("f.json").write_text('{"bench": "step"}')
    with pytest.raises(UsageError, match="holds no figures of `bench recipe`"):
        recipe.main(["small.yaml", "--json", "f.json"])
    assert Path("f.json").read_text() == '{"bench": "step"}'


def test_images_are_loaded_once_while_they_are_held_and_afresh_afterwards() -> None:
    settings = SourceSettings(image_size=16, count=20)
    with images_held():
        first = load_images("shapes", settings, True)
        assert load_images("shapes", settings, True) is first
        assert load_images("shapes", settings, False) is not first
    assert load_images("shapes", settings, True) is not first


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (39, 2.0227), (199, 1.9720)],
)
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-5)


def test_an_interval_is_mean_plus_and_minus_t_standard_errors() -> None:
    found = mean_interval([0.90, 0.92, 0.94])
    assert (found["n"], found["mean"], found["std"]) == (3, pytest.approx(0.92), pytest.approx(0.02))
    assert found["high"] - found["mean"] == pytest.approx(4.30265 * 0.02 / 3**0.5, rel=1e-5)
    assert found["mean"] - found["low"] == pytest.approx(found["high"] - found["mean"])
    assert mean_interval([0.9]) == {"n": 1, "mean": 0.9, "std": None, "low": None, "high": None}


def made_up(seed: int, accuracy: float, seconds: float, first: bool = False) -> dict[str, Any]:
    """A run as `run_once` returns it; its curve is at half the accuracy after half the time."""
    return {
        "seed": seed, "dataset": "shapes", "accelerator": "cpu", "precision": "32-true", "parameters": 10,
        "accuracy": accuracy, "loss": 1.0, "views": {"views": "mirror", "accuracy": accuracy + 0.01, "loss": 0.9},
        "seconds": seconds, "images_per_second": 100.0, "cold_seconds": 9.0 if first else None, "memory_mb": 100 + seed,
        "device_memory_mb": None, "first": first, "curve": [[1, seconds / 2, accuracy / 2], [2, seconds, accuracy]],
    }  # fmt: skip


def test_accuracy_counts_all_runs_and_time_the_warm_ones() -> None:
    runs = [made_up(0, 0.8, 50.0, first=True), made_up(1, 0.9, 10.0), made_up(2, 0.7, 20.0)]
    found = summary(runs, passes=[0.4])
    assert (found["accuracy"]["n"], found["accuracy"]["mean"]) == (3, pytest.approx(0.8))
    assert (found["views"]["views"], found["views"]["mean"]) == ("mirror", pytest.approx(0.81))
    assert (found["seconds"]["n"], found["seconds"]["median"]) == (2, 15.0)
    assert (found["cold_seconds"]["n"], found["cold_seconds"]["median"]) == (1, 9.0)
    assert found["memory_mb"] == 102
    assert found["passes"]["0.4"]["median"] == 12.5  # after 5 s, and after 20 s
    alone = summary(runs[:1])
    assert (alone["warm"], alone["seconds"]["median"]) == (False, 50.0)
    assert line_of(runs) == ([7.5, 15.0], [pytest.approx(40), pytest.approx(80)], [35, 70], [45, 90])


def test_the_first_pass_is_the_first_point_at_or_above() -> None:
    points = [[1, 0.5, 0.3], [2, 1.0, 0.6], [3, 1.5, 0.5]]
    assert [first_pass(points, threshold) for threshold in (0.3, 0.31, 0.6, 0.61)] == [0.5, 1.0, 1.0, None]
