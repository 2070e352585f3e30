"""The scripts that measure on a GPU: one thing that fails ends nothing, `python3` is all they call, and all is in one archive.

With -m stress they run whole, on a CPU, with a few steps of each training.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from cifar_lit.data.shapes import shapes

ROOT = Path(__file__).parent.parent.parent
TOOLS = [
    "bash",
    "cp",
    "dirname",
    "mkdir",
    "mktemp",
    "realpath",
    "rm",
    "sleep",
    "tail",
    "tar",
    "gzip",
    "tee",
    "timeout",
    "env",
]
TOOLS += ["sh"]
# Notes what it is asked to run; a run of pytest fails, and a profile never ends.
NOTING = """#!/bin/sh
echo "$*" >> "$NOTES"
case "$*" in "-m pytest"*) echo 1 failed; exit 1 ;; *profile_step*) exec sleep 100 ;; esac
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with all that the scripts may call; there is no `python` in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        path = shutil.which(name)
        assert path, name
        (folder / name).symlink_to(path)
    return folder


def run(script: str, tools: Path, words: Sequence[str], **variables: str) -> tuple[int, str]:
    """The exit code of a script, and all that it printed."""
    own = {name: value for name, value in os.environ.items() if name in ("HOME", "OMP_NUM_THREADS", "TMPDIR")}
    done = subprocess.run(
        [tools / "bash", ROOT / "scripts" / script, *words],
        env={**own, "PATH": str(tools), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("script", ["gpu_bench.sh", "gpu_check.sh"])
def test_what_fails_or_takes_too_long_is_named_at_the_end_and_ends_nothing(
    script: str, tools: Path, tmp_path: Path
) -> None:
    (tools / "python3").write_text(NOTING)
    (tools / "python3").chmod(0o755)
    out, notes = tmp_path / "out", tmp_path / "notes"
    variables = {"LIMIT": "2", "AIRBENCH": "airbench94_muon.py", "DATA100": str(tmp_path / "bin")}
    code, said = run(script, tools, [str(tmp_path), str(out)], NOTES=str(notes), **variables)
    asked = notes.read_text().splitlines()
    assert code == 1
    assert said.splitlines()[-1] == ("failed: tests profile" if script == "gpu_bench.sh" else "failed: tests")
    assert "not found" not in said
    assert asked[:2] == ["-m cifar_lit devices", "-m cifar_lit devices --check --accelerator gpu"]
    assert asked[-1] == f"scripts/benchmarks/table.py {out}"
    if script == "gpu_bench.sh":
        recipes = [line.split()[4] for line in asked if line.startswith("-m cifar_lit bench recipe")]
        assert recipes == [*["fast94"] * 8, "fast95", "fast96", "tudui", "fast100", "resnet18"]
        assert "airbench94_muon.py" in asked
        hundred = next(line for line in asked if "recipe fast100" in line)
        assert f"--data-dir {tmp_path / 'bin'}" in hundred
        assert hundred.endswith(f"--json {out}/fast100.json")  # which the recipe's header names
        assert "--model.capture false" in asked[2]  # what is safest first
        with tarfile.open(f"{out}.tar.gz") as archive:
            assert {"./tests.txt", "./profile.txt", "./resnet18.txt", "./table.md"} <= set(archive.getnames())
    else:
        recipes = [line.split()[2] for line in asked if line.startswith("scripts/train.py")]
        assert recipes == ["quickstart", "tudui", "folder", "resnet18"]


def test_a_part_that_there_is_not_is_refused(tools: Path, tmp_path: Path) -> None:
    code, said = run(
        "gpu_bench.sh", tools, [str(tmp_path), str(tmp_path / "out"), "fats94"], NOTES=str(tmp_path / "notes")
    )
    assert (code, said.splitlines()[-1].startswith("no part is called fats94: there are check, step")) == (2, True)


@pytest.mark.stress
def test_the_scripts_run_whole_on_a_cpu_though_one_recipe_is_none(tools: Path, tmp_path: Path) -> None:
    from PIL import Image

    drawn = shapes(True, image_size=32, num_classes=2, count=240)
    for number, (image, label) in enumerate(zip(drawn.images, drawn.labels.tolist(), strict=True)):
        file = tmp_path / "data" / ("train" if number < 200 else "test") / "ab"[label] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(file)
    (tools / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tools / "python3").chmod(0o755)
    data, out = str(tmp_path / "data"), tmp_path / "out"
    code, said = run("gpu_bench.sh", tools, [data, str(out)], TINY="1", FASTER="nonsense tudui")
    assert (code, said.splitlines()[-1]) == (1, "failed: fast-compile nonsense"), said  # no compiler is among the tools
    figures = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
    named = {"eager", "captured", "first", "profile", "step", "fast-eager", "fast-benchmark", "fast-padded", "tudui"}
    assert named | {"tutorial", "cold", "input", "devices", "lenet"} == figures.keys()
    few = {
        "EPOCHS": "1",
        "EPOCHS_RESNET": "1",
        "EXTRA": "--trainer.limit_train_batches 3 --trainer.limit_val_batches 1",
    }
    code, said = run("gpu_check.sh", tools, [data, str(tmp_path / "check")], ACCELERATOR="cpu", **few)
    assert code == 0, said
    trained = {file.stem for file in (tmp_path / "check").glob("*.json")}
    assert trained == {"quickstart", "tudui", "folder", "resnet18"}
