"""The SLURM files in examples/, under a stand-in for SLURM: preempted and requeued, they end as if undisturbed."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract.command_line import RECIPE, metrics_of
from real_runs import LIMIT, SETTINGS, STEPS_PER_EPOCH, environment, only_run, run_here, same_bits
from safetensors.torch import load_file

if HAS_BUCKETS := bool(find_spec("obstore") and find_spec("moto")):
    from extras.cloud.spoiled_bucket import bucket, new_process, server

    __all__ = ["bucket", "new_process", "server"]

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
# The training of SETTINGS in place of the recipe, and a database in a file.
CIFAR_LIT = f"""#!{sys.executable}
import os, sys
words = [f"sqlite:///{{os.environ['HOME']}}/sweeps.db" if "sql:" in word else word for word in sys.argv[1:]]
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


@pytest.mark.skipif(not HAS_BUCKETS, reason="pip install 'cifar-lit[cloud]' 'moto[s3,server]'")
def test_a_job_requeued_on_another_node_resumes_from_the_bucket(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    copies = request.getfixturevalue("bucket")
    home, node = tmp_path / "home", tmp_path / "node"
    home.mkdir()
    slurm = Slurm(home, "slurm.sbatch", tasks=1, **PREEMPTED, TMPDIR=str(node))
    slurm.variables |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    page = (EXAMPLES.parent / "docs/buckets.md").read_text()
    lines = re.findall(r"<!-- job -->\n```bash\n(.*?)```", page, re.DOTALL)[0]
    slurm.script = home / "job.sbatch"
    slurm.script.write_text(lines.replace("s3://my-bucket", copies.url).replace("fast94-1", "tudui-1"))
    for restarts, code in ((0, 138), (1, 0)):
        node.mkdir()
        assert slurm.wait(slurm.start("5", restarts)) == code, (home / "5.out").read_text()
        if code:
            shutil.rmtree(node)
    assert slurm.requests == ["requeue 5"]
    alone = tmp_path / "alone"
    assert run_here(["train", *SETTINGS], alone).code == 0
    assert_equal_runs(node / "runs/tudui-1", only_run(alone))
    assert "5/tudui-1/metrics.json" in copies.names()


SWEEP = {
    "recipe": "small.yaml",
    "settings": {"trainer.max_epochs": 25},
    "search": {"model.lr": {"log": [0.01, 0.1]}},
    "objective": "val/accuracy",
    "trials": 3,
}


def test_workers_of_a_preempted_sweep_share_its_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install 'cifar-lit[sweep]'")
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "lr.yaml").write_text(yaml.safe_dump(SWEEP))
    slurm = Slurm(tmp_path, "slurm-sweep.sbatch", tasks=1)
    folder = tmp_path / "cifar-lit/sweeps/lr"
    with ThreadPoolExecutor() as tasks:
        other = tasks.submit(slurm.run, "5_1")
        first = slurm.start("5_0", restarts=0)
        deadline = time.monotonic() + LIMIT
        while len([*folder.glob("trial-*/*/checkpoints/last.ckpt")]) < 2:  # both workers train
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGUSR1)
        assert slurm.wait(first) == 138
        assert slurm.requests == ["requeue 5_0"]
        again = slurm.start("5_0", restarts=1)
        assert (slurm.wait(again), other.result()) == (0, [0])
    trials = [*csv.DictReader((folder / "trials.csv").open())]
    assert [trial["state"] for trial in trials] == ["complete"] * 3
    assert [trial["error"] for trial in trials] == [""] * 3
    assert not (folder / "confirm").exists()  # once for all workers, by another command
    assert len([*folder.glob("trial-*/small-*")]) == 3  # the stopped trial was resumed, not begun again
