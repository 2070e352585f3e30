"""`cifar-lit serve`: start, stop, killed processes and invalid arguments."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from extras.serving import JPEG, alive, picture, running

from cifar_lit.cli import main

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")


def all_dead(processes: list[int]) -> bool:
    """Return whether the processes end within 20 seconds."""
    deadline = time.monotonic() + 20
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, processes))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_stops_the_service_after_its_last_answer(served_run: Path, number: int) -> None:
    with running(served_run) as service:
        assert service.lines == [
            "serving lenet (3×16×16, 4 classes) on cpu",
            f"web page and POST /predict at http://127.0.0.1:{service.port} · stop with Ctrl-C",
        ]
        processes = service.processes()
        assert len(processes) >= 4  # main process, resource tracker, two decoders
        with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
            head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
            connection.sendall(f"{head}Content-Length: {len(picture())}\r\n\r\n".encode() + picture()[:100])
            time.sleep(0.2)
            os.killpg(service.process.pid, number)  # a terminal signals all processes
            time.sleep(0.5)
            connection.sendall(picture()[100:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert service.process.wait(20) == 0
        assert all_dead(processes)
        assert service.process.stdout is not None and service.process.stdout.read() == "stopped\n"


def test_killed_decoders_are_restarted_and_a_killed_service_leaves_no_processes(served_run: Path) -> None:
    with running(served_run, "--host", "0.0.0.0") as service:
        assert "no password" in service.lines[1]
        for host in (socket.gethostname(), "192.0.2.7:8000", "[2001:db8::1]"):
            assert service.ask("GET", "/health", headers={"Host": host}).status == 200, host
        answer = service.predict(picture(), {**JPEG, "Host": "evil.example", "Origin": "http://evil.example"})
        line = "does not answer to 'evil.example': use the address that the console shows, or start it with --host"
        assert (answer.status, line in answer.error) == (400, True), answer.error
        _, _, *decoders = service.processes()  # after the main process and the resource tracker
        for decoder in decoders:
            os.kill(decoder, signal.SIGKILL)
        answers = [service.predict(picture()) for _ in range(2 * len(decoders))]
        assert {answer.status for answer in answers} <= {200, 422} and answers[-1].status == 200
        processes = service.processes()
        service.process.kill()
        assert all_dead(processes)
        with socket.create_server(("127.0.0.1", service.port), reuse_port=False):
            pass  # the port is free again


# ---- errors at the start


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main(["serve", *map(str, argv)])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err.strip()


def test_a_port_in_use_a_damaged_model_and_missing_uvicorn_are_reported_with_a_remedy(
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
    line = 'cifar-lit: serve needs missing packages (uvicorn): pip install "cifar-lit[serve]"'
    assert refused(capsys, served_run) == (1, line)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("RUN --port 70000", "--port must be from 0 to 65535, not 70000"),
        ("RUN --host no/such/name", "--host no/such/name --port 8000 cannot be used"),
        ("RUN --host 192.0.2.1", "use 127.0.0.1 (this machine only) or 0.0.0.0"),
        ("RUN --max-mb 0", "max_mb must be >0, not 0"),
        ("RUN --collect DIR --collect-below nan", "collect_below must be >=0 and <=1, not nan"),
        ("RUN --prot 1", "there is no flag --prot. Did you mean --port?"),
        ("RUN --port 0 --accelerator abacus", "this machine has no device 'abacus': it has cpu"),
        ("nowhere", "there is no nowhere: name the folder of a finished run, or a model.safetensors"),
    ],
)
def test_invalid_flags_are_refused(served_run: Path, capsys: pytest.CaptureFixture[str], argv: str, text: str) -> None:
    code, line = refused(capsys, *argv.replace("RUN", str(served_run)).split())
    assert (code, text in line) == (2, True), line
