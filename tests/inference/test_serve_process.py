"""`cifar-lit serve`: starting, stopping, and what is left when something dies."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import JPEG, alive, picture, running

from cifar_lit.cli import main

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")


def until(true: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_it_says_what_it_serves_and_ctrl_c_or_a_closed_terminal_stops_it_when_it_has_answered(
    served_run: Path, number: int
) -> None:
    with running(served_run) as service:
        assert service.lines == [
            "serving lenet (3×16×16, 4 classes) on cpu",
            f"web page and POST /predict at http://127.0.0.1:{service.port} · stop with Ctrl-C",
        ]
        processes = service.processes()
        assert len(processes) >= 4  # connections and net, queues, two for decoding
        with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
            head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
            connection.sendall(f"{head}Content-Length: {len(picture())}\r\n\r\n".encode() + picture()[:100])
            time.sleep(0.2)
            os.killpg(service.process.pid, number)  # as a terminal sends it: to all of them
            time.sleep(0.5)
            connection.sendall(picture()[100:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert service.process.wait(20) == 0
        assert until(lambda: not any(map(alive, processes)))
        assert service.process.stdout is not None and service.process.stdout.read() == "stopped\n"


def test_decoders_that_died_are_started_again_and_a_killed_service_leaves_nothing_behind(served_run: Path) -> None:
    with running(served_run, "--host", "0.0.0.0") as service:
        assert "no password" in service.lines[1]
        for host, status in {
            socket.gethostname(): 200,
            "192.0.2.7:8000": 200,
            "[2001:db8::1]": 200,
            "evil.example": 400,
        }.items():
            assert service.ask("GET", "/health", headers={"Host": host}).status == status, host
        answer = service.predict(picture(), {**JPEG, "Host": "evil.example", "Origin": "http://evil.example"})
        assert (
            "does not answer to 'evil.example': use its address, or start it with --host and that name" in answer.error
        )
        _, _, *decoders = service.processes()  # behind the one that counts what they share
        for decoder in decoders:
            os.kill(decoder, signal.SIGKILL)
        answers = [service.predict(picture()) for _ in range(2 * len(decoders))]
        assert {answer.status for answer in answers} <= {200, 422} and answers[-1].status == 200
        processes = service.processes()
        service.process.kill()
        assert until(lambda: not any(map(alive, processes)))
        with socket.create_server(("127.0.0.1", service.port), reuse_port=False):
            pass  # its port is free


# ---- what cannot be started


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main(["serve", *map(str, argv)])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err.strip()


def test_what_cannot_be_served_is_told_in_a_line_with_the_remedy(
    served_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = f"cifar-lit: port {port} is in use: choose another with --port, or --port 0 for a free one"
        assert refused(capsys, served_run, "--port", port) == (1, line)
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes((served_run / "model.safetensors").read_bytes()[:500])
    code, line = refused(capsys, damaged, "--port", 0)
    assert (code, f"{damaged} is damaged" in line) == (1, True), line
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = 'cifar-lit: serve needs uvicorn, not installed: pip install "cifar-lit[serve]"'
    assert refused(capsys, served_run) == (1, line)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("RUN --port 70000", "--port must be from 0 to 65535, not 70000"),
        ("RUN --host no/such/name", "--host no/such/name is not an address: use 127.0.0.1"),
        ("RUN --host 192.0.2.1", "--host 192.0.2.1 is not an address of this machine"),
        ("RUN --max-mb 0", "--max-mb must be above 0, not 0"),
        ("RUN --decode-seconds nan", "decode_seconds must be a number, not nan"),
        ("RUN --prot 1", "there is no flag --prot. Did you mean --port?"),
        ("RUN --port 0 --accelerator abacus", "this machine has no device 'abacus': it has cpu"),
        ("nowhere", "there is no nowhere: name the folder of a finished run, or a model.safetensors"),
    ],
)
def test_wrong_flags_are_told_in_a_line(
    served_run: Path, capsys: pytest.CaptureFixture[str], argv: str, text: str
) -> None:
    code, line = refused(capsys, *argv.replace("RUN", str(served_run)).split())
    assert (code, text in line) == (2, True), line
