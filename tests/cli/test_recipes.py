"""Every packaged recipe trains and tests, with fewer epochs and generated images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import metrics_of, run_command

from cifar_lit import hardware
from cifar_lit.cli.flags import recipe_names, recipe_path
from cifar_lit.runs.config_file import plain_values

SHORT = ["--dataset", "shapes", "--data.count", "120", "--data.val_size", "20", "--epochs", "2", "--accelerator", "cpu"]
NARROW = ["--model.net_options.widths", "[8, 16, 16]"]
NARROW_INSIDE = [*NARROW, "--model.net_options.inner", "[8, 8, 16]", "--model.schedule_options.warmup_epochs", "1"]
SMALL_IMAGES = ["--data.image_size", "16", "--batch-size", "50", "--trainer.limit_train_batches", "2"]
SHALLOW = [*SMALL_IMAGES, "--model.net_options.depth", "10", "--model.net_options.widen", "1"]
SMALLER = {
    **dict.fromkeys(("fast94", "fast95", "fast96", "fast97", "cpu90", "cpu91", "cpu92", "cpu93"), NARROW),
    **dict.fromkeys(("fast100", "laptop100"), NARROW_INSIDE),
    "finetune": ["--data.image_size", "64", "--early_stop", "false"],
    "fashion_cnn": ["--data.image_size", "28", "--data.channels", "1"],
    **dict.fromkeys(("resnet18", "resnet18_c100", "resnet18_30", "resnet18_30_c100"), SMALL_IMAGES),
    **dict.fromkeys(("wrn28_10", "wrn28_10_c100"), SHALLOW),
}

# Settings of the tutorials: net, optimizer, learning rate, momentum, batch size, epochs, mean, std.
TUTORIALS = {
    "tudui": ("tudui", "sgd", 0.01, None, 64, 10, 0.0, 1.0),
    "sjnet": ("sjnet", "sgd", 0.01, None, 64, 10, 0.0, 1.0),
    "lenet": ("lenet", "sgd", 0.001, 0.9, 4, 2, 0.5, 0.5),
}


# Nets that other recipes of the default tier train too.
SLOW = (
    "finetune", "resnet18", "resnet18_c100", "resnet18_30", "resnet18_30_c100", "fast95", "fast96", "fast100",
    "cpu90", "cpu92", "cpu93", "laptop100", "sjnet", "wrn28_10_c100",
)  # fmt: skip
RECIPES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in recipe_names()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_tests_and_writes_a_complete_run_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawing takes half of the time; test_run.py checks the images.
    monkeypatch.setattr("cifar_lit.train.log_pictures", lambda *args: None)
    answer = run_command("--recipe", name, *SHORT, *SMALLER.get(name, []))
    assert answer.code == 0, answer.err
    run = Path(f"lightning_logs/{name}-1")
    metrics, settings = metrics_of(run), plain_values(recipe_path(name))
    assert (metrics["recipe"], metrics["net"], metrics["epochs"]) == (name, settings["model"]["net"], 2)  # type: ignore[index]
    assert metrics["test"]["images"] == 24
    assert (run / "model.safetensors").is_file()
    each_epoch = sorted(path.name for path in (run / "checkpoints").glob("epoch-*.ckpt"))
    assert each_epoch == (["epoch-00.ckpt", "epoch-01.ckpt"] if name == "sjnet" else [])


@pytest.mark.parametrize(("bf16", "gpus"), [(True, ()), (False, ()), (True, (("a GPU", 2**34),))])
def test_the_default_recipe_of_a_cpu_is_cpu91(
    bf16: bool, gpus: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(hardware.detect_machine(), bf16=bf16, gpus=gpus)
    monkeypatch.setattr(hardware, "detect_machine", lambda: machine)
    answer = run_command("fit", *SHORT, *NARROW, "--epochs", "1")
    assert answer.code == 0, answer.err
    assert [run.name for run in Path("lightning_logs").iterdir()] == ["cpu91-1"]


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_recipe_has_the_settings_of_the_tutorial(name: str) -> None:
    settings: dict[str, Any] = plain_values(recipe_path(name))
    model, data, trainer = settings["model"], settings["data"], settings["trainer"]
    optimizer = model["optimizer"], model["lr"], model.get("optimizer_options", {}).get("momentum")
    normalisation = data["mean"], data["std"]
    found = (model["net"], *optimizer, data["batch_size"], trainer["max_epochs"], *normalisation)
    assert found == TUTORIALS[name]
    assert "schedule" not in model
