"""`cifar-lit serve`: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import base64
import gzip
import io
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from odd_files import bomb, scan_bomb
from PIL import Image
from serving import JPEG, Service, form, picture, running
from small_nets import CLASSES

import cifar_lit
from cifar_lit.inference.serve.bodies import Images, Limits, RequestError, parse_body

pytest.importorskip("uvicorn", reason="pip install 'cifar-lit[serve]'")
JSON = {"Content-Type": "application/json"}
LIMITS = ("--max-mb", 2, "--max-pixels", 24_500_000, "--max-images", 40, "--decode-seconds", 3, "--body-seconds", 1)


@pytest.fixture(scope="module")
def service(served_run: Path) -> Iterator[Service]:
    with running(served_run, *LIMITS) as opened:
        yield opened


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_image_as_the_body_is_answered_as_the_net_answers(service: Service, served_run: Path) -> None:
    answer = service.predict(picture())
    assert answer.status == 200
    (expected,) = cifar_lit.load(served_run).predict(Image.open(io.BytesIO(picture())))
    assert answer.json["label"] == expected.label
    assert answer.json["probability"] == pytest.approx(expected.probability, abs=1e-5)
    assert [(one["label"], pytest.approx(one["probability"], abs=1e-5)) for one in answer.json["top"]] == list(expected.top)
    assert len(answer.json["top"]) == 3


def test_a_form_json_and_a_data_url_say_the_same_as_the_body(service: Service) -> None:
    alone = service.predict(picture()).json
    body, kind = form(("a.jpg", picture()), ("b.png", picture(1, kind="PNG")))
    assert service.predict(body, kind).json == {"predictions": [alone, service.predict(picture(1, kind="PNG")).json]}
    assert service.predict(json.dumps({"image": encoded(picture())}), JSON).json == alone
    url = "data:image/jpeg;base64," + encoded(picture())
    assert service.predict(json.dumps({"images": [url]}), JSON).json == {"predictions": [alone]}


def test_top_says_how_many_classes_are_named(service: Service) -> None:
    assert len(service.predict(picture(), query="?top=1").json["top"]) == 1
    everything = service.predict(picture(), query="?top=99").json["top"]
    assert sorted(one["label"] for one in everything) == sorted(CLASSES)
    assert sum(one["probability"] for one in everything) == pytest.approx(1, abs=1e-5)
    for top in ("0", "-1", "x", "", "1.5", "9" * 5000, "²"):
        answer = service.predict(picture(), query=f"?top={quote(top)}")
        assert (answer.status, "top must be a whole number from 1 to 4" in answer.error) == (422, True), top


def test_seen_is_the_picture_as_the_net_takes_it(service: Service, served_run: Path) -> None:
    url = service.predict(picture(), query="?seen=1").json["seen"]
    seen = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    expected = cifar_lit.load(served_run).prepare(Image.open(io.BytesIO(picture())))[0].permute(1, 2, 0).numpy()
    assert seen.size == (16, 16) and (expected == seen).all()


def test_many_clients_at_once_get_each_their_own_answer(service: Service) -> None:
    pictures = [picture(seed) for seed in range(40)]
    alone = [service.predict(one).json for one in pictures]
    assert len({json.dumps(one) for one in alone}) > 30
    with ThreadPoolExecutor(20) as threads:
        together = list(threads.map(lambda one: service.predict(one).json, pictures * 3))
    for answer, expected in zip(together, alone * 3, strict=True):
        assert answer["label"] == expected["label"]
        assert answer["probability"] == pytest.approx(expected["probability"], abs=1e-5)


def test_health_says_what_is_served(service: Service) -> None:
    health = service.ask("GET", "/health")
    expected = {"status": "ok", "net": "lenet", "classes": CLASSES, "image_size": [16, 16], "channels": 3}
    assert health.status == 200 and health.json.items() >= expected.items()
    assert health.json["version"] == cifar_lit.__version__
    assert health.json["limits"]["body"] == 2_000_000


def test_the_page_and_its_files_are_whole_each_time_also_packed(service: Service) -> None:
    for path in ("/", "/page.css", "/page.js", "/"):
        plain = service.ask("GET", path)
        packed = service.ask("GET", path, headers={"Accept-Encoding": "gzip"})
        assert (plain.status, packed.status) == (200, 200)
        assert gzip.decompress(packed.body) == plain.body
        assert "default-src 'none'" in plain.headers["content-security-policy"]
        assert "access-control-allow-origin" not in plain.headers


# ---- what is refused


@pytest.mark.parametrize(
    ("status", "text", "body", "headers"),
    [
        pytest.param(422, "cut short", picture()[:400], JPEG, id="cut"),
        pytest.param(422, "24,500,000 pixels: make it smaller", bomb(), JPEG, id="bomb"),
        pytest.param(413, "larger than 2 MB", bytes(2_000_001), JPEG, id="large"),
        pytest.param(413, "larger than 2 MB", bytes(100_000_000), JPEG, id="huge"),
        pytest.param(413, "larger than 2 MB", [bytes(100_000)] * 200, JPEG, id="of unknown length"),
        pytest.param(422, "image 2 (b.jpg) cannot be read: cut", *form(("a", picture()), ("b.jpg", picture()[:400])), id="form"),
        pytest.param(415, "add -H", picture(), {"Content-Type": "application/x-www-form-urlencoded"}, id="curl's type"),
    ],
)
def test_what_is_wrong_is_refused_in_a_line(
    service: Service, status: int, text: str, body: bytes | list[bytes], headers: dict[str, str]
) -> None:
    answer = service.predict(iter(body) if isinstance(body, list) else body, headers)
    assert (answer.status, text in answer.error) == (status, True), answer.error
    assert service.predict(picture()).status == 200  # it goes on


@pytest.mark.parametrize(
    ("kind", "body", "status", "text"),
    [
        ("text/plain", picture(), 415, "'text/plain' is not taken"),
        ("image/svg+xml", b"<svg/>", 415, "is not a JPEG, PNG, WebP, BMP or GIF"),
        ("image/webp", b"RIFF1234WAVE", 415, "is not a JPEG"),
        ("image/jpeg", b"", 400, "is empty"),
        ("multipart/form-data", b"x", 400, "no boundary"),
        ("multipart/form-data; boundary=", b"--\r\n\r\n\r\n----", 400, "no boundary"),
        ("multipart/form-data; boundary=x-y", form(("a", picture()))[0][:-9], 400, "cut short"),
        ("multipart/form-data; boundary=x-y", form()[0], 400, "no image"),
        ("multipart/form-data; boundary=x-y", b"--x-y\r\nno headers\r\n--x-y--", 400, "no headers"),
        ("multipart/form-data; boundary=x-y", form(*[("a", picture())] * 4)[0], 413, "4 images are too many: at most 3"),
        ("application/json", json.dumps({"images": [encoded(picture())] * 4}).encode(), 413, "4 images are too many"),
        ("application/json", b"[" * 100_000, 400, "not valid JSON"),
        ("application/json", b"\xff\xfe", 400, "not valid JSON"),
        ("application/json", b"[]", 422, '"image" or "images"'),
        ("application/json", b'{"picture": ""}', 422, '"image" or "images"'),
        ("application/json", b'{"image": "", "images": []}', 422, '"image" or "images"'),
        ("application/json", b'{"image": 3}', 422, "must be a base64 text, not int"),
        ("application/json", b'{"images": "abc"}', 422, "must be a list"),
        ("application/json", b'{"images": ["%%%"]}', 422, "image 1 is not valid base64"),
        ("application/json", '{"image": "é"}'.encode(), 422, "not valid base64"),
    ],
)
def test_what_holds_no_images_is_refused(kind: str, body: bytes, status: int, text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_body(kind, body, Limits(images=3))
    assert (error.value.status, text in error.value.text, "\n" in error.value.text) == (status, True, False)


def test_files_of_a_form_are_taken_to_the_byte_and_other_fields_are_left_out() -> None:
    odd = picture() + b"\r\n--x-\r\n\r\n--\n--x-y"  # what looks like the form's own lines but is none
    body, headers = form(("a.jpg", odd), ("b.bmp", b"BM\r\n"))
    note = b'--x-y\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
    images = parse_body(headers["Content-Type"], b"a preamble\r\n" + note + body, Limits())
    assert images == Images([("image 1 (a.jpg)", odd), ("image 2 (b.bmp)", b"BM\r\n")], many=True)


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('form-data; name="i"; filename="katze \\"1\\".jpg"', 'katze "1".jpg'),
        ("form-data; name=i; filename*=UTF-8''gr%C3%BCn.jpg", "grün.jpg"),
        ('form-data; name="i"; filename=""', "without a name"),
        ('form-data; name="i"; filename="' + "x" * 500 + '"', "x" * 80),
        ('form-data; name="i"; filename="a\x1b[31m.jpg"', "a?[31m.jpg"),
    ],
)
def test_names_in_a_form_are_quoted_short_and_printable(disposition: str, name: str) -> None:
    body = f"--b\r\ncontent-disposition: {disposition}\r\n\r\n".encode() + picture() + b"\r\n--b--"
    files = parse_body('multipart/form-data; boundary="b"', body, Limits()).files
    assert files == [(f"image 1 ({name})", picture())]


def test_base64_may_be_folded_and_a_body_may_have_any_images_type() -> None:
    folded = json.dumps({"image": base64.encodebytes(picture()).decode()}).encode()
    assert "\\n" in folded.decode()
    bodies = {"application/json; charset=utf-8": folded}
    bodies |= dict.fromkeys(("image/jpeg", "IMAGE/PNG; q=1", "application/octet-stream", ""), picture())
    for kind, body in bodies.items():
        assert parse_body(kind, body, Limits()) == Images([("the image", picture())], many=False)


@pytest.mark.parametrize(
    ("request_line", "status", "text"),
    [
        ("GET /nothing", 404, "there is nothing at /nothing"),
        ("POST /predict/", 404, "nothing at /predict/"),
        ("GET /predict", 405, "use POST"),
        ("POST /", 405, "use GET"),
        ("DELETE /health", 405, "does not take DELETE"),
    ],
)
def test_other_paths_and_methods_are_told_what_there_is(service: Service, request_line: str, status: int, text: str) -> None:
    answer = service.ask(*request_line.split())
    assert (answer.status, text in answer.error) == (status, True), answer.error


def test_an_image_that_takes_too_long_is_given_up_and_holds_nobody_up(service: Service) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(service.predict, scan_bomb())
        assert service.predict(picture()).status == 200
        assert not slow.done()
    assert slow.result().status == 422
    assert "takes longer than 3 s to decode" in slow.result().error


def sent(service: Service, data: bytes) -> tuple[bytes, str]:
    """The status and the error that come back for raw bytes until the service closes the connection; empty for none."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return (answer.split()[1], json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) if answer else (b"", "")


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nslow", b"408", "within 1 s"),
        (b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-", b"408", "within 1 s"),
        (b"POST /pre", b"408", "within 1 s"),
        (b"", b"", ""),
        (b"HELLO\r\n\r\n", b"400", "not a valid HTTP request"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000, b"431", "header is too long"),
        (b"\x16\x03\x01\x02\x00", b"400", "not a valid HTTP request"),
    ],
    ids=["body", "header", "first line", "nothing", "no HTTP", "header without end", "TLS"],
)
def test_clients_that_are_too_slow_or_speak_no_http_are_told_and_let_go(
    service: Service, data: bytes, status: bytes, text: str
) -> None:
    answer = sent(service, data)
    assert (answer[0], text in answer[1]) == (status, True), answer


def test_only_names_of_this_machine_are_answered(service: Service) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "localhost.evil.example"):
        answer = service.ask("GET", "/health", headers={"Host": host})
        assert (answer.status, "answers to localhost" in answer.error) == (400, True), host
    for host in ("localhost", "localhost:9", "127.0.0.1", "[::1]:8000", "a.localhost"):
        assert service.ask("GET", "/health", headers={"Host": host}).status == 200, host


def test_pages_of_other_sites_are_refused(service: Service) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        answer = service.predict(picture(), {**JPEG, "Origin": origin})
        assert (answer.status, "pages of other sites" in answer.error) == (403, True), origin
    assert service.predict(picture(), {**JPEG, "Origin": service.url}).status == 200
