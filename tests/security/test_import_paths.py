"""The working folder is not on the import path, and only typed or trusted names are imported."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import assert_refused, draw_folder, run_command
from security.hostile_files import BESIDE

from cifar_lit import plugins
from cifar_lit.cli.trust import SAFE
from cifar_lit.runs.config_file import PLACES

# Text settings of the classes in SAFE that are not paths.
NO_PLACES = {"console_kwargs", "device", "duration", "interval", "mode", "monitor", "prefix", "process_group_backend"}
OWN_CALLBACK = "import helper_beside\nfrom lightning.pytorch.callbacks import Callback\nclass Own(Callback): pass\n"
OWN_NET = """from torch import nn
def net(channels, image_size, num_classes, width):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size[0] * image_size[1], num_classes))
"""


# Files that libraries search for, and settings of the Trainer that its parser could read as file names.
TRAPS = (
    "matplotlibrc", "auto", "simple", "libcuda.so.1", "pyproject.toml", "setup.cfg", ".env", ".netrc",
    "sitecustomize.py", "usercustomize.py", "_ops.py", "_classes.py", "fonts.conf", ".condarc", "hparams.yaml", "lenet",
    "shapes",
)  # fmt: skip
# Run command lines in one process, and print the files opened in the working folder and the libraries loaded from it.
WATCH = """
import os, sys
here, opened = os.getcwd(), set()
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.add(os.path.relpath(os.path.join(os.getcwd(), arguments[0]), here))
sys.addaudithook(watch)
from cifar_lit.cli import main
for line in sys.argv[1:]:
    assert main(line.split()) == 0, line
loaded = [line for line in open("/proc/self/maps") if here in line and "libcuda" in line]
traps = opened & set(os.listdir())
print("opened:", *sorted(traps - {"small.yaml", "lightning_logs"}), "loaded:", *loaded)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads loaded libraries from Linux's /proc")
def test_no_library_reads_files_of_the_working_folder(working_folder: Path, environment: dict[str, str]) -> None:
    for name in TRAPS:
        (working_folder / name).write_text("class_path: evil.Evil\n")
    (working_folder / "matplotlibrc").write_text("savefig.dpi: 5000\n")
    library = str(import_module("markupsafe._speedups").__file__)  # small, and without libraries of its own
    shutil.copy(library, "libcuda.so.1")
    run = "lightning_logs/small-1"
    lines = [
        "train --recipe small.yaml --epochs 1 --trainer.profiler simple",
        f"report {run} --accelerator cpu",
        f"classify {run} images",
        f"compare {run} --plot curves.png",
    ]
    draw_folder(working_folder / "images", {"a": 1})
    command = [sys.executable, "-c", WATCH, *lines]
    safe = {**environment, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=working_folder, env=safe, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["opened: loaded:"]), done.stderr


@pytest.mark.slow
def test_no_process_imports_modules_of_the_working_folder(working_folder: Path, environment: dict[str, str]) -> None:
    for name in ("yaml", "torch", "jsonargparse", "rich", "pathlib", "json"):
        (working_folder / f"{name}.py").write_text(BESIDE["evil.py"])
    words = ["fit", "--recipe", "small.yaml", "--trainer.logger", "TensorBoardLogger", "--print_config"]
    command = [sys.executable, "-m", "cifar_lit", *words]
    done = subprocess.run(command, cwd=working_folder, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "TensorBoardLogger" in done.stdout
    assert not (working_folder / "ran").exists()


def test_the_working_folder_is_searched_only_while_a_typed_module_is_imported(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_folder / "own_beside.py").write_text(OWN_CALLBACK)
    (working_folder / "helper_beside.py").write_text("")
    searched: list[str] = []

    class Watch:
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if path is None and str(working_folder) in sys.path:
                searched.append(name)
            return None

    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    answer = run_command("--recipe", "small.yaml", "--epochs", "1", "--trainer.callbacks", "own_beside.Own")
    assert answer.code == 0, answer.err
    assert searched == ["own_beside", "helper_beside"]


def test_every_text_setting_of_a_safe_class_is_classified_as_path_or_other() -> None:
    for group, names in SAFE.items():
        for name in names:
            parameters = inspect.signature(getattr(import_module(f"lightning.pytorch.{group}"), name)).parameters
            annotations = {key: str(parameter.annotation) for key, parameter in parameters.items()}
            texts = {key for key, annotation in annotations.items() if "str" in annotation or "Path" in annotation}
            assert texts - PLACES - NO_PLACES == set(), f"{name} has new settings: are they paths?"


def test_a_net_of_a_run_from_elsewhere_is_imported_only_with_trust(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "nets_from_elsewhere"
    (working_folder / f"{module}.py").write_text(OWN_NET)
    words = ("--recipe", "small.yaml", "--epochs", "1", "--net", f"{module}.net")
    assert run_command(*words).code == 0
    run = working_folder / "lightning_logs/small-1"
    export = ("export", run, "--to", "safetensors", "--images", "10", "--out")
    assert run_command(*export, "own.safetensors").code == 0  # a run of this user wrote its configuration
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n")
    sys.modules.pop(module)
    monkeypatch.setattr(plugins, "_allowed", set())  # a new process would start like this
    answer = run_command(*export, "other.safetensors")
    assert_refused(answer, 2, f"{module}.net would run code of its module", "--trust")
    assert module not in sys.modules
    assert run_command(*export, "other.safetensors", "--trust").code == 0


def test_a_trusted_configuration_may_choose_paths(working_folder: Path) -> None:
    (working_folder / "work").mkdir()
    os.chdir(working_folder / "work")
    words = ("fit", "--recipe", "../small.yaml", "--epochs", "1", "--config", "own.yaml")
    Path("own.yaml").write_text(f"logs: {working_folder}/elsewhere\n")
    assert_refused(run_command(*words), 2, "a configuration file sets logs to", "type that setting yourself", "--trust")
    assert run_command(*words, "--trust").code == 0
    assert run_command(*words, "--logs", f"{working_folder}/elsewhere").code == 0
    own = f"{working_folder}/elsewhere/small-1/config.yaml"  # written by a run of this user
    assert run_command("fit", "--config", own).code == 0
    assert len(list((working_folder / "elsewhere").iterdir())) == 3
