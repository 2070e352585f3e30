"""Commands that need no training: their output, and their start without torch."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from contract.command_line import run_command, run_process

from cifar_lit.base import hardware
from cifar_lit.cli import flags
from cifar_lit.cli.recipes import recipe_header
from cifar_lit.features import FEATURES

WITHOUT_TORCH = """
import sys
from cifar_lit.cli import main
lines = ["--help", "--version", "recipes quickstart", "trian", "fit --recipe quikstart"]
codes = [main(line.split()) for line in lines]
print(codes, [name for name in ("torch", "torchvision", "lightning", "tensorboard") if name in sys.modules])
"""


def test_help_a_recipe_and_wrong_commands_do_not_import_torch(working_folder: Path) -> None:
    answer = run_process([sys.executable, "-c", WITHOUT_TORCH], working_folder)
    assert answer.lines[-1] == "[0, 0, 0, 2, 2] []", answer.err


@pytest.mark.parametrize("name", flags.recipe_names())
def test_recipes_with_a_name_prints_its_header_and_settings(name: str) -> None:
    answer = run_command("recipes", name)
    assert answer.out == flags.recipe_path(name).read_text()
    title, *header = recipe_header(flags.recipe_path(name))
    fields = dict(re.split(r": +", field, maxsplit=1) for field in header[:6])
    assert title.startswith(f"{name} — ")
    assert list(fields) == ["Score", "Time", "Hardware", "Times", "Date", "Command"]
    assert re.match(r"\d\d\.\d\d (± \d\.\d\d )?% \(n = \d+\); |not measured yet$|as tudui", fields["Score"])
    assert fields["Command"].startswith(f"python scripts/train.py --recipe {name}")
    assert set(yaml.safe_load(answer.out)) <= {"seed_everything", "trainer", "model", "data", *FEATURES}


@pytest.mark.parametrize(
    ("bf16", "default"), [(True, flags.DEFAULT_RECIPES["bf16"]), (False, flags.DEFAULT_RECIPES["cpu"])]
)
def test_recipes_are_sorted_by_their_time_on_this_kind_of_machine_and_mark_the_default(
    bf16: bool, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(hardware.detect_machine(), bf16=bf16, gpus=())
    monkeypatch.setattr(hardware, "detect_machine", lambda: machine)
    monkeypatch.setenv("COLUMNS", "100")
    lines = run_command("recipes").lines
    assert max(map(len, lines)) <= 100
    rows = [re.split(r"  +", line) for line in lines[1 : len(flags.recipe_names()) + 1]]
    assert [row[0] for row in rows if row[0].endswith("*")] == [f"{default} *"]
    times = [row[4].removesuffix(" s").replace(",", "") for row in rows]
    measured = [float(time) for time in times if time != "–"]
    assert measured and measured == sorted(measured)
    assert set(times[len(measured) :]) <= {"–"}
