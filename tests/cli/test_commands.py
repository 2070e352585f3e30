from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from command_line import started, typed

import cifar_lit
from cifar_lit.cli import flags, main
from cifar_lit.models.registry import build_net

SCRIPTS = Path(__file__).parents[2] / "scripts"
WITHOUT_TORCH = """
import sys
from cifar_lit.cli import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "torchvision", "lightning", "tensorboard") if name in sys.modules]
print(code, heavy)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["recipes"], 0),
        (["recipes", "quickstart"], 0),
        (["trian"], 2),
        (["fit", "--recipe", "quikstart"], 2),
        (["train", "--epochs"], 2),
    ],
)
def test_what_needs_no_torch_is_answered_without_importing_it(words: list[str], code: int) -> None:
    answer = started("-c", WITHOUT_TORCH, *words, seconds=20)
    assert answer.out.splitlines()[-1] == f"{code} []", answer.err


def test_help_names_every_command_and_short_flag() -> None:
    answer = typed("--help", default="fit")
    assert answer.code == 0
    for name in (*flags.TRAINING, "recipes", "devices"):
        assert re.search(rf"^  {name} ", answer.out, re.MULTILINE), name
    for flag in (*flags.SHORT, *flags.OWN):
        assert re.search(rf"--{flag}\b", answer.out), flag
    assert answer == typed("-h", default="fit") == typed("help", default="fit") == typed(default="fit")


def test_version_is_the_packages() -> None:
    assert typed("--version").out == f"cifar-lit {cifar_lit.__version__}\n"


def test_the_console_script_is_main_and_python_m_and_the_scripts_answer_alike() -> None:
    (script,) = entry_points(group="console_scripts", name="cifar-lit")
    assert script.load() is main
    expected = typed("--version")
    for program in (["-m", "cifar_lit"], [SCRIPTS / "train.py"], [SCRIPTS / "test.py"]):
        assert started(*program, "--version", seconds=20) == expected


# ---- recipes


def test_recipes_lists_each_packaged_recipe_with_what_it_is() -> None:
    answer = typed("recipes")
    assert answer.code == 0
    names = [line.split("│")[1].strip() for line in answer.out.splitlines() if line.startswith("│")]
    assert [name for name in names if name] == flags.recipe_names()
    assert "quickstart" in flags.recipe_names()
    assert "python scripts/train.py --recipe NAME" in answer.out


@pytest.mark.parametrize("name", flags.recipe_names())
def test_recipes_name_prints_its_file(name: str) -> None:
    answer = typed("recipes", name)
    assert answer.out == flags.recipe_path(name).read_text()
    assert yaml.safe_load(answer.out)["model"]


# ---- devices


def test_devices_names_the_processor_and_the_flags_that_use_it() -> None:
    answer = typed("devices")
    assert answer.code == 0
    assert re.search(r"│ cpu .*--accelerator cpu", answer.out)
    assert "torch " in answer.out
    assert "lightning " in answer.out


@pytest.mark.parametrize("name", ["lenet", "whitened"])
@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ([], {"channels": 3, "image_size": 32, "num_classes": 10, "width": 1.0}),
        (
            ["--channels=1", "--image_size=28", "--num_classes=7", "--width=2"],
            {"channels": 1, "image_size": 28, "num_classes": 7, "width": 2.0},
        ),
    ],
)
def test_devices_with_a_net_lists_every_parameter_with_shape_count_and_device(
    words: list[str], shape: dict[str, int], name: str
) -> None:
    answer = typed("devices", "--net", name, "--accelerator", "cpu", *words)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in answer.out.splitlines() if line.startswith("│")]
    net = build_net(name, **shape)
    expected = [
        [parameter, "×".join(map(str, tensor.shape)), "float32", f"{tensor.numel():,}", "cpu"]
        for parameter, tensor in net.named_parameters()
    ]
    assert rows == expected
    total = sum(tensor.numel() for tensor in net.parameters())
    assert f"{name}: {total:,} parameters" in answer.out


# ---- LightningCLI's own


def test_a_printed_configuration_is_yaml_that_holds_recipe_and_flags() -> None:
    words = ["fit", "--lr", "0.25", "--recipe", "small.yaml", "--devices", "2"]
    answer = typed(*words, "--print_config=skip_default")
    assert (answer.code, answer.err) == (0, "")
    settings = yaml.safe_load(answer.out)
    assert settings["model"]["lr"] == 0.25
    assert settings["model"]["net"] == "lenet"
    assert settings["data"]["count"] == 200
    assert settings["trainer"]["max_epochs"] == 2
    assert str(settings["trainer"]["devices"]) == "2"
    whole = yaml.safe_load(typed(*words, "--print_config").out)
    assert whole["model"].items() > settings["model"].items()
    assert not Path("lightning_logs").exists()


def test_a_printed_configuration_can_be_run_from() -> None:
    Path("own.yaml").write_text(typed("fit", "--recipe", "small.yaml", "--print_config").out)
    answer = typed("train", "--config", "own.yaml", "--epochs", "1")
    assert answer.code == 0, answer.err
    assert "run lightning_logs/small-1" in answer.out.splitlines()


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_names_the_settings_of_trainer_model_and_data(command: str) -> None:
    answer = typed(command, "--help")
    assert answer.code == 0
    for flag in (
        "--trainer.max_epochs",
        "--trainer.precision",
        "--model.net",
        "--model.lr",
        "--data.dataset",
        "--data.batch_size",
        "--logs",
    ):
        assert re.search(rf"{re.escape(flag)}\b", answer.out), flag
    assert "--print_config" in answer.out
    assert not Path("lightning_logs").exists()
