import json
import socket
import sys

import pytest

from cifar_lit.distributed import join as meeting
from cifar_lit.distributed.coordinator import Coordinator
from cifar_lit.distributed.network import GLOO, busy, choose_interface, interface_to
from cifar_lit.distributed.rank_info import RankInfo, rank_info
from cifar_lit.errors import Failure, UsageError

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_NTASKS",
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "SLURM_NTASKS", "TORCHELASTIC_RUN_ID", meeting.HUB, GLOO):
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_on_one_machine_the_first_process_starts_the_others_which_know_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_info(3, 1) == RankInfo(0, 3, each=3)
    put(monkeypatch, LOCAL_RANK="2", CIFAR_LIT_HUB="127.0.0.1:1:token")
    assert rank_info(3, 1) == RankInfo(2, 3, each=3)


def test_ranks_that_are_started_by_hand_on_one_machine_meet_as_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rank_info(1, 1).world == 1
    with pytest.raises(UsageError, match="--devices 2 with LOCAL_RANK needs MASTER_ADDR, MASTER_PORT in the environment"):
        rank_info(2, 1)
    put(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    assert rank_info(2, 1) == RankInfo(1, 2, "127.0.0.1", 29500)


def test_on_several_machines_ranks_are_counted_over_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, NODE_RANK="1", LOCAL_RANK="1", CIFAR_LIT_HUB="a:1:b", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert rank_info(2, 3) == RankInfo(3, 6, "10.0.0.1", 29500, each=2)


def test_several_machines_that_do_not_know_how_to_meet_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    with pytest.raises(UsageError, match="--nodes 2 needs MASTER_PORT, NODE_RANK in the environment of each machine, as in"):
        rank_info(1, 2)
    put(monkeypatch, NODE_RANK="0", MASTER_PORT="http")
    with pytest.raises(UsageError, match="MASTER_PORT must be a port from 1 to 65535, not 'http'"):
        rank_info(1, 2)


def test_what_torchrun_has_set_counts_and_its_agent_is_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TORCHELASTIC_RUN_ID="x", RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="1234")
    found = rank_info(2, 2)
    assert found._replace(parent=None) == RankInfo(3, 4, "a", 1234)
    assert found.parent


def test_a_process_alone_has_nobody_to_watch() -> None:
    assert meeting.join(RankInfo(0, 1), 60.0) is None
    assert meeting.leave("a line", 1) == "a line"


def test_a_busy_port_is_named_where_machines_meet_there_and_avoided_where_nobody_else_must_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert busy(port)
        with pytest.raises(UsageError, match=f"port {port}, which MASTER_PORT names, is taken on this machine"):
            meeting._store(RankInfo(0, 2, "127.0.0.1", port), 1.0, serve=True)
        monkeypatch.setenv("MASTER_PORT", str(port))
        meeting._avoid_busy_port()
        assert "MASTER_PORT" not in meeting.os.environ
    port = free_port()
    assert not busy(port)
    monkeypatch.setenv("MASTER_PORT", str(port))
    meeting._avoid_busy_port()
    assert meeting.os.environ["MASTER_PORT"] == str(port)


def test_a_first_rank_that_cannot_be_reached_is_given_up_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(
        Failure, match=rf"cannot reach rank 0 of 2 at 127\.0\.0\.1, port {port}, for 1 s: .*refused.* Start it within"
    ):
        meeting._find_hub(RankInfo(1, 2, "127.0.0.1", port), 0.2)


def test_something_else_that_answers_at_the_port_is_not_taken_for_the_first_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Failure, match=rf"no store of this run is at 127.0.0.1, port {port}: .* Choose another MASTER_PORT"):
            meeting._find_hub(RankInfo(1, 2, "127.0.0.1", port), 0.4)


def test_ranks_that_are_not_started_by_the_first_find_it_through_its_store() -> None:
    port = free_port()
    place = RankInfo(0, 2, "127.0.0.1", port)
    store = meeting._store(place, 5.0, serve=True)
    store.set(meeting._key(), json.dumps([4321, "secret"]))
    assert meeting._find_hub(place._replace(rank=1), 5.0) == ("4321", "secret")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_of_other_machines_reach_the_first_over_either_protocol(address: str) -> None:
    hub = Coordinator(RankInfo(0, 2, "host", 1), 60.0)
    try:
        with socket.create_connection((address, hub.port), 5) as connected:
            assert connected.getpeername()[:2] == (address, hub.port)
    except OSError as error:
        if address == "::1":
            pytest.skip(f"no IPv6 here: {error}")
        raise
    finally:
        hub.forget()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for its interfaces")
def test_the_interface_is_the_one_that_leads_to_the_first_rank_unless_the_user_has_named_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no such host") is None
    choose_interface("127.0.0.1")
    assert meeting.os.environ[GLOO] == "lo"
    monkeypatch.setenv(GLOO, "eth7")
    choose_interface("127.0.0.1")
    assert meeting.os.environ[GLOO] == "eth7"
