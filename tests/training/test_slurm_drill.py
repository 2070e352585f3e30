"""The SLURM files in examples/, under a stand-in for SLURM: preempted and requeued, they end as if undisturbed."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import metrics_of
from real_runs import LIMIT, SETTINGS, STEPS_PER_EPOCH, environment, only_run, run_here, same_bits
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
from cifar_lit.cli import main
sys.exit(main(words))
"""
COMMANDS = {"srun": SRUN, "scontrol": SCONTROL, "cifar-lit": CIFAR_LIT}


class Slurm:
    """A cluster with the home folder `home`, where job 5 may run.

    Args:
        variables: more environment variables of the job.
    """

    def __init__(self, home: Path, script: str, tasks: int, **variables: str) -> None:
        self.home, self.script = home, EXAMPLES / script
        (home / "bin").mkdir()
        for name, text in COMMANDS.items():
            (home / "bin" / name).write_text(text)
            (home / "bin" / name).chmod(0o755)
        path = f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        job = {"SLURM_JOB_NAME": "night", "SLURM_CPUS_PER_TASK": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
        batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": str(tasks)}
        self.variables = environment(**job, **batch, HOME=str(home), PATH=path, **variables)

    @property
    def requests(self) -> list[str]:
        """Arguments of the calls of scontrol."""
        file = self.home / "requests"
        return file.read_text().splitlines() if file.exists() else []

    def start(self, job: str, restarts: int) -> subprocess.Popen[bytes]:
        """Start the script of job 5, or of the task T of the job array 5 for `5_T`."""
        _, _, task = job.partition("_")
        own = {"SLURM_JOB_ID": str(5 + int(task or 0))}
        if task:
            own |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": task}
        if restarts:
            own["SLURM_RESTART_COUNT"] = str(restarts)
        with (self.home / f"{job}.out").open("ab") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
            return subprocess.Popen(["bash", self.script], cwd=self.home, env=self.variables | own, **streams)

    def run(self, job: str) -> list[int]:
        """Run a job as often as it is requeued, and return its exit codes."""
        codes: list[int] = []
        while len(codes) <= self.requests.count(f"requeue {job}"):
            codes.append(self.wait(self.start(job, len(codes))))
        return codes

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code. Kill the processes of a job that does not end."""
        try:
            return process.wait(LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


PREEMPTED = {"AT_STEP": str(STEPS_PER_EPOCH + 6), "AT_STEP_SIGNAL": str(int(signal.SIGUSR1))}


def assert_equal_runs(run: Path, expected: Path) -> None:
    assert same_bits(load_file(run / "model.safetensors"), load_file(expected / "model.safetensors"))
    assert metrics_of(run)["test"] == metrics_of(expected)["test"]
    assert (run / "predictions.csv").read_text() == (expected / "predictions.csv").read_text()


def test_a_preempted_job_is_requeued_and_ends_like_an_uninterrupted_one(tmp_path: Path, pair: Path) -> None:
    slurm = Slurm(tmp_path, "slurm.sbatch", tasks=2, **PREEMPTED)
    assert slurm.run("5") == [138, 0], (tmp_path / "5.out").read_text()
    assert slurm.requests == ["requeue 5"]
    (run,) = (tmp_path / "cifar-lit/runs").iterdir()
    assert_equal_runs(run, only_run(pair))


def test_the_seeds_of_a_preempted_array_end_like_uninterrupted_runs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    slurm = Slurm(home, "slurm-seeds.sbatch", tasks=1, **PREEMPTED)
    seeds = (0, 1)
    with ThreadPoolExecutor() as tasks:
        codes = [*tasks.map(slurm.run, [f"5_{seed}" for seed in seeds])]
    assert codes == [[138, 0]] * 2, "".join(path.read_text() for path in home.glob("*.out"))
    assert sorted(slurm.requests) == [f"requeue 5_{seed}" for seed in seeds]
    runs = {metrics_of(run)["seed"]: run for run in (home / "cifar-lit/seeds").iterdir()}
    assert sorted(runs) == [*seeds]
    for seed in seeds:
        alone = tmp_path / str(seed)
        assert run_here(["train", *SETTINGS, "--seed", str(seed)], alone).code == 0
        assert_equal_runs(runs[seed], only_run(alone))
