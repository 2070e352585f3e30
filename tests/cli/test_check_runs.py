"""`cifar-lit check`: honest runs pass, and each forgery is named."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.command_line import (
    NO_SHAPES,
    RECIPE,
    SMALL,
    assert_refused,
    config_of,
    contents_of,
    draw_folder,
    metrics_of,
    rows_of,
    run_command,
)

from cifar_lit.cli import check_runs
from cifar_lit.cli.check_runs import Verdict, check_run, repeat_first_steps
from cifar_lit.runs.compare import read_run

LEARNS = {"net": "fashion_cnn", "model.optimizer": "adamw", "model.optimizer_options": "null", "lr": "3e-3"}
SHAPES = (*(f"--{name}={value}" for name, value in LEARNS.items()), "--data.count=400", "--epochs=12")
PHOTOS = ("--dataset", "folder", *NO_SHAPES, "--data-dir", "photos", "--data.val_size", "0", "--epochs", "3")
TUNED = (*PHOTOS, "--finetune.weights", "runs/photos-1")
RUNS = {
    "shapes": SHAPES,
    "seed5": (*SHAPES, "--seed", "5"),
    "photos": PHOTOS,
    "leaky": (*PHOTOS, "--data-dir", "leaky"),  # with the test images in the training folder
    "tuned": (*TUNED, "--data.val_size", "6", "--precision", "bf16-mixed"),
    "head": (*TUNED, "--finetune.unfreeze", "false"),
}


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with honest runs, their photos, and a run on a folder with copied test images."""
    folder = tmp_path_factory.mktemp("handed-in")
    with chdir(folder):
        draw_folder(Path("photos"), {"train/cat": 12, "train/dog": 12, "test/cat": 12, "test/dog": 12})
        shutil.copytree("photos", "leaky")
        for image in Path("photos/test").glob("*/*"):
            shutil.copy(image, f"leaky/train/{image.parent.name}/test-{image.name}")
        for name, words in RUNS.items():
            Path(f"{name}.yaml").write_text(RECIPE)
            answer = run_command("--recipe", f"{name}.yaml", "--logs", "runs", *words)
            assert answer.code == 0, answer.err
        Path("small.yaml").write_text(RECIPE)
        assert run_command("fit", *SMALL, "--logs", "runs").code == 0
    return folder


@pytest.fixture
def run(handed_in: Path, working_folder: Path) -> Path:
    """Return a copy of the run on shapes, in the working folder."""
    return Path(shutil.copytree(handed_in / "runs/shapes-1", "shapes-1"))


@pytest.fixture
def photos(handed_in: Path, working_folder: Path) -> Path:
    """Return a copy of the run on photos, in the working folder with its photos."""
    shutil.copytree(handed_in / "photos", "photos")
    return Path(shutil.copytree(handed_in / "runs/photos-1", "photos-1"))


def checked(*words: object) -> dict[str, dict[str, str]]:
    """Return the rows of the table by run, after a check of the exit code."""
    answer = run_command("check", *words, "--table", "-")
    rows = {row["run"]: row for row in csv.DictReader(io.StringIO(answer.out))}
    assert rows, answer.err
    assert answer.code == int(any(row["verdict"] != "ok" for row in rows.values()))
    return rows


def verdict_of(run: Path, *words: object) -> tuple[str, str]:
    """Return verdict and reason of a run."""
    (row,) = checked(run, *words).values()
    return row["verdict"], row["reason"]


def edit_metrics(run: Path, test: dict[str, Any] | None = None, **changes: Any) -> None:
    metrics = metrics_of(run)
    metrics["test"].update(test or {})
    (run / "metrics.json").write_text(json.dumps({**metrics, **changes}))


