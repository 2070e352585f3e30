"""The commands: which there are, what each says of itself, and how soon."""

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
lines = ["--help", "--version", "recipes", "recipes quickstart", "trian", "fit --recipe quikstart", "train --epochs"]
codes = [main(line.split()) for line in lines]
print(codes, [name for name in ("torch", "torchvision", "lightning", "tensorboard") if name in sys.modules])
"""


def rows(table: str) -> list[list[str]]:
    """The cells of a printed table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]


def test_what_needs_no_torch_is_answered_without_importing_it() -> None:
    answer = started("-c", WITHOUT_TORCH)
    assert answer.out.splitlines()[-1] == "[0, 0, 0, 0, 2, 2, 2] []", answer.err


def test_the_console_script_is_main_and_python_m_and_the_scripts_answer_alike() -> None:
    (script,) = entry_points(group="console_scripts", name="cifar-lit")
    assert script.load() is main  # also when the module of that name has been imported
    answer = typed("--version")
    assert answer.out == f"cifar-lit {cifar_lit.__version__}\n"
    for program in (["-m", "cifar_lit"], [SCRIPTS / "train.py"], [SCRIPTS / "test.py"]):
        assert started(*program, "--version") == answer


# ---- recipes


def test_recipes_fit_100_columns_and_name_the_rest_where_it_is() -> None:
    answer = typed("recipes")
    assert answer.code == 0
    assert [row[0] for row in rows(answer.out)] == flags.recipe_names()
    assert {"quickstart", "laptop", "tudui", "lenet"} <= set(flags.recipe_names())
    assert all(len(row) == 4 and all(row) for row in rows(answer.out))
    assert max(map(len, answer.out.splitlines())) <= 100
    assert "python scripts/train.py --recipe NAME" in answer.out and "cifar-lit recipes NAME" in answer.out


@pytest.mark.parametrize("name", flags.recipe_names())
def test_recipes_name_prints_a_header_of_one_form_and_the_settings(name: str) -> None:
    answer = typed("recipes", name)
    assert answer.out == flags.recipe_path(name).read_text()
    title, *header = flags.recipe_header(flags.recipe_path(name))
    fields = dict(re.split(r": +", field, maxsplit=1) for field in header[:5])
    assert title.startswith(f"{name} — ")
    assert list(fields) == ["Score", "Time", "Hardware", "Date", "Command"]
    assert re.match(r"\d\d\.\d (± 0\.\d )?% \(n = \d+\)|not measured|as tudui", fields["Score"])
    assert fields["Command"].startswith(f"python scripts/train.py --recipe {name}")
    assert set(yaml.safe_load(answer.out)) <= {"seed_everything", "trainer", "model", "data"}


# ---- devices


@pytest.mark.parametrize("name", ["lenet", "whitened"])
def test_devices_with_a_net_lists_every_parameter_with_shape_count_and_device(name: str) -> None:
    shape = {"channels": 1, "image_size": 28, "num_classes": 7, "width": 2.0}
    for argv, net in (
        ([], build_net(name, channels=3, image_size=32, num_classes=10)),
        ([f"--{setting}={value}" for setting, value in shape.items()], build_net(name, **shape)),  # type: ignore[arg-type]
    ):
        answer = typed("devices", "--net", name, "--accelerator", "cpu", *argv)
        assert rows(answer.out) == [
            [parameter, "×".join(map(str, tensor.shape)), "float32", f"{tensor.numel():,}", "cpu"]
            for parameter, tensor in net.named_parameters()
        ]
        assert f"{name}: {sum(tensor.numel() for tensor in net.parameters()):,} parameters" in answer.out


# ---- LightningCLI's own


def test_a_run_prints_no_warning_tip_or_advert_even_where_each_warning_is_an_error() -> None:
    answer = started("-W", "error", "-m", "cifar_lit", "train", "--recipe", "small.yaml")
    assert (answer.code, answer.err) == (0, "")
    assert not re.search(r"warn|tip|💡|litlogger|GPU available|https?://", answer.out, re.IGNORECASE), answer.out
    assert Path("lightning_logs/small-1/metrics.json").is_file()
