"""The files of lightning_logs/<recipe>-<number>/ and the keys of metrics.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors
import torch
from run.test_schema import errors
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_lit.inference.model_file import load_model_file
from cifar_lit.training.score import METRICS, RESERVED, BuiltIn

from .command_line import SMALL, checkpoint_of, config_of, files_of, metrics_of, rows_of, run_command

FILES = {
    "config.yaml", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "model.safetensors", "metrics.json", "metrics.csv",
    "predictions.csv", "probabilities.npy", "report.html", "events.out.tfevents.*", "curves.png",
    "confusion_matrix.png",
}  # fmt: skip
CLASSES = ["circle", "square", "triangle", "star"]
KEYS = {
    "recipe", "net", "dataset", "seed", "epochs", "accelerator", "devices", "precision", "batch_size", "parameters",
    "train_seconds", "images_per_second", "test_seconds", "val", "test", "tested", "changes", "versions", "date",
}  # fmt: skip


def test_a_run_folder_holds_exactly_these_files(run_dir: Path) -> None:
    assert files_of(run_dir) == FILES
    assert (run_dir / "model.safetensors").stat().st_mode == (run_dir / "metrics.json").stat().st_mode


# ---- config.yaml, checkpoints/


def test_config_yaml_reproduces_scores_weights_and_model_safetensors_exactly(
    run_dir: Path, same_run_again: Path
) -> None:
    first, second = metrics_of(run_dir), metrics_of(same_run_again)
    assert (first["val"], first["test"]) == (second["val"], second["test"])
    last, again = (checkpoint_of(run / "checkpoints/last.ckpt")["state_dict"] for run in (run_dir, same_run_again))
    assert last.keys() == again.keys()
    assert all(torch.equal(last[name], again[name]) for name in last)
    assert (run_dir / "model.safetensors").read_bytes() == (same_run_again / "model.safetensors").read_bytes()


def test_checkpoints_are_lightnings_and_best_is_of_the_epoch_with_the_best_validation_accuracy(run_dir: Path) -> None:
    best, last = (checkpoint_of(run_dir / f"checkpoints/{name}.ckpt") for name in ("best", "last"))
    for checkpoint in (best, last):
        assert {"pytorch-lightning_version", "state_dict", "optimizer_states", "hyper_parameters"} <= checkpoint.keys()
    epochs = [row for row in rows_of(run_dir / "metrics.csv") if row["val/accuracy"]]
    row = max(epochs, key=lambda row: float(row["val/accuracy"]))
    assert (best["epoch"], last["epoch"]) == (int(row["epoch"]), 1)
    tested = {"checkpoint": "best.ckpt", "epoch": best["epoch"] + 1, "step": best["global_step"]}
    assert metrics_of(run_dir)["tested"] == tested
    val = metrics_of(run_dir)["val"]
    for name in ("accuracy", "loss"):
        assert val[name] == pytest.approx(float(row[f"val/{name}"]), abs=1e-5)


# ---- model.safetensors


def test_model_safetensors_holds_metadata_and_the_weights_of_the_best_checkpoint(run_dir: Path) -> None:
    with safetensors.safe_open(run_dir / "model.safetensors", "pt") as file:
        metadata = " ".join(f"{name} {value}" for name, value in file.metadata().items())
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    images = config_of(run_dir)["data"]["images"]
    for fact in ("lenet", *CLASSES, "16", "3"):
        assert re.search(rf"\b{fact}\b", metadata), fact
    for value in (*images["mean"], *images["std"]):
        assert str(value) in metadata
    best = checkpoint_of(run_dir / "checkpoints/best.ckpt")["state_dict"].values()
    trained = [tensor for tensor in best if tensor.dim() > 1]  # filters and matrices
    assert trained
    for tensor in trained:
        assert any(tensor.shape == other.shape and torch.equal(tensor, other) for other in tensors)


# ---- metrics.json and predictions.csv


def refuse_constant(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_metrics_json_describes_the_run(run_dir: Path) -> None:
    metrics = json.loads((run_dir / "metrics.json").read_text(), parse_constant=refuse_constant)
    assert metrics.keys() >= KEYS
    assert metrics["val"].keys() >= {"accuracy", "loss"}
    assert metrics["test"].keys() >= {"accuracy", "loss", "images", "per_class"}
    facts = {
        "recipe": "small", "net": "lenet", "dataset": "shapes", "seed": 3, "epochs": 2, "accelerator": "cpu",
        "devices": 1, "precision": "32-true", "batch_size": 32,
    }  # fmt: skip
    assert {name: metrics[name] for name in facts} == facts
    numbers = [tensor.numel() for tensor in checkpoint_of(run_dir / "checkpoints/last.ckpt")["state_dict"].values()]
    assert 0 < metrics["parameters"] <= sum(numbers)
    assert torch.__version__.startswith(metrics["versions"]["torch"])
    assert "lightning" in metrics["versions"]
    images = metrics["images_per_second"] * metrics["train_seconds"]
    assert images > 1.001 * 2 * 160  # train_seconds includes validation, the rate does not
    assert metrics["test_seconds"] > 0


def test_accuracies_are_consistent_fractions_and_losses_are_means_over_images(run_dir: Path) -> None:
    test, rows = metrics_of(run_dir)["test"], rows_of(run_dir / "predictions.csv")
    assert list(rows[0]) == ["index", "label", "predicted", "probability", *(f"probability_{name}" for name in CLASSES)]
    assert [int(row["index"]) for row in rows] == list(range(40))
    assert test["images"] == 40
    assert test["accuracy"] == pytest.approx(sum(row["label"] == row["predicted"] for row in rows) / 40)
    assert list(test["per_class"]) == CLASSES
    for name, accuracy in test["per_class"].items():
        of_class = [row for row in rows if row["label"] == name]
        assert accuracy == pytest.approx(sum(row["predicted"] == name for row in of_class) / len(of_class))
    assert 0.5 < test["loss"] < 3  # ln 4 = 1.39 before training; a sum over images would be 55


# ---- metrics.csv and TensorBoard


def test_metrics_csv_and_tensorboard_hold_the_same_curves_and_tensorboard_settings_and_images(run_dir: Path) -> None:
    rows, events = rows_of(run_dir / "metrics.csv"), EventAccumulator(str(run_dir))
    events.Reload()
    for name in ("train/loss", "train/accuracy", "val/loss", "val/accuracy", "lr", "test/loss", "test/accuracy"):
        points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        steps = [5, 10]  # one per epoch
        if name.startswith("test/"):
            steps = [metrics_of(run_dir)["tested"]["step"]]
        assert [step for step, _ in points] == steps, name
        assert [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)] == points, name
    assert len([*run_dir.glob("events*")]) == 1
    assert points[-1][1] == pytest.approx(metrics_of(run_dir)["test"]["accuracy"])
    assert events.Tags()["images"]
    settings = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for fact in (b"lenet", b"shapes", b"small"):
        assert fact in settings


# ---- validate and test


@pytest.mark.parametrize(("command", "part", "other"), [("test", "test", "val"), ("validate", "val", "test")])
def test_validate_and_test_create_a_run_folder(run_dir: Path, command: str, part: str, other: str) -> None:
    answer = run_command(command, "--ckpt_path", run_dir / "checkpoints/best.ckpt")
    assert (answer.code, answer.err) == (0, "")
    new_run = Path("lightning_logs/small-1")
    assert {"config.yaml", "metrics.json"} <= files_of(new_run)
    assert not {name for name in files_of(new_run) if name.endswith((".ckpt", ".safetensors"))}
    assert f"run {new_run}" in answer.lines
    metrics = metrics_of(new_run)
    assert errors(metrics) == []
    assert metrics[part]["accuracy"] == metrics_of(run_dir)[part]["accuracy"]
    assert metrics[part]["loss"] == pytest.approx(metrics_of(run_dir)[part]["loss"], abs=1e-5)
    assert metrics[other] is None
    assert config_of(new_run)["data"]["images"]["count"] == 200  # a setting of the evaluated run


def test_without_validation_images_the_last_checkpoint_is_tested_and_there_is_no_best() -> None:
    answer = run_command(*SMALL, "--data.val_size", "0", "--epochs", "1")
    assert (answer.code, answer.err) == (0, "")
    run_dir = Path("lightning_logs/small-1")
    assert files_of(run_dir) == FILES - {"checkpoints/best.ckpt"}
    assert metrics_of(run_dir)["val"] is None
    assert load_model_file(run_dir).card.coverage  # from the test images
    assert checkpoint_of(run_dir / "checkpoints/last.ckpt")["global_step"] == 7  # batches of 32 from all 200 images
    assert run_command("test", "--ckpt_path", run_dir / "checkpoints/last.ckpt").code == 0
    assert metrics_of(Path("lightning_logs/small-2"))["test"]["loss"] == metrics_of(run_dir)["test"]["loss"]


def test_a_metric_is_one_line_of_a_table_and_reaches_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    error_rate = BuiltIn("error rate", "errors", lambda score: 1 - score.accuracy)
    monkeypatch.setitem(METRICS, "error_rate", error_rate)
    answer = run_command("--recipe", "small.yaml", "--epochs", "1", "--model.monitor", "error_rate")
    run = Path("lightning_logs/small-1")
    test = metrics_of(run)["test"]
    assert test["error_rate"] == 1 - test["accuracy"]
    assert f"error rate {test['error_rate']:.4f}" in answer.out
    assert "val/error_rate" in rows_of(run / "metrics.csv")[0]
    assert "test error rate" in (run / "report.html").read_text()
    tags = EventAccumulator(str(run)).Reload().Tags()["scalars"]
    assert {"val/error_rate", "test/error_rate"} <= {*tags}
    compared = run_command("compare", "lightning_logs").out
    assert "error" in compared
    assert {*test} - {*METRICS} <= {*RESERVED}
