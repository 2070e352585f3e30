"""The SLURM file in examples/, under a stand-in for SLURM: preempted and requeued, it ends as if undisturbed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from contract.command_line import metrics_of
from real_runs import LIMIT, SETTINGS, STEPS_PER_EPOCH, environment, only_run, same_bits
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="signals")]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
# srun starts a process for each task, and fails if one of them fails.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = '#!/bin/sh\necho "$@" >> "$HOME/requests"\n'
# The training of SETTINGS in place of the recipe.
CIFAR_LIT = f"""#!{sys.executable}
import sys
words = sys.argv[1:]
if words[0] == "train":
    words[1:3] = {SETTINGS}
    place = words.index("--data-dir")  # its images are drawn
    del words[place : place + 2]
from cifar_lit.cli import main
sys.exit(main(words))
"""
COMMANDS = {"srun": SRUN, "scontrol": SCONTROL, "cifar-lit": CIFAR_LIT}


PREEMPTED = {"AT_STEP": str(STEPS_PER_EPOCH + 6), "AT_STEP_SIGNAL": str(int(signal.SIGUSR1))}


def test_a_preempted_job_is_requeued_and_ends_like_an_uninterrupted_one(tmp_path: Path, pair: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "night", "SLURM_CPUS_PER_TASK": "1", "SLURM_NNODES": "1"}
    batch = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    variables = environment(**job, **batch, **PREEMPTED, HOME=str(tmp_path), PATH=path)
    for restarts, code in (("0", 138), ("1", 0)):
        variables["SLURM_RESTART_COUNT"] = restarts
        script = ["bash", str(EXAMPLES / "slurm.sbatch")]
        done = subprocess.run(script, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == code, done.stderr
    assert (tmp_path / "requests").read_text() == "requeue 5\n"
    (run,) = (tmp_path / "cifar-lit/runs").iterdir()
    expected = only_run(pair)
    assert same_bits(load_file(run / "model.safetensors"), load_file(expected / "model.safetensors"))
    assert metrics_of(run)["test"] == metrics_of(expected)["test"]