def edit_config(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = config_of(run)
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def edit_predictions(run: Path, change: Callable[[list[dict[str, str]]], object]) -> None:
    rows = rows_of(run / "predictions.csv")
    change(rows)
    with (run / "predictions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def first_loss(run: Path) -> tuple[int, float]:
    row = next(row for row in rows_of(run / "metrics.csv") if row["train/loss"])
    return int(row["step"]), float(row["train/loss"])


# ---- honest runs


def test_an_honest_run_passes_and_is_left_as_it_was(run: Path) -> None:
    before = contents_of(run)
    accuracy = metrics_of(run)["test"]["accuracy"]
    assert 0.3 < accuracy < 0.9
    assert checked(run)["shapes-1"] == {
        "run": "shapes-1", "verdict": "ok", "accuracy": f"{accuracy:.4f}", "again": f"{accuracy:.4f}",
        "reason": f"the loss of the first {first_loss(run)[0]} steps is repeated exactly",
    }  # fmt: skip
    assert contents_of(run) == before and not Path("lightning_logs").exists()


@pytest.mark.slow
def test_honest_runs_on_photos_pass_with_moved_data_and_when_fine_tuned(handed_in: Path, working_folder: Path) -> None:
    shutil.copytree(handed_in / "photos", "elsewhere")
    shutil.copytree(handed_in / "runs", "runs")  # the weights that fine-tuning starts from
    rows = checked("runs/photos-1", "runs/tuned-1", "runs/head-1", "--data-dir", "elsewhere")
    assert {row["verdict"] for row in rows.values()} == {"ok"}, rows
    assert rows["runs/head-1"]["reason"] == "only the last layer was fitted, without steps to repeat"
    for name in ("runs/photos-1", "runs/tuned-1"):
        assert "is repeated exactly" in rows[name]["reason"]
    verdict, reason = verdict_of(Path("runs/photos-1"))
    assert verdict == "unchecked" and reason.startswith("photos does not exist: --data-dir must name a folder with")


# ---- results that the weights do not have


def test_an_edited_accuracy_contradicts_predictions_and_weights(run: Path) -> None:
    accuracy = metrics_of(run)["test"]["accuracy"]
    edit_metrics(run, {"accuracy": 0.99})
    assert verdict_of(run) == (
        "fails",
        f"metrics.json has accuracy 0.9900, but predictions.csv has {accuracy:.4f}; "
        f"metrics.json has accuracy 0.9900, the weights reach {accuracy:.4f}",
    )


def test_edited_predictions_contradict_the_weights(run: Path) -> None:
    def improve(rows: list[dict[str, str]]) -> None:
        for row in [row for row in rows if row["label"] != row["predicted"]][:20]:
            row["predicted"] = row["label"]
            row["probability"] = row[f"probability_{row['label']}"]

    test = metrics_of(run)["test"]
    edit_predictions(run, improve)
    edit_metrics(run, {"accuracy": test["accuracy"] + 20 / test["images"]})
    verdict, reason = verdict_of(run)
    assert verdict == "fails" and "predictions in predictions.csv: other weights were tested" in reason
    assert reason.endswith(f"the weights reach {test['accuracy']:.4f}")


def test_an_edited_probability_contradicts_the_weights(run: Path) -> None:
    edit_predictions(run, lambda rows: rows[3].update(probability=f"{float(rows[3]['probability']) - 0.2:.6f}"))
    line = "model.safetensors contradicts 1 of 80 predictions in predictions.csv: other weights were tested"
    assert verdict_of(run) == ("fails", line)


def test_weights_of_another_run_or_net_are_named(run: Path, photos: Path, handed_in: Path) -> None:
    shutil.copy(handed_in / "runs/seed5-1/model.safetensors", run)
    verdict, reason = verdict_of(run)
    assert verdict == "fails" and "model.safetensors contradicts " in reason
    edit_config(photos, lambda config: config["model"].update(net="resnet18"))
    edit_metrics(photos, net="resnet18")
    assert verdict_of(photos) == ("fails", "model.safetensors holds another net (lenet) than metrics.json says")


# ---- other data and settings


def test_another_split_or_setting_is_named(run: Path) -> None:
    edit_config(run, lambda config: config["data"].update(val_size=50))
    line = "the run used another split than these data have (360 training images then, 350 now)"
    assert verdict_of(run) == ("fails", line)
    edit_config(run, lambda config: config.update(seed_everything=9, recipe="fast94"))
    assert verdict_of(run)[1].startswith(
        "config.yaml has seed_everything 9, metrics.json has seed 3; "
        "config.yaml has recipe fast94, metrics.json has recipe shapes; "
    )


def test_test_images_in_the_training_are_counted(handed_in: Path, working_folder: Path) -> None:
    with chdir(handed_in):
        assert verdict_of(Path("runs/leaky-1")) == ("fails", "24 of 24 test images are also training images")
        # The photos that the teacher handed out have no copies.
        line = "the run used other images than these data have (48 training images then, 24 now)"
        assert verdict_of(Path("runs/leaky-1"), "--data-dir", "photos") == ("fails", line)


def test_other_labels_and_other_test_images_are_named(photos: Path) -> None:
    edit_metrics(photos, {"fingerprint": "0" * 64})
    assert verdict_of(photos) == ("fails", "the run was tested on other images than these data have")
    Path("photos/train/cat/3.png").rename("photos/train/dog/cat-3.png")
    line = "the run used other labels than these data have (24 training images then, 24 now); "
    assert verdict_of(photos)[1].startswith(line)


# ---- the first steps


@pytest.mark.slow
def test_another_seed_and_a_loss_that_was_never_logged_are_named(run: Path, handed_in: Path) -> None:
    forged = Path(shutil.copytree(handed_in / "runs/seed5-1", "seed5-1"))
    edit_config(forged, lambda config: config.update(seed_everything=0))
    edit_metrics(forged, seed=0)
    step, _ = first_loss(run)
    curve = (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text(curve.replace(f"0,{step},", f"0,{step - 1},", 1))
    rows = checked(forged, run)
    assert {row["verdict"] for row in rows.values()} == {"fails"}
    assert "from this seed, not" in rows["seed5-1"]["reason"]
    line = f"the training ends without a loss at step {step - 1}, the first one in metrics.csv"
    assert rows["shapes-1"]["reason"] == line


def test_a_repetition_that_takes_too_long_is_stopped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_runs, "SECONDS", 0.2)
    assert verdict_of(run) == ("unchecked", f"step {first_loss(run)[0]} was not reached again within 0.2 s")


@pytest.mark.parametrize(
    ("recorded", "settings", "factor", "word"),
    [
        ({}, {}, 1.0, "ok"),
        ({}, {}, 1.0001, "fails"),
        ({"processor": "another"}, {}, 1.01, "ok"),
        ({"processor": "another"}, {}, 1.03, "fails"),
        ({"processor": "another"}, {}, 0.97, "fails"),
        ({"versions": {"torch": "1.0"}}, {}, 1.01, "ok"),
        ({}, {"threads": 1000}, 1.01, "ok"),  # more than this machine has
        ({}, {"threads": "1 --trust"}, 1.01, "ok"),
        ({}, {"trainer.num_nodes": 2}, 1.01, "ok"),
        ({"accelerator": "gpu"}, {}, 1.01, "ok"),  # kernels of a GPU need not repeat their bits
        ({"accelerator": "gpu"}, {"trainer.deterministic": True}, 1.01, "fails"),
    ],
)
def test_bits_are_compared_on_the_same_machine_and_a_bound_holds_on_others(
    run: Path, recorded: Any, settings: Any, factor: float, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, given = read_run(run), list[str]()
    record.metrics.update(recorded)
    record.settings.update(settings)
    loss = factor * first_loss(run)[1]
    monkeypatch.setattr(check_runs, "_loss_of_training", lambda _, words, step: given.extend(words) or loss)
    verdict = Verdict("a run")
    repeat_first_steps(record, "elsewhere", False, verdict)
    assert verdict.word == word, verdict
    machine = list(check_runs.ANY_MACHINE)
    if recorded.keys() <= {"accelerator"} and settings.keys() <= {"trainer.deterministic"}:
        machine = ["--threads=1"]
    assert given == [*machine, "--data-dir=elsewhere"]


@pytest.mark.slow
def test_a_run_from_a_gpu_is_repeated_on_a_machine_without_one(run: Path) -> None:
    edit_metrics(run, accelerator="gpu", processor="a GPU")
    machine = {"accelerator": "gpu", "devices": 64, "num_nodes": 4, "precision": "16-mixed"}
    own = {"threads": 1000, "logger": "wandb"}
    edit_config(run, lambda config: (config["trainer"].update(machine), config.update(own)))
    verdict, reason = verdict_of(run, "--trust")
    assert verdict == "ok" and reason.startswith(f"the loss of the first {first_loss(run)[0]} steps is ")


# ---- damaged runs, and runs of strangers


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 3),
    "numbers": lambda file: file.write_text("[1, 2]"),
    "a link": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_never_passes(run: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = first_loss(run)[1]
    monkeypatch.setattr(check_runs, "_loss_of_training", lambda *_: loss)
    for name in ("config.yaml", "metrics.json", "metrics.csv", "predictions.csv", "model.safetensors"):
        content = (run / name).read_bytes()
        DAMAGES[damage](run / name)
        verdict = check_run(run, None, trust=False)
        is_readable = (damage, name) == ("cut", "metrics.csv")  # its first row is complete
        assert (verdict.word == "ok") == is_readable, (name, verdict)
        (run / name).unlink(missing_ok=True)
        (run / name).write_bytes(content)
    assert check_run(run, None, trust=False).word == "ok"


def test_a_run_without_a_test_has_no_results(handed_in: Path, working_folder: Path) -> None:
    Path("empty").mkdir()
    rows = checked(handed_in / "runs/small-1", "empty")
    assert [(row["verdict"], row["reason"]) for row in rows.values()] == [
        ("fails", "no results to check: no test"),
        ("fails", "no results to check: broken: neither config.yaml nor metrics.json"),
    ]
    assert_refused(run_command("check", "nowhere-*"), 2, "there is no nowhere-*: name run folders")


@pytest.mark.parametrize(
    ("group", "setting", "value", "named"),
    [
        ("model", "optimizer", "evil.SGD", "evil.SGD"),
        pytest.param("trainer", "callbacks", [{"class_path": "evil.SGD"}], "evil.SGD", marks=pytest.mark.slow),
        ("data", "dataset", "evil.SGD", "evil.SGD"),
        ("data", "labels", "/usr/labels.csv", "data.labels to '/usr/labels.csv'"),
        ("data", "cache_dir", "/usr/cache", "data.cache_dir to '/usr/cache'"),
    ],
)
def test_nothing_in_the_run_of_a_stranger_is_executed(
    photos: Path, group: str, setting: str, value: object, named: str
) -> None:
    Path("evil.py").write_text("from pathlib import Path\nPath('executed').touch()\nfrom torch.optim import SGD\n")
    edit_config(photos, lambda config: config[group].update({setting: value}))
    # In a command line, this precision would be a setting that the user has typed.
    edit_metrics(photos, precision=f"{{{setting}: {value}}}", **{setting: value})
    verdict, reason = verdict_of(photos)
    assert verdict == "unchecked" and named in reason
    assert not Path("executed").exists()


# ---- the table


def test_a_table_for_a_class_has_a_row_for_each_run(run: Path, handed_in: Path) -> None:
    run.rename("=1+1")
    edit_metrics(Path("=1+1"), {"accuracy": 0.99})
    answer = run_command("check", "=1+1", handed_in / "runs/small-1", "--table", "class.csv")
    assert answer.code == 1
    assert answer.err == f"=1+1: fails\n{handed_in}/runs/small-1: fails\n"
    assert "verdict" in answer.out and "0.9900" in answer.out
    first, second = rows_of(Path("class.csv"))
    assert (first["run"], first["verdict"], first["accuracy"]) == ("'=1+1", "fails", "0.9900")
    assert second["accuracy"] == second["again"] == ""
