"""What a training leaves and prints, in the details that scripts do not rely on, and other ways to train."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

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
from torchmetrics.functional.classification import multiclass_calibration_error

import cifar_lit
from cifar_lit.cli.run_report import small_set_text
from cifar_lit.data.datamodule import ImageData
from cifar_lit.inference.novelty import novelty
from cifar_lit.models.registry import build_net
from cifar_lit.models.tta import view_logits
from cifar_lit.runs.calibration import fit_temperature
from cifar_lit.runs.loggers import COLUMNS
from cifar_lit.stats import wilson_interval
from cifar_lit.training.checkpoint import read_checkpoint

OWN = Path("lightning_logs/small-1")  # the first run in a test's own folder
ONE_EPOCH = (*SMALL, "--epochs", "1")


def test_tensorboard_has_figures_galleries_and_the_tests_accuracy_as_the_metric_of_hparams(run_dir: Path) -> None:
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


def test_the_console_shows_card_epochs_the_interval_and_how_the_net_is_loaded(training: Training) -> None:
    card = dict(re.findall(r"^(\w+) {2,}(.*)$", training.answer.out, re.MULTILINE))
    assert card["data"] == "shapes · train 160 · validation 40 · 4 classes · 3×16×16 · in CPU memory"
    assert card["net"].startswith("lenet · ")
    assert (card["devices"], card["precision"], card["run"]) == ("1 × cpu", "float32", str(OWN))
    assert card["batch"].startswith("32 = 1 × 32 ")
    lines, test = training.answer.lines, metrics_of(training.run_dir)["test"]
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert "95 % interval of the accuracy {:.4f} … {:.4f}".format(*test["interval"]) in lines
    assert "macro F1" in training.answer.out and "balanced accuracy" not in training.answer.out  # classes of equal size
    assert shlex.split(lines[-1]) == [
        "python",
        "-c",
        "import cifar_lit; print(cifar_lit.load('lightning_logs/small-1'))",
    ]


def test_a_small_test_set_is_mentioned_for_photos_and_not_for_drawn_shapes(training: Training) -> None:
    assert "small test set" not in training.answer.out
    draw_folder(Path("photos"), {"cat": 12, "dog": 12})
    answer = run_command(*ONE_EPOCH, *OWN_IMAGES, "--data-dir", "photos", "--data.val_size", "4")
    assert answer.code == 0, answer.err
    assert "small test set: differences between runs below " in answer.out
    assert " · 1 epoch · " in answer.out and " · 1 step per epoch" in answer.out


def test_a_test_set_is_small_where_half_of_the_interval_is_more_than_two_points() -> None:
    for right, images, small in ((144, 153, "0.056"), (1200, 2500, None), (1100, 2300, "0.029")):
        interval = list(wilson_interval(right, images))
        text = small_set_text({"accuracy": right / images, "interval": interval, "images": images})
        assert text is None if small is None else text is not None and f"below {small} may be chance; --folds" in text


def test_the_best_checkpoint_goes_by_the_figure_that_is_named() -> None:
    flags = (*SMALL, "--model.monitor", "loss", "--epochs", "4")
    assert run_command("fit", *flags).code == 0
    rows = [row for row in rows_of(OWN / "metrics.csv") if row["val/loss"]]
    best = min(rows, key=lambda row: float(row["val/loss"]))
    checkpoint = read_checkpoint(OWN / "checkpoints/best.ckpt")
    assert checkpoint["epoch"] == int(best["epoch"])
    assert metrics_of(OWN)["val"]["loss"] == pytest.approx(float(best["val/loss"]), abs=1e-6)
    assert config_of(OWN)["model"]["monitor"] == "loss"


def test_unequal_classes_are_told_on_the_start_card_when_something_makes_up_for_them() -> None:
    answer = run_command(*ONE_EPOCH, "--data.sampling", "balanced", "--model.monitor", "macro_f1")
    assert answer.code == 0, answer.err
    assert re.search(r"^classes +\d+ … \d+ training images each · sampling balanced$", answer.out, re.MULTILINE)
    assert re.search(r"val loss \S+ acc \S+ macro_f1 0\.\d{4} · ", answer.out)


def test_the_start_card_counts_steps_of_the_optimizer_and_epochs_up_to_the_end() -> None:
    words = ("--trainer.accumulate_grad_batches", "2", "--trainer.max_epochs", "null", "--trainer.max_steps", "8")
    answer = run_command("fit", *SMALL, *words, "--data.skip_easy", "0.5")
    assert answer.code == 0
    assert " · 3 steps per epoch" in answer.out and " · 3 epochs · " in answer.out
    assert "the easiest 50% of the images after 60% of the steps" in answer.out


def test_a_fast_dev_run_says_what_it_ran_and_saves_nothing(run_dir: Path) -> None:
    for command, words, batches in (
        ("train", SMALL, "1 training batch and 1 validation batch"),
        ("predict", ("--ckpt_path", run_dir / "checkpoints/best.ckpt"), "1 prediction batch"),
    ):
        answer = run_command(command, *words, "--trainer.fast_dev_run", "true")
        assert answer.code == 0, answer.err
        assert answer.lines[-1] == f"fast_dev_run: {batches} without a failure; nothing was saved"
        assert not Path("lightning_logs").exists()


def test_a_callback_that_monitors_what_is_not_logged_is_refused_before_the_training() -> None:
    metric = "{auroc: {class_path: torchmetrics.classification.MulticlassAUROC, init_args: {num_classes: 4}}}"
    words = (*ONE_EPOCH, "--model.metrics", metric, "--trainer.callbacks")
    for callback, monitor, meant in (
        ("EarlyStopping", "auroc", "val/auroc"),
        ("ModelCheckpoint", "train_loss", "train/loss"),
    ):
        answer = run_command("fit", *words, callback, "--trainer.callbacks.monitor", monitor)
        assert_refused(answer, 2, f"{callback} monitors {monitor}, which is not logged. Did you mean {meant}?")
        assert not Path("lightning_logs").exists()
    rates = ("LearningRateMonitor", "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "lr-SGD/pg1")
    for right in (
        ("EarlyStopping", "--trainer.callbacks.monitor", "val/auroc"),
        (*rates, "--trainer.log_every_n_steps", "1"),
    ):
        assert run_command("fit", *words, *right).code == 0  # a rate is left to the callback that logs it


def test_a_run_prints_no_warning_tip_or_advert_even_where_each_warning_is_an_error_but_a_profilers_table(
    working_folder: Path,
) -> None:
    words = ["-W", "error", "-m", "cifar_lit", "train", *ONE_EPOCH, "--trainer.profiler", "simple"]
    answer = run_process([sys.executable, *words], working_folder)
    heads = [line for line in answer.err.splitlines() if line and not line.startswith(("|", "-"))]
    assert (answer.code, heads) == (
        0,
        ["FIT Profiler Report", "TEST Profiler Report"],
    ) and "run_training_batch" in answer.err
    assert not re.search(r"warn|tip|💡|litlogger|GPU available|https?://", answer.out, re.IGNORECASE), answer.out


def test_a_validation_without_a_logger_prints_no_warning_either(working_folder: Path) -> None:
    """`fit` ends with one: the score is logged by then."""
    answer = run_process([sys.executable, "-W", "error", "-m", "cifar_lit", "fit", *ONE_EPOCH], working_folder)
    assert (answer.code, answer.err) == (0, "")


# ---- using it


def test_the_loaded_net_is_the_checkpoints(run_dir: Path, data: ImageData) -> None:
    loaded = cifar_lit.load(run_dir)
    images = data.test_images.images.permute(0, 3, 1, 2)
    net = build_net("lenet", channels=3, image_size=16, num_classes=4).eval()
    weights = read_checkpoint(run_dir / "checkpoints/best.ckpt")["state_dict"]
    net.load_state_dict(
        {name.removeprefix("net."): tensor for name, tensor in weights.items() if name.startswith("net.")}
    )
    mean, std = (torch.tensor(config_of(run_dir)["data"][name]).view(-1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), net((images.float() / 255 - mean) / std))
    scores = novelty(loaded(data.train_images.images[data.split[1]].permute(0, 3, 1, 2)))
    assert scores.gt(loaded.card.novelty_threshold).sum() == 2  # 5 % of 40 validation images


def test_the_temperature_is_that_of_the_validation_images_and_metrics_json_has_the_error_with_and_without(
    run_dir: Path, data: ImageData
) -> None:
    loaded, calibration = cifar_lit.load(run_dir), metrics_of(run_dir)["test"]["calibration"]
    val = data.split[1]
    logits = loaded(data.train_images.images[val].permute(0, 3, 1, 2))
    assert calibration["temperature"] == loaded.card.temperature
    assert calibration["temperature"] == pytest.approx(fit_temperature(logits, data.train_images.labels[val]), rel=1e-4)
    images, labels = data.test_images.images.permute(0, 3, 1, 2), data.test_images.labels
    given = torch.tensor([[dict(one.top)[name] for name in loaded.classes] for one in loaded.predict_batch(images, 4)])
    for name, probabilities in (("error", loaded(images).softmax(1)), ("tempered_error", given)):
        expected = multiclass_calibration_error(probabilities, labels, 4, n_bins=15)
        assert calibration[name] == pytest.approx(float(expected), abs=1e-4), name
    page = (run_dir / "report.html").read_text()
    assert f"After temperature scaling (T = {calibration['temperature']:.2f}, " in page
    assert f"{calibration['tempered_error']:.3f}" in page


def test_what_trains_on_all_images_has_no_temperature_and_calls_none_unlike(working_folder: Path) -> None:
    assert run_command(*ONE_EPOCH, "--data.val_size", "0").code == 0
    calibration = metrics_of(OWN)["test"]["calibration"]
    assert (calibration["temperature"], calibration["tempered_error"]) == (None, None) and calibration["error"] > 0
    loaded = cifar_lit.load(OWN)
    assert (loaded.card.temperature, loaded.card.novelty_threshold) == (None, None)
    (prediction,) = loaded.predict_batch(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    assert prediction.unlike is None
    assert "No temperature was fitted" in (OWN / "report.html").read_text()


def test_a_reader_that_has_read_enough_is_no_failure(run_dir: Path, working_folder: Path) -> None:
    pictures = draw_folder(Path("pictures"), {"cat": 30})
    line = f"{sys.executable} -m cifar_lit classify {shlex.quote(str(run_dir))} {f'{pictures} ' * 30} | head -n 1"
    answer = run_process(["sh", "-c", line], working_folder, PYTHONPATH=str(ROOT))
    assert answer.out.split()[:2] == ["file", "class"] and answer.err == ""


# ---- other ways to train


def test_fit_tests_nothing_and_a_train_goes_on_with_its_test(run_dir: Path) -> None:
    assert run_command("fit", *SMALL).code == 0
    assert metrics_of(OWN)["test"] is None
    assert files_of(run_dir) - files_of(OWN) == {"predictions.csv", "probabilities.npy", "report.html"}
    assert "test/" not in (OWN / "metrics.csv").read_text().replace(",".join(COLUMNS), "")
    events = EventAccumulator(str(OWN))
    events.Reload()
    names = ("confident_mistakes", "confusion_matrix", "doubtful_hits")
    assert set(events.Tags()["images"]) == {"images/train", *(f"val/{name}" for name in names)}
    assert [event.step for event in events.Scalars("val/loss")] == [5, 10]  # the look at each image logs no score again
    answer = run_command("train", "--resume", OWN)
    assert answer.code == 0, answer.err
    assert metrics_of(OWN)["test"] == metrics_of(run_dir)["test"]


def test_it_trains_in_other_precisions() -> None:
    for number, precision in enumerate(("64-true", "bf16-true"), 1):
        answer = run_command(*ONE_EPOCH, "--precision", precision)
        assert (answer.code, answer.err) == (0, "")
        run = Path(f"lightning_logs/small-{number}")
        assert metrics_of(run)["precision"] == precision and cifar_lit.load(run) is not None


def test_loggers_of_ones_own_write_beside_ours_and_none_writes_none() -> None:
    run_command(*ONE_EPOCH, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "own")
    assert list(Path("own").rglob("metrics.csv"))
    run_command("fit", *ONE_EPOCH, "--logs", "runs", "--trainer.logger", "CSVLogger")
    assert Path("runs/lightning_logs/version_0/metrics.csv").is_file()  # one without a folder: below that of the runs
    run_command(*ONE_EPOCH, "--trainer.logger", "false")
    assert files_of(OWN) - files_of(Path("lightning_logs/small-2")) == {"events.out.tfevents.*", "metrics.csv"}


def test_test_time_views_stand_beside_the_plain_score_and_out_of_validation(run_dir: Path, data: ImageData) -> None:
    plain = metrics_of(run_dir)
    answer = run_command("test", "--ckpt_path", run_dir / "checkpoints/best.ckpt", "--model.tta", "full")
    assert answer.code == 0, answer.err
    test = metrics_of(OWN)["test"]
    views = test.pop("tta")
    test["calibration"] |= {
        name: plain["test"]["calibration"][name] for name in ("temperature", "tempered_error")
    }  # the model's
    assert test == plain["test"]
    assert (list(views), views["views"]) == (["views", "accuracy", "loss"], "full")
    loaded, settings = cifar_lit.load(run_dir).net, config_of(run_dir)["data"]
    mean, std = (torch.tensor(settings[name]).view(-1, 1, 1) for name in ("mean", "std"))
    images, labels = data.test_images.images.permute(0, 3, 1, 2), data.test_images.labels
    with torch.no_grad():
        logits = view_logits(loaded.net, (images / 255 - mean) / std, "full")
    assert views["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
    assert (
        views["loss"]
        == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), abs=1e-5)
        != test["loss"]
    )
    assert (
        f"with full test-time augmentation: accuracy {views['accuracy']:.4f} · loss {views['loss']:.4f}" in answer.lines
    )
    assert run_command(*SMALL, "--model.tta", "mirror").code == 0
    metrics = metrics_of(Path("lightning_logs/small-2"))
    assert metrics["test"].pop("tta")["views"] == "mirror"
    assert (metrics["val"], metrics["test"]) == (plain["val"], plain["test"])
