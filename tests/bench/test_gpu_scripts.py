"""The GPU benchmark scripts: they survive failing parts, need only `python3`, and pack all results into one archive.

With -m stress they run completely, on a CPU, with a few steps of each training.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cifar_lit.data.shapes import shapes

ROOT = Path(__file__).parent.parent.parent
TOOLS = (
    "bash", "cp", "dirname", "env", "gzip", "mkdir", "mktemp", "realpath", "rm", "sh", "sleep", "tail", "tar", "tee",
    "timeout",
)  # fmt: skip
# A fake python3 that records its arguments. pytest fails, and a profile never ends.
RECORDER = """#!/bin/sh
echo "$*" >> "$RECORD"
case "$*" in "-m pytest"*) echo 1 failed; exit 1 ;; *profile_step*) exec sleep 100 ;; esac
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder with the commands that the scripts may use; it has no `python`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        path = shutil.which(name)
        assert path, name
        (folder / name).symlink_to(path)
    return folder


def run(script: str, tools: Path, *words: object, python: str = RECORDER, **variables: str) -> tuple[int, str]:
    """Return the exit code and the output of a script."""
    (tools / "python3").write_text(python)
    (tools / "python3").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name in ("HOME", "OMP_NUM_THREADS", "TMPDIR")}
    command = [tools / "bash", ROOT / "scripts" / script, *map(str, words)]
    env = {**inherited, "PATH": str(tools), "RECORD": str(tools.parent / "record.txt"), **variables}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("script", ["gpu_bench.sh", "gpu_check.sh"])
def test_a_failing_or_slow_part_is_named_at_the_end_and_the_others_run(
    script: str, tools: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    variables = {"LIMIT": "2", "AIRBENCH": "airbench94_muon.py", "DATA100": str(tools)}
    code, output = run(script, tools, tmp_path, out, **variables)
    calls = (tmp_path / "record.txt").read_text().splitlines()
    assert code == 1
    assert output.splitlines()[-1] == ("failed: tests profile" if script == "gpu_bench.sh" else "failed: tests")
    assert "not found" not in output
    assert calls[:2] == ["-m cifar_lit devices", "-m cifar_lit devices --check --accelerator gpu"]
    assert calls[-1] == f"scripts/benchmarks/table.py {out}"
    if script == "gpu_bench.sh":
        recipes = [line.split()[4] for line in calls if line.startswith("-m cifar_lit bench recipe")]
        assert recipes == [*["fast94"] * 8, "fast95", "fast96", "tudui", "fast100", "resnet18"]
        assert "airbench94_muon.py" in calls
        fast100 = next(line for line in calls if "recipe fast100" in line)
        assert f"--data-dir {tools}" in fast100
        assert fast100.endswith(f"--json {out}/fast100.json")  # named in the recipe's header
        assert "--model.capture false" in calls[2]  # the safest first
        with tarfile.open(f"{out}.tar.gz") as archive:
            assert {"./tests.txt", "./profile.txt", "./resnet18.txt", "./table.md"} <= set(archive.getnames())
    else:
        recipes = [line.split()[2] for line in calls if line.startswith("scripts/train.py")]
        assert recipes == ["quickstart", "tudui", "folder", "resnet18"]


def test_an_unknown_part_is_refused(tools: Path, tmp_path: Path) -> None:
    code, output = run("gpu_bench.sh", tools, tmp_path, tmp_path / "out", "fats94")
    assert (code, output.splitlines()[-1].startswith("no part is called fats94: there are check, step")) == (2, True)


@pytest.mark.stress
def test_the_scripts_run_completely_on_a_cpu_although_one_recipe_does_not_exist(tools: Path, tmp_path: Path) -> None:
    from PIL import Image

    drawn = shapes(True, image_size=32, num_classes=2, count=240)
    for number, (image, label) in enumerate(zip(drawn.images, drawn.labels.tolist(), strict=True)):
        file = tmp_path / "data" / ("train" if number < 200 else "test") / "ab"[label] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(file)
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    data, out, checks = tmp_path / "data", tmp_path / "out", tmp_path / "check"
    code, output = run("gpu_bench.sh", tools, data, out, python=python, TINY="1", FASTER="nonsense tudui")
    assert (code, output.splitlines()[-1]) == (1, "failed: fast-compile nonsense"), output  # the tools lack a compiler
    assert {file.stem for file in out.glob("*.json")} == {
        "eager", "captured", "first", "profile", "step", "fast-eager", "fast-benchmark", "fast-padded", "tudui",
        "tutorial", "cold", "input", "devices", "lenet",
    }  # fmt: skip
    variables = {"ACCELERATOR": "cpu", "EPOCHS": "1", "EPOCHS_RESNET": "1"}
    variables["EXTRA"] = "--trainer.limit_train_batches 3 --trainer.limit_val_batches 1"
    code, output = run("gpu_check.sh", tools, data, checks, python=python, **variables)
    assert code == 0, output
    assert {file.stem for file in checks.glob("*.json")} == {"quickstart", "tudui", "folder", "resnet18"}
