"""Short flags, configuration files and recipes: the settings they stand for, and their precedence."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from cifar_lit.data.augment import Augment

from .command_line import SMALL, checkpoint_of, config_of, metrics_of, run_command

# Short flag, value, long flag, and value in the printed configuration.
SHORT_FLAGS: list[tuple[str, str, str, Any]] = [
    ("devices", "2", "trainer.devices", 2),
    ("accelerator", "gpu", "trainer.accelerator", "gpu"),
    ("nodes", "2", "trainer.num_nodes", 2),
    ("precision", "bf16-mixed", "trainer.precision", "bf16-mixed"),
    ("epochs", "7", "trainer.max_epochs", 7),
    ("dataset", "folder", "data.dataset", "folder"),
    ("data-dir", "some folder", "data.root", "some folder"),
    ("batch-size", "48", "data.batch_size", 48),
    ("net", "shapenet", "model.net", "shapenet"),
    ("lr", "0.125", "model.lr", 0.125),
    ("seed", "11", "seed_everything", 11),
    ("data.image_size", "24", "data.images.image_size", 24),
    ("data.workers", "3", "data.loading.workers", 3),
]


def printed_config(*words: object) -> dict[str, Any]:
    """Return the settings printed by `cifar-lit fit … --print_config`."""
    answer = run_command("fit", *words, "--print_config")
    assert (answer.code, answer.err) == (0, "")
    return yaml.safe_load(answer.out)


def setting(config: dict[str, Any], name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def test_a_short_flag_is_an_alias_of_the_long_one() -> None:
    expected = {long: value for _, _, long, value in SHORT_FLAGS}
    for words in (
        [word for short, value, _, _ in SHORT_FLAGS for word in (f"--{short}", value)],
        [f"--{short}={value}" for short, value, _, _ in SHORT_FLAGS],
        [f"--{long}={value}" for _, value, long, _ in SHORT_FLAGS],
    ):
        config = printed_config(*SMALL, *words)
        settings = {long: setting(config, long) for _, _, long, _ in SHORT_FLAGS}
        settings["trainer.devices"] = int(settings["trainer.devices"])  # "2" is as good as 2
        assert settings == expected


def test_every_setting_is_a_flag_and_devices_are_a_number_a_list_or_auto() -> None:
    values = {"trainer.gradient_clip_val": "0.5", "weight_average.decay": "0.5", "data.images.count": "400"}
    ours = {"checkpoint-every": "10m", "rank-timeout": "30.0"}
    config = printed_config(*SMALL, *(f"--{flag}={value}" for flag, value in {**values, **ours}.items()))
    assert {flag: str(setting(config, flag)) for flag in values} == values
    assert {flag: str(config[flag.replace("-", "_")]) for flag in ours} == ours
    for devices in ("0,1", "[1]", "auto"):
        assert str(printed_config(*SMALL, "--devices", devices)["trainer"]["devices"]) == devices


def test_a_flag_changes_one_setting_of_a_recipes_group_or_feature() -> None:
    assert printed_config("--recipe", "cpu91", "--skip_easy.share", "0.4")["skip_easy"] == {"share": 0.4, "start": 0.2}
    augment = printed_config("--recipe", "folder", "--data.augment.flip", "none")["data"]["augment"]
    assert augment == asdict(Augment(crop=3))


def test_flags_override_config_files_and_config_files_override_the_recipe() -> None:
    Path("one.yaml").write_text("model: {lr: 1, label_smoothing: 0.1}\ndata: {batch_size: 11}\n")
    Path("two.yaml").write_text("model: {label_smoothing: 0.2}\n")
    config = printed_config("--lr", "3", "--config", "one.yaml", "-c", "two.yaml", *SMALL)
    assert (config["model"]["lr"], config["model"]["label_smoothing"]) == (3, 0.2)
    assert (config["data"]["batch_size"], config["model"]["net"]) == (11, "lenet")


def test_a_checkpoints_settings_never_override_a_flag(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints/best.ckpt"
    answer = run_command("test", "--ckpt_path", checkpoint, "--batch-size", "7", "--lr", "0.125", "--seed=8")
    assert answer.code == 0, answer.err
    config = config_of(Path("lightning_logs/small-1"))
    assert (config["data"]["batch_size"], config["model"]["lr"], config["seed_everything"]) == (7, 0.125, 8)
    assert metrics_of(Path("lightning_logs/small-1"))["seed"] == 8


def test_logs_sets_the_folder_of_run_folders_and_another_seed_gives_other_weights(run_dir: Path) -> None:
    Path("own.yaml").write_text("logs: of_the_file\n")
    other_run = Path("some/runs/small-1")
    answer = run_command("fit", "--logs", "some/runs", *SMALL, "--config", "own.yaml", "--epochs", "1", "--seed", "4")
    assert f"run {other_run}" in answer.lines
    assert (other_run / "metrics.json").is_file()
    assert not Path("lightning_logs").exists()
    assert not Path("of_the_file").exists()
    weights, others = (checkpoint_of(run / "checkpoints/best.ckpt")["state_dict"] for run in (run_dir, other_run))
    assert any(not weights[name].equal(others[name]) for name in weights)


# ---- --debug


def test_debug_prints_the_traceback_before_the_same_line() -> None:
    plain, debugged = (run_command(*SMALL, "--epochs", "many", *more) for more in ((), ("--debug",)))
    assert "Traceback" not in plain.err
    assert "Traceback (most recent call last):" in debugged.err
    assert debugged.err.splitlines()[-1:] == plain.err.splitlines()
    assert debugged.code == plain.code == 2


def test_all_augmentation_is_turned_off_by_null() -> None:
    Path("off.yaml").write_text("data: {augment: null}\n")
    off = ["--data.augment", "null"]
    for flags in (off, ["--config", "off.yaml"], ["--data.augment.crop", "1", *off]):
        assert printed_config("--recipe", "quickstart", *flags)["data"]["augment"] == asdict(Augment())
    flags = [*off, "--data.augment.crop", "1"]
    assert printed_config("--recipe", "quickstart", *flags)["data"]["augment"] == asdict(Augment(crop=1))
