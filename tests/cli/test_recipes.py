"""Every packaged recipe trains and tests, with fewer epochs and generated images."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.command_line import metrics_of, run_command

from cifar_lit.base.settings import plain_values
from cifar_lit.cli.flags import recipe_names, recipe_path

SHORT = ["--dataset", "shapes", "--data.count", "120", "--data.val_size", "20", "--epochs", "2", "--accelerator", "cpu"]
NARROW = ["--model.net_options.widths", "[8, 16, 16]"]
NARROW_INSIDE = [*NARROW, "--model.net_options.inner", "[8, 8, 16]", "--model.schedule_options.warmup_epochs", "1"]
SMALL_IMAGES = ["--data.image_size", "16", "--batch-size", "50", "--trainer.limit_train_batches", "2"]
SMALLER = {
    **dict.fromkeys(("fast94", "cpu90", "cpu91", "cpu92"), NARROW),
    "cpu100": NARROW_INSIDE,
    "finetune": ["--data.image_size", "64", "--early_stop", "false"],
    "fashion_cnn": ["--data.image_size", "28", "--data.channels", "1"],
    "resnet18": SMALL_IMAGES,
}

# Nets that other recipes of the default tier train too.
SLOW = ("finetune", "resnet18", "cpu90", "cpu92", "cpu100", "sjnet")
RECIPES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in recipe_names()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_tests_and_writes_a_complete_run_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawing takes half of the time; test_run.py checks the images.
    monkeypatch.setattr("cifar_lit.train._draw", lambda *args: None)
    answer = run_command("--recipe", name, *SHORT, *SMALLER.get(name, []))
    assert answer.code == 0, answer.err
    run = Path(f"lightning_logs/{name}-1")
    metrics, settings = metrics_of(run), plain_values(recipe_path(name))
    assert (metrics["recipe"], metrics["net"], metrics["epochs"]) == (name, settings["model"]["net"], 2)  # type: ignore[index]
    assert metrics["test"]["images"] == 24
    assert (run / "model.safetensors").is_file()
    each_epoch = sorted(path.name for path in (run / "checkpoints").glob("epoch-*.ckpt"))
    assert each_epoch == (["epoch-00.ckpt", "epoch-01.ckpt"] if name == "sjnet" else [])
