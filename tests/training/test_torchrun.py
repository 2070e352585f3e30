"""Two agents of torchrun, as on two machines, train one net together."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from real_runs import LIMIT, SCRIPT, SETTINGS, assert_same_run, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="signals")]


def start(folder: Path, node: int, words: list[str], **variables: str) -> subprocess.Popen[bytes]:
    """Start an agent in the folder that both machines share."""
    command = [sys.executable, "-m", "torch.distributed.run", *words, *SCRIPT, *SETTINGS]
    with (folder / f"{node}.txt").open("wb") as output:
        streams: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
        return subprocess.Popen(command, cwd=folder, env=environment(**variables), **streams)


def end(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes of the agents. Kill those that do not end, with their ranks."""
    try:
        return [agent.wait(LIMIT) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)


def test_two_agents_take_ranks_and_address_from_the_variables_of_kubernetes(tmp_path: Path, pair: Path) -> None:
    """Kubeflow Trainer sets these, with `auto` in place of the number of processes."""
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    shared |= {"PET_MASTER_PORT": str(find_free_network_port()), "CIFAR_LIT_JOB": "night"}
    codes = end([start(tmp_path, node, [], **shared, PET_NODE_RANK=str(node)) for node in (0, 1)])
    assert codes == [0, 0], "".join((tmp_path / f"{node}.txt").read_text() for node in (0, 1))
    assert_same_run(tmp_path, pair)
