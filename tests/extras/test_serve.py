"""`cifar-lit serve`: answers, accepted hosts, refused requests, start and stop."""

from __future__ import annotations

import base64
import io
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from contract.command_line import assert_refused, run_command
from extras.serving import picture, running
from inference.small_nets import CLASSES
from PIL import Image

import cifar_lit

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")
from starlette.testclient import TestClient

from cifar_lit.extras.serve.app import PAGE, Service
from cifar_lit.extras.web import THIS_MACHINE, Server, application

LIMIT = 100_000  # bytes
CUT = picture()[:400]


@pytest.fixture(scope="module")
def client(served_run: Path) -> TestClient:
    routes = Service(cifar_lit.load(served_run), LIMIT).routes
    app = application(routes, PAGE, THIS_MACHINE)
    return TestClient(app, "http://localhost:8000", raise_server_exceptions=False)


def test_every_request_format_gives_the_prediction_of_the_net(client: TestClient, served_run: Path) -> None:
    classifier, image = cifar_lit.load(served_run), Image.open(io.BytesIO(picture()))
    (expected,) = classifier.predict(image)
    alone = client.post("/predict", content=picture()).json()
    assert alone["label"] == expected.label and "unknown" not in alone and "prediction_set" not in alone
    assert alone["probability"] == pytest.approx(expected.probability, abs=1e-5)
    top = [(entry["label"], pytest.approx(entry["probability"], abs=1e-5)) for entry in alone["top"]]
    assert top == list(expected.top)
    files = [("image", ("a.jpg", picture())), ("b", ("b.png", picture(1, kind="PNG"))), ("note", (None, b"hello"))]
    other = client.post("/predict", content=picture(1, kind="PNG")).json()
    assert client.post("/predict", files=files).json() == {"predictions": [alone, other]} and other != alone
    url = client.post("/predict?seen=1", content=picture()).json()["seen"]
    seen = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    assert seen.size == (16, 16) and (classifier.prepare(image)[0].permute(1, 2, 0).numpy() == seen).all()
    every = client.post("/predict?top=99", content=picture()).json()["top"]
    assert sorted(entry["label"] for entry in every) == sorted(CLASSES)


def test_health_describes_the_net_and_the_page_has_its_files(client: TestClient) -> None:
    health = client.get("/health").json()
    net = {"net": "lenet", "classes": CLASSES, "image_size": [16, 16], "max_bytes": LIMIT}
    assert health.items() >= {**net, "status": "ok", "version": cifar_lit.__version__}.items()
    for path in ("/", "/page.css", "/page.js"):
        assert client.get(path).headers["content-type"].startswith("text/")


@pytest.mark.parametrize(
    ("path", "request_", "status", "text"),
    [
        ("/predict", {"content": bytes(LIMIT + 1)}, 413, "larger than 0.1 MB"),
        ("/predict", {"content": b"text"}, 422, "the image cannot be read: not a JPEG"),
        ("/predict", {"files": [("i", ("a.jpg", picture())), ("i", ("b.jpg", CUT))]}, 422, "b.jpg cannot be read: cut"),
        ("/predict", {"files": [("note", (None, b"hello"))]}, 400, "no file in the form"),
        ("/predict?top=0", {"content": picture()}, 422, "top must be a whole number from 1 on"),
        ("/nothing", {"content": b""}, 405, "Method Not Allowed"),
    ],
)
def test_invalid_requests_get_one_line(
    client: TestClient, path: str, request_: dict[str, Any], status: int, text: str
) -> None:
    answer = client.post(path, **request_)
    assert (answer.status_code, [*answer.json()]) == (status, ["error"]), answer.text
    assert text in answer.json()["error"]


def test_an_unexpected_error_is_named_on_the_console_only(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Service, "predict", lambda *_: 1 / 0)
    monkeypatch.setattr("cifar_lit.extras.serve.app.decode", lambda *_: 1 / 0)
    answer = client.post("/predict", content=picture())
    assert (answer.status_code, "division" in answer.text) == (500, False)
    assert capsys.readouterr().err == "cifar-lit: /predict failed: ZeroDivisionError: division by zero\n"


def test_this_machine_is_answered_under_its_own_names_only(client: TestClient) -> None:
    own = ("localhost:9", "127.0.0.1", "[::1]:8000", "LocalHost")
    for host in (*own, "evil.example:8000", "127.0.0.1.evil.example", "a.localhost", "192.0.2.7", ""):
        answer = client.get("/health", headers={"Host": host})
        assert answer.status_code == (200 if host in own else 400), host


# ---- the command


def test_unknown_and_prediction_sets_are_answered_only_if_asked_for(
    reject_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps = []
    monkeypatch.setattr(Server, "run", lambda server, sockets: apps.append(server.config.app))
    for flags in ((), ("--reject", "0.05", "--coverage", "0.5")):
        assert run_command("serve", reject_run, "--port", "0", *flags).code == 0
    plain, asked = (TestClient(app, "http://localhost") for app in apps)
    answer = plain.post("/predict", content=picture()).json()
    assert "unknown" not in answer and "prediction_set" not in answer
    assert plain.get("/health").json().items() >= {"reject": None, "caveat": "", "coverage": None}.items()
    answer = asked.post("/predict", content=picture()).json()
    assert answer["unknown"] is True and {*answer["prediction_set"]} <= {*CLASSES}
    assert asked.get("/health").json().items() >= {"reject": 0.05, "coverage": 0.5}.items()


@pytest.mark.slow
def test_ctrl_c_stops_the_service_after_its_last_answer(served_run: Path) -> None:
    with running(served_run, "--host", "0.0.0.0") as service:
        assert service.lines[0] == "serving lenet (3×16×16, 4 classes) on cpu"
        assert "no password" in service.lines[1]
        with urlopen(service.url) as page:
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "access-control-allow-origin" not in page.headers
        port = int(service.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            head = f"Host: a\r\nExpect: 100-continue\r\nContent-Length: {len(picture())}\r\n\r\n"
            connection.sendall(f"POST /predict HTTP/1.1\r\n{head}".encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")  # the service waits for the picture
            service.process.send_signal(signal.SIGINT)
            with pytest.raises(ConnectionRefusedError):
                while True:  # until it has stopped listening
                    socket.create_connection(("127.0.0.1", port)).close()
            connection.sendall(picture())
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert service.process.wait(20) == 0
        assert service.process.stdout is not None and service.process.stdout.read() == "stopped\n"


def test_a_port_in_use_missing_packages_and_invalid_flags_are_reported(
    served_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = f"cannot listen on port {port} of 127.0.0.1: Address already in use"
        assert_refused(run_command("serve", served_run, "--port", port), 1, line)
    assert_refused(run_command("serve", "nowhere"), 2, "there is no nowhere: name the folder of a finished run")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = 'serve needs missing packages (uvicorn): pip install -e ".[serve]" in the clone of cifar-lit'
    assert_refused(run_command("serve", served_run), 1, line)
