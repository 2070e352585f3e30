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
from jsonschema import Draft202012Validator

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


# ---- Kubernetes


def strict(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these keys and no others. required: the keys that must be there."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def named(**properties: Any) -> dict[str, Any]:
    """Return the schema of a list of objects with a name, as Kubernetes has them."""
    return {"type": "array", "minItems": 1, "items": strict("name", name=NAME, **properties)}


# The fields that the file uses, from the Kubernetes API and from pkg/apis/trainer/v1alpha1 of kubeflow/trainer v2.3.0.
# Since v2.2.0, `torch` has neither `numProcPerNode` nor `elasticPolicy` (kubeflow/trainer#3239 and #3235).
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT = {"type": "string", "minLength": 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"type": ["string", "integer"], "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"},
}
FIELD = strict("fieldRef", fieldRef=strict("fieldPath", fieldPath=TEXT))
ENV = named(value={"type": "string"}, valueFrom=FIELD)
ENV["items"]["properties"]["name"] = {"type": "string", "pattern": "^[A-Z_]+$"}
ENV["items"]["oneOf"] = [{"required": ["value"]}, {"required": ["valueFrom"]}]
POD = strict(
    "containers restartPolicy",
    restartPolicy={"enum": ["Never", "OnFailure"]},  # the others are not for Jobs
    terminationGracePeriodSeconds=COUNT,
    containers=named(image=TEXT, env=ENV, volumeMounts=named(mountPath={"type": "string", "pattern": "^/"})),
    volumes=named(
        persistentVolumeClaim=strict("claimName", claimName=NAME),
        emptyDir=strict("", medium={"enum": ["", "Memory"]}, sizeLimit={"type": "string", "pattern": r"^\d+[KMGT]i?$"}),
    ),
)
JOB = strict(
    "spec",
    metadata=strict("", labels=LABELS),
    spec=strict("template", backoffLimit=COUNT, template=strict("spec", spec=POD)),
)
SCHEMAS = {
    "TrainingRuntime": strict(
        "",
        mlPolicy=strict("", numNodes=COUNT, torch=strict("")),
        template=strict(
            "",
            spec=strict(
                "replicatedJobs", failurePolicy=strict("", maxRestarts=COUNT), replicatedJobs=named(template=JOB)
            ),
        ),
    ),
    "TrainJob": strict(
        "runtimeRef",
        runtimeRef=strict("name", name=NAME, kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]}),
        trainer=strict(
            "",
            numNodes=COUNT,
            numProcPerNode={"type": "integer", "minimum": 1},
            image=TEXT,
            command={"type": "array", "items": {"type": "string"}},
            args={"type": "array", "items": {"type": "string"}},
            env=ENV,
            resourcesPerNode=strict("", requests=QUANTITIES, limits=QUANTITIES),
        ),
    ),
}
# torchrun gets these from Trainer, which refuses a TrainJob that sets them.
RESERVED = {f"PET_{name}" for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    documents = [*yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())]
    assert len(documents) == 2
    return {each["kind"]: each for each in documents}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_objects_of_the_kubernetes_file_are_valid(objects: dict[str, dict[str, Any]], kind: str) -> None:
    document = strict(
        "apiVersion kind metadata spec",
        apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
        kind={"const": kind},
        metadata=strict("name", name=NAME, labels=LABELS),
        spec=SCHEMAS[kind],
    )
    assert [error.message for error in Draft202012Validator(document).iter_errors(objects[kind])] == []


def test_trainer_finds_the_runtime_and_its_container(objects: dict[str, dict[str, Any]]) -> None:
    job, runtime = objects["TrainJob"]["spec"], objects["TrainingRuntime"]
    assert job["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    assert RESERVED.isdisjoint(variable["name"] for variable in container["env"])


def test_all_pods_are_started_again_together_and_resume_the_run(objects: dict[str, dict[str, Any]]) -> None:
    jobset = objects["TrainingRuntime"]["spec"]["template"]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] > 0
    (node,) = jobset["replicatedJobs"]
    assert node["template"]["spec"]["backoffLimit"] == 0
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    label = variables["CIFAR_LIT_JOB"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert label == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"  # JobSet and TrainJob have the same name


def test_the_pods_have_the_resources_of_a_training(objects: dict[str, dict[str, Any]]) -> None:
    trainer = objects["TrainJob"]["spec"]["trainer"]
    (node,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] >= 1  # without a GPU, one process for each CPU
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["shm"] == "/dev/shm"
    assert trainer["command"][:3] == ["torchrun", "-m", "cifar_lit"]
    config = settings([*trainer["command"][3:], *trainer["args"]])
    for folder in (config["logs"], config["data"]["root"]):
        assert folder.startswith(f"{mounts['training']}/")
