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
    "job-name", "mail-type", "mail-user", "mem", "nodes", "ntasks-per-node", "open-mode", "output", "partition",
    "qos", "requeue", "signal", "time",
}  # fmt: skip
SRUN = {"cpus-per-task", "kill-on-bad-exit"}  # from https://slurm.schedmd.com/srun.html


def settings(words: list[str]) -> dict[str, Any]:
    """Return the settings of a training command without running it."""
    command = parse(words[0], [*words[1:], "--print_config"])
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        TrainingCLI(command)
    assert ended.value.code == 0
    return yaml.safe_load(out.getvalue())


# ---- SLURM


@pytest.fixture(scope="module")
def sbatch() -> str:
    return (EXAMPLES / "slurm.sbatch").read_text()


def test_the_slurm_file_is_a_bash_script_with_sbatch_options_before_its_first_command(sbatch: str) -> None:
    assert subprocess.run(["bash", "-n", EXAMPLES / "slurm.sbatch"], check=False, capture_output=True).stderr == b""
    head, commands = re.split(r"^(?=[^#\n])", sbatch, maxsplit=1, flags=re.MULTILINE)
    assert sbatch.startswith("#!/bin/bash\n") and "#SBATCH" not in commands
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, flags=re.MULTILINE))
    assert len(options) == head.count("#SBATCH")
    assert options.keys() <= SBATCH
    assert not any(" " in value for value in options.values())  # sbatch parses a comment on the line as options
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert re.fullmatch(r"USR1@\d+", options["signal"]) and "requeue" in options  # the training handles SIGUSR1


def test_the_command_line_accepts_the_training_of_the_srun_line(sbatch: str) -> None:
    (line,) = re.findall(r"^srun (?:.*\\\n)*.*", sbatch, flags=re.MULTILINE)
    before, _, ours = line.removeprefix("srun ").replace("\\\n", "").partition(" cifar-lit ")
    assert {word.removeprefix("--").partition("=")[0] for word in shlex.split(before)} == SRUN
    config = settings(shlex.split(ours))
    assert config["checkpoint_every"] == "10m"
    assert config["logs"].endswith("/runs") and config["data"]["root"].endswith("/data")


# ---- Kubernetes


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())


def test_the_kubernetes_file_is_a_valid_pytorch_job(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert isinstance(spec["nprocPerNode"], str)
    replicas = spec["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    nodes = sum(replica["replicas"] for replica in replicas.values())
    assert spec["elasticPolicy"]["minReplicas"] <= nodes == spec["elasticPolicy"]["maxReplicas"]
    for replica in replicas.values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"} and replica["restartPolicy"] == "OnFailure"


@pytest.mark.parametrize("role", ["Master", "Worker"])
def test_the_pods_have_the_resources_of_a_training_and_resume_its_run(job: dict[str, Any], role: str) -> None:
    pod = job["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch" and container["image"]
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["shm"] == "/dev/shm"
    variables = {variable["name"]: variable for variable in container["env"]}
    label = variables["CIFAR_LIT_JOB"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert label == "metadata.labels['training.kubeflow.org/job-name']"
    assert all(isinstance(variable.get("value", ""), str) for variable in variables.values())
    assert container["command"][:3] == ["torchrun", "-m", "cifar_lit"]
    config = settings([*container["command"][3:], *container["args"]])
    for folder in (config["logs"], config["data"]["root"]):
        assert folder.startswith(f"{mounts['training']}/")
