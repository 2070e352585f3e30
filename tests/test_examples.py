"""The scheduler files in examples/ are well-formed, and the command line accepts their arguments."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import parse

EXAMPLES = Path(__file__).parent.parent / "examples"
# Options from https://slurm.schedmd.com/sbatch.html that a training may need.
SBATCH = {
    "account", "array", "chdir", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres",
    "job-name", "mail-type", "mail-user", "mem", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output",
    "partition", "qos", "requeue", "signal", "time",
}  # fmt: skip
SCRIPTS = ("slurm.sbatch", "slurm-seeds.sbatch")
SRUN = {"cpus-per-task", "kill-on-bad-exit"}  # from https://slurm.schedmd.com/srun.html


def settings(words: list[str]) -> dict[str, Any]:
    """Return the settings of a training command without running it."""
    command = parse(words[0], [*words[1:], "--print_config"])
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        TrainingCLI(command)
    assert ended.value.code == 0
    return yaml.safe_load(out.getvalue())


# ---- SLURM. training/test_slurm_drill.py runs these files.


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_slurm_file_is_a_bash_script_with_sbatch_options_before_its_first_command(name: str) -> None:
    sbatch = (EXAMPLES / name).read_text()
    assert subprocess.run(["bash", "-n", EXAMPLES / name], check=False, capture_output=True).stderr == b""
    head, commands = re.split(r"^(?=[^#\n])", sbatch, maxsplit=1, flags=re.MULTILINE)
    assert sbatch.startswith("#!/bin/bash\n") and "#SBATCH" not in commands
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, flags=re.MULTILINE))
    assert len(options) == head.count("#SBATCH")
    assert options.keys() <= SBATCH
    assert not any(" " in value for value in options.values())  # sbatch parses a comment on the line as options
    assert options.get("ntasks-per-node", options.get("ntasks")) == options["gpus-per-node"]
    assert "requeue" in options
    # The training handles SIGUSR1. A script that starts no step with srun gets it itself, and must handle it.
    assert re.fullmatch(r"USR1@\d+" if "\nsrun " in commands else r"B:USR1@\d+", options["signal"])
    assert ("array" in options) == ("%A_%a" in options["output"]) == ("SLURM_ARRAY_TASK_ID" in commands)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_line_accepts_the_training_of_the_srun_line(name: str) -> None:
    sbatch = (EXAMPLES / name).read_text().replace("$SLURM_ARRAY_TASK_ID", "7")
    (line,) = re.findall(r"^srun (?:.*\\\n)*.*", sbatch, flags=re.MULTILINE)
    before, _, ours = line.removeprefix("srun ").replace("\\\n", "").partition(" cifar-lit ")
    assert {word.removeprefix("--").partition("=")[0] for word in shlex.split(before)} == SRUN
    config = settings(shlex.split(ours))
    assert config["checkpoint_every"] == "10m"
    assert config["logs"].startswith("$HOME/cifar-lit/") and config["data"]["root"] == "$HOME/cifar-lit/data"
    assert config["seed_everything"] == (7 if name == "slurm-seeds.sbatch" else 0)
