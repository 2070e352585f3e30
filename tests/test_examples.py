"""The scheduler files in examples/ are well-formed, and the command line accepts their arguments."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from contract.command_line import run_command

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = ("slurm.sbatch", "slurm-seeds.sbatch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_slurm_file_is_a_bash_script_with_sbatch_options_before_its_first_command(name: str) -> None:
    sbatch = (EXAMPLES / name).read_text()
    assert subprocess.run(["bash", "-n", EXAMPLES / name], check=False, capture_output=True).stderr == b""
    head, commands = re.split(r"^(?=[^#\n])", sbatch, maxsplit=1, flags=re.MULTILINE)
    assert sbatch.startswith("#!/bin/bash\n") and "#SBATCH" not in commands
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, flags=re.MULTILINE))
    assert not any(" " in value for value in options.values())  # sbatch parses a comment on the line as options
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "requeue" in options and options["signal"].startswith("USR1@")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_line_accepts_the_training_of_the_srun_line(name: str) -> None:
    sbatch = (EXAMPLES / name).read_text().replace("$SLURM_ARRAY_TASK_ID", "7")
    (line,) = re.findall(r"^srun (?:.*\\\n)*.*", sbatch, flags=re.MULTILINE)
    words = shlex.split(line.replace("\\\n", "").partition(" cifar-lit ")[2])
    answer = run_command(*words, "--print_config")
    assert answer.code == 0, answer.err
    config = yaml.safe_load(answer.out)
    assert config["checkpoint_every"] == 500
    assert config["seed_everything"] == (7 if name == "slurm-seeds.sbatch" else 0)
