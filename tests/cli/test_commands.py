"""Commands that need no training: their output, and their start without torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from contract.command_line import run_command, run_process, table_rows

from cifar_lit.cli import flags
from cifar_lit.cli.recipes import recipe_header
from cifar_lit.features import FEATURES
from cifar_lit.models.registry import build_net

WITHOUT_TORCH = """
import sys
from cifar_lit.cli import main
lines = ["--help", "--version", "recipes", "recipes quickstart", "trian", "fit --recipe quikstart", "train --epochs"]
codes = [main(line.split()) for line in lines]
print(codes, [name for name in ("torch", "torchvision", "lightning", "tensorboard") if name in sys.modules])
"""


def test_help_recipes_and_wrong_commands_do_not_import_torch(working_folder: Path) -> None:
    answer = run_process([sys.executable, "-c", WITHOUT_TORCH], working_folder)
    assert answer.lines[-1] == "[0, 0, 0, 0, 2, 2, 2] []", answer.err


@pytest.mark.parametrize("name", flags.recipe_names())
def test_recipes_with_a_name_prints_its_header_and_settings(name: str) -> None:
    answer = run_command("recipes", name)
    assert answer.out == flags.recipe_path(name).read_text()
    title, *header = recipe_header(flags.recipe_path(name))
    fields = dict(re.split(r": +", field, maxsplit=1) for field in header[:5])
    assert title.startswith(f"{name} — ")
    assert list(fields) == ["Score", "Time", "Hardware", "Date", "Command"]
    assert re.match(r"\d\d\.\d\d (± \d\.\d\d )?% \(n = \d+\); |not measured yet$|as tudui", fields["Score"])
    assert fields["Command"].startswith(f"python scripts/train.py --recipe {name}")
    assert set(yaml.safe_load(answer.out)) <= {"seed_everything", "trainer", "model", "data", *FEATURES}


def test_devices_with_a_net_lists_every_parameter_with_its_shape_and_count() -> None:
    settings = {"channels": 1, "image_size": 28, "num_classes": 7, "width": 2.0}
    net = build_net("lenet", **settings)  # type: ignore[arg-type]
    answer = run_command("devices", "--net", "lenet", *(f"--{name}={value}" for name, value in settings.items()))
    assert table_rows(answer.out) == [
        [name, "×".join(map(str, tensor.shape)), "float32", f"{tensor.numel():,}"]
        for name, tensor in net.named_parameters()
    ]
    assert f"lenet: {sum(tensor.numel() for tensor in net.parameters()):,} parameters" in answer.out
