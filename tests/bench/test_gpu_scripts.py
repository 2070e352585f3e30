"""`gpu_bench.sh`: failing and slow measurements are named, only `python3` is needed, and one archive has all results.

It runs completely on a CPU, with three small steps of each training.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_python
import pytest
from contract.command_line import ROOT

TOOLS = (
    "bash", "dirname", "env", "grep", "gzip", "ln", "mkdir", "mktemp", "realpath", "rm", "sh", "sleep", "tar", "tee",
    "timeout",
)  # fmt: skip
# A fake python3 that records its arguments. pytest fails, and a profile never ends.
RECORDER = """#!/bin/sh
echo "$*" >> "$RECORD"
echo "logs: $TORCH_LOGS"
case "$*" in "-m pytest"*) echo 1 failed; exit 1 ;; *profile_step*) exec sleep 100 ;; esac
for word; do case $previous in --json) echo {} > "$word" ;; esac; previous=$word; done
"""
# A program that reads the images as airbench94_muon.py does, and fails.
AIRBENCH = """import torchvision
images = torchvision.datasets.CIFAR10("cifar10", download=True)
raise SystemExit(f"{len(images)} images")
"""
PARTS = (
    "check fast94 airbench step variants fast95 fast96 fast97 fast100 resnet18 resnet18-uncompiled resnet18-eager "
    "resnet18_30 resnet18_30_c100 rest"
)
Bench = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Return a function that runs gpu_bench.sh with few commands on the PATH, and returns its exit code and output."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        path = shutil.which(name)
        assert path, name
        (tools / name).symlink_to(path)

    def run(*words: object, python: str = RECORDER, **variables: str) -> tuple[int, list[str]]:
        (tools / "python3").write_text(python)
        (tools / "python3").chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name in ("HOME", "OMP_NUM_THREADS", "TMPDIR")}
        env = {**inherited, "PATH": str(tools), "RECORD": str(tmp_path / "record.txt"), **variables}
        command = [tools / "bash", ROOT / "scripts" / "gpu_bench.sh", *map(str, words)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert "not found" not in done.stdout and "unbound" not in done.stdout
        return done.returncode, done.stdout.splitlines()

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with the names of both archives."""
    for name in ("cifar-10-batches-py", "cifar-100-python"):
        (tmp_path / "data" / name).mkdir(parents=True)
    return tmp_path / "data"


def calls(folder: Path) -> list[str]:
    return (folder / "record.txt").read_text().splitlines()


def test_a_failing_or_slow_measurement_is_named_at_the_end_and_the_others_run(
    bench: Bench, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, output = bench(data, out, LIMIT="2", AIRBENCH="airbench94_muon.py", DATA100=str(data))
    assert (code, output[-1]) == (1, "failed: tests, profile (stopped after 2 s)")
    lines = calls(tmp_path)
    assert "logs: recompiles" in (out / "fast94.txt").read_text()
    assert lines[0] == "-m cifar_lit devices --check --accelerator gpu"
    assert "--compile null" in lines[1]  # the safest first
    assert lines[-1] == f"scripts/benchmarks/table.py {out}"
    assert f"{tmp_path}/airbench94_muon.py" in lines
    trainings = [line.split() for line in lines if line.startswith("-m cifar_lit bench recipe")]
    assert [words[4] for words in trainings] == [
        *["fast94"] * 7, "fast95", "fast96", "fast97", "fast100", *["resnet18"] * 3, "resnet18_30",
        "resnet18_30_c100", "tudui",
    ]  # fmt: skip
    datasets = {words[4]: words[words.index("--dataset") + 1] for words in trainings}
    assert datasets == dict.fromkeys(
        ("fast94", "fast95", "fast96", "fast97", "resnet18", "resnet18_30", "tudui"), "cifar10"
    ) | dict.fromkeys(("fast100", "resnet18_30_c100"), "cifar100")
    for words in trainings:  # the files that the headers of the recipes name
        assert words[-1].startswith(f"{out}/{words[4]}") and words[-2] == "--json"
    with tarfile.open(f"{out}.tar.gz") as archive:
        names = {f"./{name}" for name in ("tests.txt", "profile.txt", "resnet18.json", "table.md")}
        assert names <= set(archive.getnames())


def test_the_rest_of_a_part_that_takes_too_long_is_skipped_and_named(bench: Bench, tmp_path: Path) -> None:
    slow = '#!/bin/sh\ncase "$*" in *fast94*) exec sleep 100 ;; esac\n'
    code, output = bench(tmp_path, tmp_path / "out", "variants", "fast95", python=slow, PART_SECONDS="1")
    skipped = "skipped, because their part had taken 1 s: fast94-eager, fast94-unbenchmarked, fast94-padded"
    assert (code, output[-2:]) == (1, [skipped, "failed: fast94-uncompiled (stopped after 1 s)"])
    assert any("bench recipe fast95" in line for line in output)  # each part has its own time


def test_only_the_files_with_gpu_tests_are_collected(bench: Bench, tmp_path: Path) -> None:
    bench(tmp_path, tmp_path / "out", "check")
    (line,) = [line for line in calls(tmp_path) if line.startswith("-m pytest")]
    files = (ROOT / "tests").rglob("test_*.py")
    marked = {str(file.relative_to(ROOT)) for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())}
    assert set(line.split()[5:]) == marked >= {"tests/features/test_capture.py", "tests/training/test_gpu.py"}


