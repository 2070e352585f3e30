"""`cifar-lit serve`: starting, stopping, and what is left when something dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import JPEG, Service, alive, picture, running

from cifar_lit.cli import main
from cifar_lit.cli.serve import _url
from cifar_lit.runs.model_file import load_model_file

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")


def until(true: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def begun_request(service: Service) -> socket.socket:
    """A connection on which half a request was sent."""
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=20)
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture())}\r\n\r\n"
    connection.sendall(head.encode() + picture()[:100])
    return connection


def stops_well(service: Service, stop: Callable[[], None]) -> None:
    """Asserts that a request which runs is answered, and that nothing is left afterwards."""
    processes = service.processes()
    assert len(processes) >= 5  # connections, queues, net, two for decoding
    with begun_request(service) as connection:
        time.sleep(0.2)
        stop()
        time.sleep(0.5)
        connection.sendall(picture()[100:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert service.process.wait(20) == 0
    assert until(lambda: not any(map(alive, processes)))
    assert service.process.stdout is not None
    assert service.process.stdout.read() == "stopped\n"


def test_it_says_what_it_serves_and_ctrl_c_stops_it_when_it_has_answered(served_run: Path) -> None:
    with running(served_run) as service:
        assert service.lines == [
            "serving lenet (3×16×16, 4 classes) on cpu",
            f"page and POST /predict at http://127.0.0.1:{service.port} · Ctrl-C stops it",
        ]
        stops_well(service, lambda: os.killpg(service.process.pid, signal.SIGINT))  # as a terminal sends it: to all of them


def test_a_net_that_died_is_loaded_again_and_sigterm_stops_it(served_run: Path) -> None:
    with running(served_run, "--host", "0.0.0.0") as service:
        assert "no password" in service.lines[1]
        assert service.ask("GET", "/health", headers={"Host": "a.name.of.mine"}).status == 200
        os.kill(max(service.processes(), key=memory), signal.SIGKILL)
        assert until(lambda: service.ask("GET", "/health").status == 503)
        refused = service.predict(picture())
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "send the request again" in refused.error
        assert until(lambda: service.ask("GET", "/health").status == 200)
        assert service.predict(picture(), JPEG).status == 200
        stops_well(service, service.process.terminate)


def memory(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1])


def test_a_service_that_is_killed_leaves_nothing_behind(served_run: Path) -> None:
    with running(served_run) as service:
        processes = service.processes()
        service.process.kill()
        assert until(lambda: not any(map(alive, processes)))
        with socket.create_server(("127.0.0.1", service.port), reuse_port=False):
            pass  # its port is free


# ---- what cannot be started


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Sets back the handlers that a service sets in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main(["serve", *map(str, argv)])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err.strip()


def test_a_port_in_use_is_told_with_the_flag_that_helps(served_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = f"cifar-lit: port {port} is in use: choose another with --port, or --port 0 for a free one"
        assert refused(capsys, served_run, "--port", port) == (1, line)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("RUN --port 70000", "--port must be from 0 to 65535, not 70000"),
        ("RUN --host no/such/name", "--host no/such/name is no address: use 127.0.0.1"),
        ("RUN --host 192.0.2.1", "--host 192.0.2.1 is not an address of this machine"),
        ("RUN --max-mb 0", "--max-mb must be more than 0, not 0"),
        ("RUN --decode-seconds nan", "decode_seconds must be a number, not nan"),
        ("RUN --prot 1", "there is no flag --prot. Did you mean --port?"),
        ("RUN --port 0 --accelerator abacus", "this machine has no device 'abacus': it has cpu"),
        ("nowhere", "there is no nowhere: name a run folder that ended, or a model.safetensors"),
    ],
)
def test_wrong_flags_are_told_in_a_line(served_run: Path, capsys: pytest.CaptureFixture[str], argv: str, text: str) -> None:
    code, line = refused(capsys, *argv.replace("RUN", str(served_run)).split())
    assert (code, text in line) == (2, True), line


def test_damaged_weights_are_told_as_everywhere_and_leave_no_process(
    served_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes((served_run / "model.safetensors").read_bytes()[:500])
    code = main(["serve", str(damaged), "--port", "0"])
    out, err = capfd.readouterr()
    with pytest.raises(RuntimeError) as expected:
        load_model_file(damaged)
    assert (code, out, err) == (1, "", f"cifar-lit: {expected.value}\n")
    assert multiprocessing.active_children() == []


def test_missing_packages_are_named_with_the_extra(
    served_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = 'cifar-lit: serve needs uvicorn, not installed here: pip install "cifar-lit[serve]"'
    assert refused(capsys, served_run) == (1, line)


def test_addresses_are_shown_as_a_browser_takes_them() -> None:
    assert _url("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert _url("::1", 8000) == "http://[::1]:8000"
