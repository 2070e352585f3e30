"""Details of a training's files and output beyond the contract, and other ways to train."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.command_line import (
    OWN_IMAGES,
    ROOT,
    SMALL,
    Training,
    assert_refused,
    config_of,
    draw_folder,
    files_of,
    metrics_of,
    rows_of,
    run_command,
    run_process,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from torchmetrics.functional.classification import multiclass_calibration_error

import cifar_lit
from cifar_lit.cli.run_report import small_set_text
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.sources import SourceSettings
from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.models.tta import view_logits
from cifar_lit.runs.card import fit_temperature, held_out_scores, measured_coverage, novelty, reject_scores, threshold
from cifar_lit.runs.loggers import COLUMNS
from cifar_lit.stats import wilson_interval
from cifar_lit.training.checkpoint import read_checkpoint

NEW_RUN = Path("lightning_logs/small-1")  # the first run in the working folder
ONE_EPOCH = (*SMALL, "--epochs", "1")


def test_tensorboard_has_scalars_figures_and_image_galleries(run_dir: Path) -> None:
    assert tuple(rows_of(run_dir / "metrics.csv")[0]) == COLUMNS
    events = EventAccumulator(str(run_dir))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*COLUMNS[2:]}
    figures, galleries = ("confusion_matrix",), ("confident_mistakes", "doubtful_hits")
    parts = {*(f"val/{name}" for name in figures), *(f"test/{name}" for name in (*figures, *galleries))}
    assert set(events.Tags()["images"]) == {"images/train", *parts}
    (image,) = events.Images("test/confident_mistakes")
    assert (image.step, image.width, image.height) == (10, 720, 576)
    assert b"test/accuracy" in events.SummaryMetadata("_hparams_/experiment").plugin_data.content


def test_the_console_shows_the_start_card_epochs_interval_and_how_to_load_the_net(training: Training) -> None:
    card = dict(re.findall(r"^(\w+) {2,}(.*)$", training.answer.out, re.MULTILINE))
    assert card["data"] == "shapes · train 160 · validation 40 · 4 classes · 3×16×16 · in CPU memory"
    assert card["net"].startswith("lenet · ")
    assert (card["devices"], card["precision"], card["run"]) == ("1 × cpu", "float32", str(NEW_RUN))
    assert card["batch"].startswith("32 = 1 × 32 ")
    lines, test = training.answer.lines, metrics_of(training.run_dir)["test"]
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert "95 % interval of the accuracy {:.4f} … {:.4f}".format(*test["interval"]) in lines
    assert "macro F1" in training.answer.out
    assert "balanced accuracy" not in training.answer.out  # the classes have equal sizes
    program = "import cifar_lit; print(cifar_lit.load('lightning_logs/small-1'))"
    assert shlex.split(lines[-1]) == ["python", "-c", program]


def test_a_small_test_set_is_reported_for_photos_but_not_for_shapes(training: Training) -> None:
    assert "small test set" not in training.answer.out
    draw_folder(Path("photos"), {"cat": 12, "dog": 12})
    answer = run_command(*ONE_EPOCH, *OWN_IMAGES, "--data-dir", "photos", "--data.val_size", "4")
    assert answer.code == 0, answer.err
    assert "small test set: differences between runs below " in answer.out
    config = "lightning_logs/small-1/config.yaml"  # predictions of nets that were not trained on the images
    assert (
        f"  cifar-lit train --config {config} --folds 5   (then `cifar-lit review` shows wrong labels)" in answer.lines
    )
    assert " · 1 epoch · " in answer.out and " · 1 step per epoch" in answer.out


def test_a_test_set_is_small_if_half_of_its_interval_exceeds_two_points() -> None:
    for correct, images, margin in ((144, 153, "0.056"), (1200, 2500, None), (1100, 2300, "0.029")):
        interval = list(wilson_interval(correct, images))
        text = small_set_text({"accuracy": correct / images, "interval": interval, "images": images})
        assert f"below {margin} may be chance; --folds" in str(text) if margin else text is None


def test_model_monitor_selects_the_best_checkpoint() -> None:
    flags = (*SMALL, "--model.monitor", "loss", "--epochs", "4")
    assert run_command("fit", *flags).code == 0
    rows = [row for row in rows_of(NEW_RUN / "metrics.csv") if row["val/loss"]]
    best = min(rows, key=lambda row: float(row["val/loss"]))
    checkpoint = read_checkpoint(NEW_RUN / "checkpoints/best.ckpt")
    assert checkpoint["epoch"] == int(best["epoch"])
    assert metrics_of(NEW_RUN)["val"]["loss"] == pytest.approx(float(best["val/loss"]), abs=1e-6)
    assert config_of(NEW_RUN)["model"]["monitor"] == "loss"


def test_the_start_card_shows_unequal_classes_shown_equally_often() -> None:
    answer = run_command(*ONE_EPOCH, "--balanced", "--model.monitor", "macro_f1")
    assert answer.code == 0, answer.err
    assert re.search(r"^classes +\d+ … \d+ training images each · shown equally often$", answer.out, re.MULTILINE)
    assert re.search(r"val loss \S+ acc \S+ macro_f1 0\.\d{4} · ", answer.out)


def test_the_start_card_counts_optimizer_steps_and_epochs() -> None:
    words = ("--trainer.accumulate_grad_batches", "2", "--trainer.max_epochs", "null", "--trainer.max_steps", "8")
    answer = run_command("fit", *SMALL, *words, "--skip_easy.share", "0.5")
    assert answer.code == 0
    assert " · 3 steps per epoch" in answer.out and " · 3 epochs · " in answer.out
    assert "the easiest 50% of the images after 60% of the steps" in answer.out


def test_a_fast_dev_run_reports_its_batches_and_saves_nothing(run_dir: Path) -> None:
    for command, words, batches in (
        ("train", SMALL, "1 training batch and 1 validation batch"),
        ("predict", ("--ckpt_path", run_dir / "checkpoints/best.ckpt"), "1 prediction batch"),
    ):
        answer = run_command(command, *words, "--trainer.fast_dev_run", "true")
        assert answer.code == 0, answer.err
        assert answer.lines[-1] == f"fast_dev_run: {batches} without a failure; nothing was saved"
        assert not Path("lightning_logs").exists()


def test_a_callback_that_monitors_an_unknown_metric_is_refused_before_training() -> None:
    metric = "{auroc: {class_path: torchmetrics.classification.MulticlassAUROC, init_args: {num_classes: 4}}}"
    words = (*ONE_EPOCH, "--model.metrics", metric, "--trainer.callbacks")
    wrong = ("EarlyStopping", "auroc", "val/auroc"), ("ModelCheckpoint", "train_loss", "train/loss")
    for callback, monitor, suggestion in wrong:
        answer = run_command("fit", *words, callback, "--trainer.callbacks.monitor", monitor)
        assert_refused(answer, 2, f"{callback} monitors {monitor}, which is not logged. Did you mean {suggestion}?")
        assert not Path("lightning_logs").exists()
    custom_metric = ("EarlyStopping", "--trainer.callbacks.monitor", "val/auroc")
    rate = ("LearningRateMonitor", "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "lr-SGD/pg1")
    for valid in (custom_metric, (*rate, "--trainer.log_every_n_steps", "1")):
        assert run_command("fit", *words, *valid).code == 0


STRICT = [sys.executable, "-W", "error", "-m", "cifar_lit"]  # every warning is an error


@pytest.mark.slow
def test_a_run_prints_no_warnings_or_tips_except_the_table_of_a_profiler(working_folder: Path) -> None:
    answer = run_process([*STRICT, "train", *ONE_EPOCH, "--trainer.profiler", "simple"], working_folder)
    titles = [line for line in answer.err.splitlines() if line and not line.startswith(("|", "-"))]
    assert (answer.code, titles) == (0, ["FIT Profiler Report", "TEST Profiler Report"])
    assert "run_training_batch" in answer.err
    assert not re.search(r"warn|tip|💡|litlogger|GPU available|https?://", answer.out, re.IGNORECASE), answer.out


@pytest.mark.slow
def test_the_final_validation_of_fit_has_no_logger_and_prints_no_warning(working_folder: Path) -> None:
    answer = run_process([*STRICT, "fit", *ONE_EPOCH], working_folder)
    assert (answer.code, answer.err) == (0, "")


# ---- the trained net


def test_the_loaded_net_is_that_of_the_best_checkpoint(run_dir: Path, data: ImageData) -> None:
    loaded = cifar_lit.load(run_dir)
    images = data.test_images.images.permute(0, 3, 1, 2)
    net = build_net("lenet", channels=3, image_size=16, num_classes=4).eval()
    state = read_checkpoint(run_dir / "checkpoints/best.ckpt")["state_dict"]
    net.load_state_dict({name[4:]: tensor for name, tensor in state.items() if name.startswith("net.")})
    mean, std = (torch.tensor(config_of(run_dir)["data"][name]).view(-1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), net((images.float() / 255 - mean) / std))
    scores = novelty(loaded(data.train_images.images[data.split[1]].permute(0, 3, 1, 2)))
    assert loaded.card.reject == pytest.approx(reject_scores(scores), abs=1e-4)
    assert loaded.card.reject is not None
    assert 1 <= int(scores.gt(threshold(loaded.card.reject, 0.05)).sum()) <= 4  # 5 % of 40 validation images


def test_prediction_sets_rest_on_the_validation_images_and_are_measured_on_the_test_images(
    run_dir: Path, data: ImageData
) -> None:
    loaded, measured = cifar_lit.load(run_dir), metrics_of(run_dir)["test"]["coverage"]
    val, labels = data.split[1], data.test_images.labels
    probabilities = loaded.net.probabilities(loaded(data.train_images.images[val].permute(0, 3, 1, 2)))
    expected = held_out_scores(probabilities.double(), data.train_images.labels[val])
    for kind, scores in (loaded.card.coverage or {}).items():
        for own, of_class in zip(scores, expected[kind], strict=True):
            assert own == pytest.approx(of_class, abs=1e-4)
    assert [result["coverage"] for result in measured] == [0.8, 0.9, 0.95]  # 40 images
    page = (run_dir / "report.html").read_text()
    assert "The limits come from the validation images." in page
    for result in measured:
        predictions = loaded.predict(data.test_images.images.numpy(), coverage=result["coverage"])
        sets = [prediction.prediction_set for prediction in predictions]
        hits = [data.classes[label] in names for label, names in zip(labels.tolist(), sets, strict=True)]
        assert result["measured"] == pytest.approx(sum(hits) / len(hits))
        size = sum(map(len, sets)) / len(sets)
        assert result["set_size"] == pytest.approx(size)
        assert f"<td>{100 * sum(hits) / len(hits):.1f} % · {size:.2f}</td>" in page


def test_the_calibration_error_is_reported_with_and_without_temperature(run_dir: Path, data: ImageData) -> None:
    loaded, calibration = cifar_lit.load(run_dir), metrics_of(run_dir)["test"]["calibration"]
    val = data.split[1]
    logits = loaded(data.train_images.images[val].permute(0, 3, 1, 2))
    assert calibration["temperature"] == loaded.card.temperature
    assert calibration["temperature"] == pytest.approx(fit_temperature(logits, data.train_images.labels[val]), rel=1e-4)
    images, labels = data.test_images.images.permute(0, 3, 1, 2), data.test_images.labels
    tops = [dict(prediction.top) for prediction in loaded.predict_batch(images, 4)]
    tempered = torch.tensor([[top[name] for name in loaded.classes] for top in tops])
    for name, probabilities in (("error", loaded(images).softmax(1)), ("tempered_error", tempered)):
        expected = multiclass_calibration_error(probabilities, labels, 4, n_bins=15)
        assert calibration[name] == pytest.approx(float(expected), abs=1e-4), name
    page = (run_dir / "report.html").read_text()
    assert f"After temperature scaling (T = {calibration['temperature']:.2f}, " in page
    assert f"{calibration['tempered_error']:.3f}" in page


def test_without_validation_images_the_recipe_gives_the_temperature_and_test_images_the_reject_scores(
    working_folder: Path,
) -> None:
    losses = []
    for number, words in enumerate(((), ("--model.temperature", "0.5")), 1):
        assert run_command(*ONE_EPOCH, "--data.val_size", "0", *words).code == 0
        run = Path(f"lightning_logs/small-{number}")
        test, loaded = metrics_of(run)["test"], cifar_lit.load(run)
        losses.append(test["loss"])
        page, calibration = (run / "report.html").read_text(), test["calibration"]
        if not words:
            assert (calibration["temperature"], calibration["tempered_error"]) == (None, None)
            assert loaded.card.temperature is None and "There is no temperature" in page
            images = ImageData(**config_of(run)["data"]).test_images.images.permute(0, 3, 1, 2)
            assert loaded.card.reject == pytest.approx(reject_scores(novelty(loaded(images))), abs=1e-4)
            assert [sum(map(len, scores)) for scores in loaded.card.coverage.values()] == [len(images)] * 2
            assert "The limits come from the other half of the test images." in page
            probabilities = torch.from_numpy(np.load(run / "probabilities.npy")).double()
            data = ImageData(**config_of(run)["data"])
            halves = measured_coverage(probabilities, data.test_images.labels, None, data.classes)
            assert [result["coverage"] for result in test["coverage"]] == [0.8, 0.9, 0.95]  # halves of 20
            assert [result["measured"] for result in test["coverage"]] == [result["measured"] for result in halves]
    assert losses[0] == losses[1]  # losses are without it
    assert loaded.card.temperature == calibration["temperature"] == 0.5
    assert calibration["tempered_error"] != calibration["error"] > 0
    assert "(T = 0.50, from model.temperature)" in page
    answer = run_command("test", "--config", NEW_RUN / "config.yaml", "--ckpt_path", NEW_RUN / "checkpoints/last.ckpt")
    assert answer.code == 0, answer.err
    assert run_command("fit", *ONE_EPOCH, "--data.val_size", "0", "--logs", "fit").code == 0
    card = cifar_lit.load("fit/small-1").card
    assert card.reject is card.coverage is None  # `fit` sees no test image


@pytest.mark.parametrize("value", ["0", "-1", "21", "nan", "0.01", "warm"])
def test_an_invalid_temperature_is_refused(value: str) -> None:
    assert_refused(run_command(*ONE_EPOCH, "--model.temperature", value), 2, "temperature")


def test_a_closed_pipe_is_not_an_error(run_dir: Path, working_folder: Path) -> None:
    pictures = draw_folder(Path("pictures"), {"cat": 30})
    line = f"{sys.executable} -m cifar_lit classify {shlex.quote(str(run_dir))} {f'{pictures} ' * 30} | head -n 1"
    answer = run_process(["sh", "-c", line], working_folder, PYTHONPATH=str(ROOT))
    assert answer.out.split()[:2] == ["file", "class"] and answer.err == ""


# ---- other ways to train


def test_train_resumes_a_finished_fit_with_its_test(run_dir: Path) -> None:
    assert run_command("fit", *SMALL).code == 0
    assert metrics_of(NEW_RUN)["test"] is None
    assert files_of(run_dir) - files_of(NEW_RUN) == {"predictions.csv", "probabilities.npy", "report.html"}
    assert "test/" not in (NEW_RUN / "metrics.csv").read_text().replace(",".join(COLUMNS), "")
    events = EventAccumulator(str(NEW_RUN))
    events.Reload()
    names = ("confident_mistakes", "confusion_matrix", "doubtful_hits")
    assert set(events.Tags()["images"]) == {"images/train", *(f"val/{name}" for name in names)}
    assert [event.step for event in events.Scalars("val/loss")] == [5, 10]  # once per epoch
    answer = run_command("train", "--resume", NEW_RUN)
    assert answer.code == 0, answer.err
    assert metrics_of(NEW_RUN)["test"] == metrics_of(run_dir)["test"]


def test_training_works_in_other_precisions() -> None:
    for number, precision in enumerate(("64-true", "bf16-true"), 1):
        answer = run_command(*ONE_EPOCH, "--precision", precision)
        assert (answer.code, answer.err) == (0, "")
        run = Path(f"lightning_logs/small-{number}")
        assert metrics_of(run)["precision"] == precision and cifar_lit.load(run) is not None


def test_custom_loggers_are_added_and_logger_false_disables_all() -> None:
    run_command(*ONE_EPOCH, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "own")
    assert list(Path("own").rglob("metrics.csv"))
    run_command("fit", *ONE_EPOCH, "--logs", "runs", "--trainer.logger", "CSVLogger")
    assert Path("runs/lightning_logs/version_0/metrics.csv").is_file()  # the default save_dir is --logs
    run_command(*ONE_EPOCH, "--trainer.logger", "false")
    assert files_of(NEW_RUN) - files_of(Path("lightning_logs/small-2")) == {"events.out.tfevents.*", "metrics.csv"}


def test_test_time_augmentation_is_reported_beside_the_plain_score(run_dir: Path, data: ImageData) -> None:
    plain = metrics_of(run_dir)
    answer = run_command("test", "--ckpt_path", run_dir / "checkpoints/best.ckpt", "--model.tta", "full")
    assert answer.code == 0, answer.err
    test = metrics_of(NEW_RUN)["test"]
    views = test.pop("tta")
    calibration = plain["test"]["calibration"]  # `test` alone fits no temperature
    test["calibration"] |= {name: calibration[name] for name in ("temperature", "tempered_error")}
    # Its prediction sets have limits of the other half of the test images, those of the training validation images.
    assert test.pop("coverage") != plain["test"]["coverage"]
    assert test == {name: value for name, value in plain["test"].items() if name != "coverage"}
    assert (list(views), views["views"]) == (["views", "accuracy", "loss"], "full")
    loaded, settings = cifar_lit.load(run_dir).net, config_of(run_dir)["data"]
    mean, std = (torch.tensor(settings[name]).view(-1, 1, 1) for name in ("mean", "std"))
    images, labels = data.test_images.images.permute(0, 3, 1, 2), data.test_images.labels
    with torch.no_grad():
        images = (images / 255 - mean) / std
        logits = view_logits(loaded.net, images, "full", loaded.net(images))
    accuracy, loss = views["accuracy"], views["loss"]
    assert accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert loss == pytest.approx(float(cross_entropy(logits, labels)), abs=1e-5) != test["loss"]
    assert f"with full test-time augmentation: accuracy {accuracy:.4f} · loss {loss:.4f}" in answer.lines
    assert run_command(*SMALL, "--model.tta", "mirror").code == 0
    metrics = metrics_of(Path("lightning_logs/small-2"))
    assert metrics["test"].pop("tta")["views"] == "mirror"
    assert (metrics["val"], metrics["test"]) == (plain["val"], plain["test"])


def test_a_time_limit_takes_the_place_of_a_number_of_epochs(working_folder: Path) -> None:
    words = ("--trainer.max_epochs", "-1", "--trainer.max_time", "00:00:00:01", "--model.schedule", "constant")
    answer = run_command(*SMALL, *words)
    assert answer.code == 0 and "unlimited epochs" in answer.out, answer.err
    assert metrics_of(Path("lightning_logs/small-1"))["epochs"] > 2


def test_a_user_without_a_home_folder_is_asked_for_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "CIFAR_LIT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)  # has no entry in the list of users
    with pytest.raises(UsageError, match=r"no home folder to cache images in: name one with --data\.cache_dir"):
        _ = SourceSettings().cache_path


def test_mlflow_needs_a_path_that_its_database_accepts(working_folder: Path) -> None:
    pytest.importorskip("mlflow")
    for logs in ("a?b", "a%20b"):
        assert_refused(run_command(*SMALL, "--logger", "mlflow", "--logs", logs), 2, "MLflow", "without ? and %")
        assert not Path(logs).exists() and not Path("a").exists()
