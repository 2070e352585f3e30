"""Every packaged recipe trains and tests, shortened and on drawn images of its own size."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import config_of, metrics_of, typed

from cifar_lit.cli.flags import recipe_header, recipe_names, recipe_path, recipe_settings

SIZES = {"fashion_cnn": ["--data.image_size", "28", "--data.channels", "1"]}
SHORT = ["--dataset", "shapes", "--data.count", "120", "--data.val_size", "20", "--epochs", "2", "--accelerator", "cpu"]

# What the seeds say of their training: net, optimizer, rate, momentum, batch, epochs, mean, std.
SEEDS = {
    "tudui": ("tudui", "sgd", 0.01, None, 64, 10, 0.0, 1.0),
    "sjnet": ("sjnet", "sgd", 0.01, None, 64, 10, 0.0, 1.0),
    "lenet": ("lenet", "sgd", 0.001, 0.9, 4, 2, 0.5, 0.5),
}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_trains_and_tests_and_leaves_a_whole_run(name: str, here: Path) -> None:
    steps = ["--trainer.limit_train_batches", "2"] if name == "resnet18" else []
    size = ["--data.image_size", "16"] if name == "resnet18" else SIZES.get(name, [])
    answer = typed("--recipe", name, *SHORT, *size, *steps)
    assert answer.code == 0, answer.err
    run = here / "lightning_logs" / f"{name}-1"
    metrics = metrics_of(run)
    assert metrics["recipe"] == name
    assert metrics["epochs"] == 2
    assert metrics["test"]["images"] == 24
    assert (run / "model.safetensors").is_file()
    assert config_of(run)["model"]["net"] == recipe_settings(recipe_path(name))["model"]["net"]  # type: ignore[index]
    each_epoch = sorted(path.name for path in (run / "checkpoints").glob("epoch-*.ckpt"))
    assert each_epoch == (["epoch-00.ckpt", "epoch-01.ckpt"] if name == "sjnet" else [])


@pytest.mark.parametrize("name", SEEDS)
def test_a_seeds_recipe_has_the_seeds_own_training(name: str) -> None:
    settings = recipe_settings(recipe_path(name))
    model, data, trainer = settings["model"], settings["data"], settings["trainer"]
    found = (
        model["net"], model["optimizer"], model["lr"], model.get("momentum"),  # type: ignore[index, attr-defined]
        data["batch_size"], trainer["max_epochs"], data["mean"], data["std"],  # type: ignore[index]
    )  # fmt: skip
    assert found == SEEDS[name]
    assert "schedule" not in model  # type: ignore[operator]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_header_says_what_it_is_what_it_reaches_and_takes(name: str) -> None:
    header = recipe_header(recipe_path(name))
    assert header[0].startswith(f"{name} — ")
    assert [line.partition(":")[0] for line in header if line.startswith(("Reaches:", "Takes:"))] == ["Reaches", "Takes"]
    assert "TODO" not in "".join(header)
