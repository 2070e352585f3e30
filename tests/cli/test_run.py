"""Details of a training's files and output beyond the contract, and other ways to train."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from contract.command_line import (
    ROOT,
    SMALL,
    Training,
    config_of,
    draw_folder,
    files_of,
    metrics_of,
    run_command,
    run_process,
)
from run.test_schema import errors

import cifar_lit
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.sources import SOURCES
from cifar_lit.inference.calibration import choose_temperature
from cifar_lit.run.loggers import COLUMNS
from cifar_lit.run.results import typed_command

NEW_RUN = Path("lightning_logs/small-1")  # the first run in the working folder
ONE_EPOCH = (*SMALL, "--epochs", "1")


def test_the_console_shows_the_start_card_epochs_interval_and_how_to_load_the_net(training: Training) -> None:
    assert max(map(len, training.answer.lines)) <= 80
    card = dict(re.findall(r"^(\w+) {2,}(.*)$", training.answer.out.replace("\n" + " " * 13, " "), re.MULTILINE))
    assert card["data"] == "shapes · train 160 · validation 40 · 4 classes · 3×16×16 · in CPU memory"
    assert card["net"].startswith("lenet · ")
    assert (card["devices"], card["precision"], card["run"]) == ("1 × cpu", "float32", str(NEW_RUN))
    assert card["batch"].startswith("32 images · ")
    lines, test = training.answer.lines, metrics_of(training.run_dir)["test"]
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert "95 % interval of the accuracy {:.4f} … {:.4f}".format(*test["interval"]) in lines
    for copy in ("macro F1", "balanced accuracy"):  # the classes have equal sizes
        assert copy not in training.answer.out
    tested = metrics_of(training.run_dir)["tested"]
    assert f"weights: best of epoch {tested['epoch']} (step {5 * tested['epoch']})" in lines


def test_the_start_card_counts_optimizer_steps_and_epochs_of_each_size() -> None:
    words = ("--trainer.accumulate_grad_batches", "2", "--trainer.max_epochs", "null", "--trainer.max_steps", "8")
    sizes = ("--net", "shapenet", "--resolutions.sides", "{8: 0.5}")
    answer = run_command("fit", *SMALL, *words, *sizes, "--skip_easy.share", "0.5")
    assert answer.code == 0
    assert " · 3 steps per epoch" in answer.out and " · 3 epochs · " in answer.out
    assert "skip_easy.share 0.5 · skip_easy.start 0.6" in answer.out


def test_a_fast_dev_run_saves_nothing(run_dir: Path) -> None:
    for command, words in (("train", SMALL), ("predict", ("--ckpt_path", run_dir / "checkpoints/best.ckpt"))):
        answer = run_command(command, *words, "--trainer.fast_dev_run", "true")
        assert answer.code == 0, answer.err
        assert answer.lines[-1] == "fast_dev_run: all batches without a failure; nothing was saved"
        assert not Path("lightning_logs").exists()


STRICT = [sys.executable, "-W", "error", "-m", "cifar_lit"]  # every warning is an error


@pytest.mark.slow
def test_a_run_prints_no_warnings_or_tips_except_the_table_of_a_profiler(working_folder: Path) -> None:
    answer = run_process([*STRICT, "train", *ONE_EPOCH, "--trainer.profiler", "simple"], working_folder)
    titles = [line for line in answer.err.splitlines() if line and not line.startswith(("|", "-"))]
    assert (answer.code, titles) == (0, ["FIT Profiler Report", "TEST Profiler Report"])
    assert "run_training_batch" in answer.err
    assert not re.search(r"warn|tip|💡|litlogger|GPU available|https?://", answer.out, re.IGNORECASE), answer.out


def test_passwords_of_urls_are_stored_nowhere_and_the_pictures_of_many_classes_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SOURCES, "mine", SOURCES["shapes"])
    monkeypatch.setattr("cifar_lit.train.MAX_DRAWN", 3)
    url = "https://me:secret@host/cifar.gz?part=1&sig=secret"
    words = (*ONE_EPOCH, "--dataset", "mine", f"--data.url={url}")
    answer = run_command(*words)
    assert "type --data.url again to repeat this run from its config.yaml" in answer.err
    for file in NEW_RUN.rglob("*"):
        assert file.is_dir() or b"secret" not in file.read_bytes(), file
    assert config_of(NEW_RUN)["data"]["loading"]["url"] == "https://host/cifar.gz?part=1&sig="
    monkeypatch.setattr(sys, "argv", ["/bin/__main__.py", "train", url])
    assert typed_command() == 'cifar-lit train "https://host/cifar.gz?part=1&sig="'
    assert (NEW_RUN / "curves.png").exists() and not (NEW_RUN / "confusion_matrix.png").exists()


# ---- the trained net


def test_temperature_and_prediction_sets_come_from_the_validation_images(run_dir: Path, data: ImageData) -> None:
    loaded, test = cifar_lit.load(run_dir), metrics_of(run_dir)["test"]
    val = data.split[1]
    logits = loaded(data.train_images.images[val].permute(0, 3, 1, 2))
    choice = choose_temperature(logits, data.train_images.labels[val], None)
    assert (test["calibration"]["temperature"], test["calibration"]["source"]) == choice
    assert loaded.card.temperature == choice[0]
    assert [result["coverage"] for result in test["coverage"]] == [0.8, 0.9, 0.95]  # 40 images


def test_without_validation_images_the_recipe_gives_the_temperature_and_fit_sees_no_test_image() -> None:
    answer = run_command("fit", *ONE_EPOCH, "--data.val_size", "0", "--model.temperature", "0.5")
    assert answer.code == 0, answer.err
    card = cifar_lit.load(NEW_RUN).card
    assert card.temperature == 0.5
    assert card.reject is card.coverage is None


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
    answer = run_command("train", "--resume", NEW_RUN)
    assert answer.code == 0, answer.err
    assert metrics_of(NEW_RUN)["test"] == metrics_of(run_dir)["test"]


def test_custom_loggers_are_added_and_logger_false_disables_all() -> None:
    run_command(*ONE_EPOCH, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "own")
    assert list(Path("own").rglob("metrics.csv"))
    run_command(*ONE_EPOCH, "--trainer.logger", "false")
    curves = {"events.out.tfevents.*", "metrics.csv", "curves.png"}
    assert files_of(NEW_RUN) - files_of(Path("lightning_logs/small-2")) == curves


def test_test_time_augmentation_is_reported_beside_the_plain_score(run_dir: Path) -> None:
    answer = run_command("test", "--ckpt_path", run_dir / "checkpoints/best.ckpt", "--model.tta", "full")
    assert answer.code == 0, answer.err
    assert errors(metrics_of(NEW_RUN)) == []
    test, plain = metrics_of(NEW_RUN)["test"], metrics_of(run_dir)["test"]
    assert (test["accuracy"], test["loss"]) == (plain["accuracy"], plain["loss"])
    assert test["tta"]["views"] == "full" and test["tta"]["loss"] != test["loss"]
    line = "with full test-time augmentation: accuracy {accuracy:.4f} · loss {loss:.4f}"
    assert line.format(**test["tta"]) in answer.lines


def test_a_time_limit_takes_the_place_of_a_number_of_epochs(working_folder: Path) -> None:
    words = ("--trainer.max_epochs", "-1", "--trainer.max_time", "00:00:00:01", "--model.schedule", "constant")
    answer = run_command(*SMALL, *words)
    assert answer.code == 0 and "unlimited epochs" in answer.out, answer.err
    assert metrics_of(Path("lightning_logs/small-1"))["epochs"] >= 1
