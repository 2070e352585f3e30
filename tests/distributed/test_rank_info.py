"""The rank of a process, and how it finds the other ranks."""

import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from cifar_lit.distributed import join
from cifar_lit.distributed.join import GLOO_INTERFACE, agree_on_port, choose_interface, free_port
from cifar_lit.distributed.rank_info import COORDINATOR, RankInfo, advice, by_slurm, is_first_process, rank_info
from cifar_lit.distributed.rank_watch import Coordinator
from cifar_lit.errors import Failure, UsageError

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_NTASKS", "TORCHELASTIC_RUN_ID", COORDINATOR, GLOO_INTERFACE),
)
MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
RANK_3 = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", **RANK_3, "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers, also those that the package sets during a test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "devices", "nodes", "info"),
    [
        ({}, 3, 1, RankInfo(0, 3, per_node=3)),
        ({"LOCAL_RANK": "2", COORDINATOR: "127.0.0.1:1:token"}, 3, 1, RankInfo(2, 3, per_node=3)),
        ({"LOCAL_RANK": "1"}, 1, 1, RankInfo(1, 1)),
        ({"LOCAL_RANK": "1", **MEET}, 2, 1, RankInfo(1, 2, "10.0.0.1", 29500)),
        ({"NODE_RANK": "1", "LOCAL_RANK": "1", COORDINATOR: "x", **MEET}, 2, 3,
         RankInfo(3, 6, "10.0.0.1", 29500, per_node=2)),
        (TORCHRUN, 2, 2, RankInfo(3, 4, "a", 1, parent=os.getppid())),
        ({"LOCAL_RANK": "1"}, 2, 1, "--devices 2 with LOCAL_RANK needs MASTER_ADDR, MASTER_PORT in the environment"),
        ({"MASTER_ADDR": "a"}, 1, 2,
         "--nodes 2 needs MASTER_PORT, NODE_RANK in the environment of each machine. Start it with"),
        ({**MEET, "NODE_RANK": "0", "MASTER_PORT": "http"}, 1, 2,
         "MASTER_PORT must be a port from 1 to 65535, not 'http'"),
    ],
)  # fmt: skip
def test_the_rank_follows_from_the_variables_of_any_launcher_or_an_error_names_the_missing_ones(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: int, nodes: int, info: RankInfo | str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(info, RankInfo):
        assert rank_info(devices, nodes) == info
    else:
        with pytest.raises(UsageError, match=info):
            rank_info(devices, nodes)


def test_only_rank_0_of_node_0_is_the_first_process() -> None:
    assert is_first_process({}) and is_first_process({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert not is_first_process({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert not is_first_process({"LOCAL_RANK": "1"}) and not is_first_process({"LOCAL_RANK": "0", "NODE_RANK": "1"})


def test_the_advice_after_a_lost_rank_depends_on_torchrun_restarts_and_on_a_checkpoint() -> None:
    for restarts, again in (("1", True), ("2", False)):
        torchrun = {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_MAX_RESTARTS": "2"}
        assert ("torchrun restarts all" in advice("x", torchrun)) == again
    assert advice("cifar-lit train --resume a", {}) == "Resume with:\n  cifar-lit train --resume a"
    assert advice(None, {}) == "It has no checkpoint yet: start it again."


def test_slurm_is_not_the_launcher_in_an_interactive_shell_or_under_torchrun() -> None:
    job = {"SLURM_NTASKS": "2", "LOCAL_WORLD_SIZE": "2"}
    assert by_slurm({**job, "SLURM_JOB_NAME": "night"})
    assert not any(by_slurm(other) for other in ({}, {**job, "SLURM_JOB_NAME": "bash"}, {**job, **TORCHRUN}))


# ---- rendezvous


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """Start the coordinator of rank 0 at the port of MASTER_PORT."""
    coordinator = Coordinator(RankInfo(0, 2, "127.0.0.1", free_port()), 5.0, "")
    coordinator.store_port = 4321
    coordinator.start()
    yield coordinator
    coordinator.close()
    coordinator.join()
    coordinator.close_in_fork()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_other_ranks_connect_to_rank_0_and_receive_the_port_of_its_store(
    coordinator: Coordinator, address: str
) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("IPv6 is disabled")
    watch = join._worker(RankInfo(1, 2, address, coordinator.port), 5.0)
    assert watch.store_port == 4321 and COORDINATOR in os.environ  # inherited by child ranks
    watch.finish()
    watch.close_in_fork()


def test_an_error_names_the_port_that_is_in_use_or_has_no_rank_0(coordinator: Coordinator) -> None:
    line = f"MASTER_PORT {coordinator.port} is in use by another process on this machine"
    with pytest.raises(UsageError, match=line):
        Coordinator(coordinator.info, 1.0, "")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = f"another program answers at 127.0.0.1, port {port}, .* Choose another MASTER_PORT"
        with pytest.raises(Failure, match=line):
            join._worker(RankInfo(1, 2, "127.0.0.1", port), 0.4)
    line = f"cannot reach rank 0 of 2 at 127.0.0.1, port {port}, within 1 s .*refused.* Start it with"
    with pytest.raises(Failure, match=line):
        join._worker(RankInfo(1, 2, "127.0.0.1", port), 0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's network interfaces")
def test_gloo_uses_the_interface_that_leads_to_rank_0_unless_the_user_sets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_interface("no such host")
    assert GLOO_INTERFACE not in os.environ
    choose_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE] == "lo"
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")
    choose_interface("127.0.0.1")
    assert os.environ[GLOO_INTERFACE] == "eth7"


def test_restarted_ranks_agree_on_a_port_and_a_restart_count_despite_values_of_earlier_attempts() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        for counts, restarts in (((0, 0, 0), 0), ((0, 0, 0), 1), ((0, 2, 1), 2)):
            results = pool.map(lambda rank, count: agree_on_port(store, rank, 3, count, 20.0), (2, 0, 1), counts)
            assert [count for _, count in set(results)] == [restarts]


@pytest.mark.parametrize("rank", [0, 1])
def test_restarted_ranks_wait_only_until_a_timeout_for_a_missing_rank(rank: int) -> None:
    store = dist.HashStore()
    store.set("cifar_lit/hello/1", '["an earlier process", 0]')
    with pytest.raises(Failure, match=r"waited 0 s for the other ranks"):
        agree_on_port(store, rank, 2, 0, 0.1)
