"""`cifar-lit serve`: answers, accepted hosts and refused requests."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from extras.serving import JPEG, Service, form, picture
from inference.odd_files import bomb, scan_bomb
from inference.small_nets import CLASSES
from PIL import Image
from starlette.exceptions import HTTPException
from uvicorn import Config
from uvicorn.server import ServerState

import cifar_lit
from cifar_lit.extras.serve.connections import MAX_CONNECTIONS, LimitedProtocol
from cifar_lit.extras.serve.images import Images, Limits, parse_body

FORM = "multipart/form-data; boundary=x-y"
CUT_SHORT = ("b.jpg", picture()[:400])


def test_every_request_format_gives_the_prediction_of_the_net(service: Service, served_run: Path) -> None:
    classifier, image = cifar_lit.load(served_run), Image.open(io.BytesIO(picture()))
    (expected,) = classifier.predict(image)
    alone = service.predict(picture()).json
    assert alone["label"] == expected.label
    assert alone["probability"] == pytest.approx(expected.probability, abs=1e-5)
    top = [(entry["label"], pytest.approx(entry["probability"], abs=1e-5)) for entry in alone["top"]]
    assert top == list(expected.top)
    body, kind = form(("a.jpg", picture()), ("b.png", picture(1, kind="PNG")))
    assert service.predict(body, kind).json == {"predictions": [alone, service.predict(picture(1, kind="PNG")).json]}
    url = service.predict(picture(), query="?seen=1").json["seen"]
    seen = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    assert seen.size == (16, 16) and (classifier.prepare(image)[0].permute(1, 2, 0).numpy() == seen).all()


def test_top_sets_the_number_of_classes_in_the_answer(service: Service) -> None:
    top = service.predict(picture(), query="?top=99").json["top"]
    assert sorted(entry["label"] for entry in top) == sorted(CLASSES)
    for top in ("0", "-1", "x", "", "1.5", "9" * 5000, "²"):
        answer = service.predict(picture(), query=f"?top={quote(top)}")
        assert (answer.status, "top must be a whole number from 1 to 4" in answer.error) == (422, True), top


def test_concurrent_clients_each_get_their_own_answer(service: Service) -> None:
    pictures = [picture(seed) for seed in range(40)]
    alone = [service.predict(data).json for data in pictures]
    assert len(set(map(json.dumps, alone))) > 30
    with ThreadPoolExecutor(20) as threads:
        tops = [1 + number % 4 for number in range(120)]
        answers = threads.map(lambda data, top: service.predict(data, query=f"?top={top}").json, pictures * 3, tops)
    for answer, expected, top in zip(answers, alone * 3, tops, strict=True):
        assert len(answer["top"]) == top
        assert answer["label"] == expected["label"]
        assert answer["probability"] == pytest.approx(expected["probability"], abs=1e-5)


def test_health_and_the_page_with_its_files_are_there(service: Service) -> None:
    health = service.ask("GET", "/health").json
    net = {"net": "lenet", "classes": CLASSES, "image_size": [16, 16]}
    assert health.items() >= {**net, "status": "ok", "version": cifar_lit.__version__}.items()
    assert health["limits"]["body"] == 2_000_000
    for path in ("/", "/page.css", "/page.js"):
        answer = service.ask("GET", path)
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers


# ---- bodies


@pytest.mark.parametrize(
    ("kind", "body", "status", "text"),
    [
        ("application/json", b"{}", 415, "'application/json' is not supported"),
        ("application/x-www-form-urlencoded", picture(), 415, "with curl, use -F"),
        ("image/svg+xml", b"<svg/>", 415, "is not a JPEG, PNG, WebP, BMP, GIF, TIFF"),
        ("image/jpeg", b"", 415, "is empty"),
        ("multipart/form-data", b"x", 400, "no boundary"),
        (FORM, form(("a", picture()))[0][:-9], 400, "cut short"),
        (FORM, form()[0], 400, "no image"),
        (FORM, form(*[("a", picture())] * 4)[0], 413, "too many images: send at most 3"),
    ],
)
def test_bodies_without_valid_images_are_refused(kind: str, body: bytes, status: int, text: str) -> None:
    with pytest.raises(HTTPException) as error:
        parse_body(kind, body, Limits(images=3))
    assert (error.value.status_code, text in error.value.detail, "\n" in error.value.detail) == (status, True, False)


def test_files_of_a_form_are_read_exactly_and_other_fields_are_ignored() -> None:
    odd = picture() + b"\r\n--x-\r\n\r\n--\n--x-y"  # resembles the boundary
    body, headers = form(("a.jpg", odd), ("b.bmp", b"BM\r\n"))
    note = b'--x-y\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
    images = parse_body(headers["Content-Type"], b"a preamble\r\n" + note + body, Limits())
    assert images == Images([("image 1 (a.jpg)", odd), ("image 2 (b.bmp)", b"BM\r\n")], many=True)


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('form-data; name="i"; filename="grün.jpg"', "grün.jpg"),
        ('form-data; name="i"; filename="' + "x" * 500 + '"', "x" * 80),
        ('form-data; name="i"; filename="a\x1b[31m.jpg"', r"a\x1b[31m.jpg"),
    ],
)
def test_file_names_of_a_form_are_short_and_printable_in_errors(disposition: str, name: str) -> None:
    body = f"--b\r\ncontent-disposition: {disposition}\r\n\r\n".encode() + picture() + b"\r\n--b--"
    files = parse_body('multipart/form-data; boundary="b"', body, Limits()).files
    assert files == [(f"image 1 ({name})", picture())]


def test_any_image_type_is_accepted() -> None:
    for kind in ("image/jpeg", "IMAGE/PNG; q=1", "application/octet-stream", ""):
        assert parse_body(kind, picture(), Limits()) == Images([("the image", picture())], many=False)


# ---- refused requests


@pytest.mark.parametrize(
    ("status", "text", "body", "headers"),
    [
        pytest.param(422, "24,500,000 pixels: make it smaller", bomb(), JPEG, id="bomb"),
        pytest.param(413, "larger than 2 MB", bytes(100_000_000), JPEG, id="huge"),
        pytest.param(422, "image 2 (b.jpg) cannot be read: cut", *form(("a", picture()), CUT_SHORT), id="form"),
    ],
)
def test_invalid_requests_get_one_line_and_the_service_continues(
    service: Service, status: int, text: str, body: bytes, headers: dict[str, str]
) -> None:
    answer = service.predict(body, headers)
    assert (answer.status, text in answer.error) == (status, True), answer.error
    assert service.predict(picture()).status == 200


@pytest.mark.parametrize(
    ("request_line", "status", "text"),
    [
        ("GET /nothing", 404, "there is nothing at /nothing"),
        ("GET /predict", 405, "use POST"),
        ("POST /", 405, "use GET"),
        ("DELETE /health", 405, "does not take DELETE"),
    ],
)
def test_unknown_paths_and_methods_are_refused(service: Service, request_line: str, status: int, text: str) -> None:
    answer = service.ask(*request_line.split())
    assert (answer.status, text in answer.error) == (status, True), answer.error


def test_decoding_has_a_time_limit_and_does_not_delay_other_requests(service: Service) -> None:
    slow_image = scan_bomb(scans=90)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(service.predict, *form(*((f"{number}.jpg", slow_image) for number in range(16))))
        assert service.predict(picture()).status == 200
        assert not slow.done()
    assert slow.result().status == 422
    assert "one of 16 images crashed the decoder, or took longer than 0.5 s" in slow.result().error


HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-"


def test_slow_clients_and_invalid_http_get_an_error_and_are_disconnected(service: Service) -> None:
    def send(data: bytes) -> tuple[bytes, str]:
        """Return status and error, or empty ones if the service closes the connection without an answer."""
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(data)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        return (answer.split()[1], json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) if answer else (b"", "")

    cases = [
        (HEAD + b"Length: 9\r\n\r\nslow", b"408", "more than 1 s"),
        (HEAD, b"408", "more than 1 s"),
        (HEAD.removesuffix(b"Content-") + b"Transfer-Encoding: chunked\r\n\r\n", b"411", "send a Content-Length"),
        (HEAD[:9], b"408", "more than 1 s"),
        (b"", b"", ""),
        (b"HELLO\r\n\r\n", b"400", "not a valid HTTP request"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 30_000, b"400", "header is too long"),
        (b"\x16\x03\x01\x02\x00", b"400", "not a valid HTTP request"),  # TLS
    ]
    with ThreadPoolExecutor() as threads:
        answers = threads.map(send, [data for data, _, _ in cases])
    for answer, (data, status, text) in zip(answers, cases, strict=True):
        assert (answer[0], text in answer[1]) == (status, True), (data[:80], answer)


def test_only_local_host_names_and_same_origin_pages_are_answered(service: Service) -> None:
    wide = "ｌocalhost".encode().decode("latin-1")
    for host in (
        *("evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.evil.com", "127.evil.1.com"),
        *("a.localhost", "evil.example.", "0.0.0.0:8000", "", "[", wide, "localhost/health?"),
        *("localhost@evil.example", "evil.example:80@localhost"),
    ):
        answer = service.ask("GET", "/health", headers={"Host": host})
        assert (answer.status, "does not answer to" in answer.error) == (400, True), host
    for host in ("localhost:9", "127.0.0.1", "[::1]:8000", "LocalHost"):
        assert service.ask("GET", "/health", headers={"Host": host}).status == 200, host
    for origin in (
        *("http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.2", "http://localhost:3000", "http://["),
        *("file://localhost:8000", "chrome-extension://localhost:8000"),
    ):
        answer = service.predict(picture(), {**JPEG, "Host": "localhost:8000", "Origin": origin})
        assert (answer.status, "pages of other sites" in answer.error) == (403, True), origin
    assert service.predict(picture(), {**JPEG, "Origin": service.url}).status == 200


def test_a_new_client_is_never_the_one_that_is_dropped() -> None:
    async def transports_of_clients(count: int) -> list[Mock]:
        config, state = Config(Mock(), log_config=None), ServerState()
        config.load()
        transports = []
        for _ in range(count):
            client = LimitedProtocol(config=config, server_state=state, app_state={})
            transports.append(Mock(**{"get_extra_info.return_value": None}))
            client.connection_made(transports[-1])
            client.deadline += 60  # it sends fast
        return transports

    transports = asyncio.run(transports_of_clients(MAX_CONNECTIONS + 1))
    assert [transport.abort.called for transport in transports] == [True] + [False] * MAX_CONNECTIONS