def test_images_are_read_from_folders_unless_there_is_an_archive(bench: Bench, data: Path, tmp_path: Path) -> None:
    for place, variables in ((tmp_path, {}), (data, {}), (data, {"DATASET": "shapes"})):
        assert bench(place, tmp_path / "out", "fast95", **variables)[0] == 0
    chosen = [re.findall(r"--dataset (\w+)", line) for line in calls(tmp_path) if "recipe" in line]
    assert chosen == [["folder"], ["cifar10"], ["shapes"]]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["out", "fats94"], "no part fats94: there are check fast94 step"),
        (["out", "fast100"], "no part fast100"),  # without DATA100
        (["out", "airbench"], "no part airbench"),
    ],
)
def test_an_unknown_part_is_refused_before_any_measurement(
    words: list[str], answer: str, bench: Bench, tmp_path: Path
) -> None:
    code, (line,) = bench(tmp_path, tmp_path / words[0], "check", words[1])
    assert (code, line.startswith(answer)) == (2, True)
    assert not (tmp_path / "record.txt").exists()


@pytest.fixture
def python_and_data(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Return a python3 that starts at once, and a folder with small archives of both CIFARs, valid for it only."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        path = f"{folder}/socket"
        server = subprocess.Popen([sys.executable, forked_python.__file__, path, tmp_path / "data"], process_group=0)
        try:
            while not (tmp_path / "data" / "cifar-100-python" / "meta").exists():
                assert server.poll() is None
                time.sleep(0.05)
            yield forked_python.CLIENT.format(python=sys.executable, path=path), tmp_path / "data"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.mark.slow
def test_a_dry_run_measures_everything_on_a_cpu(
    bench: Bench, python_and_data: tuple[str, Path], tmp_path: Path
) -> None:
    python, data = python_and_data
    program, out = tmp_path / "airbench.py", tmp_path / "out"
    program.write_text(AIRBENCH)
    places = {"AIRBENCH": str(program), "DATA100": str(data), "LOGS": str(tmp_path / "logs")}
    code, output = bench(data, out, python=python, TINY="1", **places)
    text = "\n".join(output)
    assert (code, output[-1]) == (1, "failed: airbench"), text
    assert (out / "airbench.txt").read_text().splitlines()[-1] == "100 images"
    variants = [f"fast94-{variant}" for variant in ("eager", "uncompiled", "unbenchmarked", "padded")]
    names = {"fast94", *variants, "fast95", "fast96", "fast97", "fast100", "resnet18", "resnet18-eager"}
    names |= {"resnet18-uncompiled", "resnet18_30", "resnet18_30_c100"}
    assert {file.stem for file in out.glob("*.json")} == {
        *names, "tudui", "profile", "step", "step-eager", "input", "devices",
    }  # fmt: skip
