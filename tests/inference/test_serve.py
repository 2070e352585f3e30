"""`cifar-lit serve`: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import base64
import gzip
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from odd_files import ODD_FILES, OddFile
from PIL import Image
from security.bombs import scan_bomb, zip_bomb
from serving import CLASSES, JPEG, Service, form, picture, running, write_net

import cifar_lit

pytest.importorskip("litserve", reason="LitServe is not installed: pip install 'cifar-lit[serve]'")
JSON = {"Content-Type": "application/json"}
LIMITS = ("--max-mb", 2, "--max-pixels", 24_500_000, "--max-images", 40, "--decode-seconds", 1, "--body-seconds", 1)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_net(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def service(net: Path) -> Iterator[Service]:
    with running(net, *LIMITS) as found:
        yield found


@pytest.fixture(autouse=True)
def goes_on(service: Service) -> Iterator[None]:
    """After each of these tests, whatever it sent, the service still answers."""
    yield
    assert service.predict(picture()).status == 200


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_image_as_the_body_is_answered_as_the_net_answers(service: Service, net: Path) -> None:
    answer = service.predict(picture())
    assert answer.status == 200
    (expected,) = cifar_lit.load(net).predict(Image.open(io.BytesIO(picture())))
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
    assert service.predict(picture(), {"Content-Type": "application/octet-stream"}).json == alone


def test_top_says_how_many_classes_are_named(service: Service) -> None:
    assert len(service.predict(picture(), query="?top=1").json["top"]) == 1
    everything = service.predict(picture(), query="?top=99").json["top"]
    assert sorted(one["label"] for one in everything) == sorted(CLASSES)
    assert sum(one["probability"] for one in everything) == pytest.approx(1, abs=1e-5)


def test_seen_is_the_picture_as_the_net_takes_it(service: Service, net: Path) -> None:
    seen = service.predict(picture(), query="?seen=1").json["seen"]
    found = Image.open(io.BytesIO(base64.b64decode(seen.removeprefix("data:image/png;base64,"))))
    expected = cifar_lit.load(net).prepare(Image.open(io.BytesIO(picture())))[0].permute(1, 2, 0).numpy()
    assert found.size == (16, 16)
    assert (expected == found).all()


def test_many_clients_at_once_get_each_their_own_answer(service: Service) -> None:
    pictures = [picture(seed) for seed in range(40)]
    alone = [service.predict(one).json for one in pictures]
    assert len({json.dumps(one) for one in alone}) > 30
    with ThreadPoolExecutor(20) as threads:
        together = list(threads.map(lambda one: service.predict(one).json, pictures * 3))
    for found, expected in zip(together, alone * 3, strict=True):
        assert found["label"] == expected["label"]
        assert found["probability"] == pytest.approx(expected["probability"], abs=1e-5)


def test_health_says_what_is_served(service: Service) -> None:
    found = service.ask("GET", "/health")
    assert found.status == 200
    expected = {"status": "ok", "net": "lenet", "classes": CLASSES, "image_size": [16, 16], "channels": 3}
    assert found.json.items() >= expected.items()
    assert found.json["version"] == cifar_lit.__version__
    assert found.json["limits"]["body"] == 2_000_000


def test_the_page_and_its_files_are_whole_each_time_also_packed(service: Service) -> None:
    for path in ("/", "/page.css", "/page.js", "/"):
        plain = service.ask("GET", path)
        packed = service.ask("GET", path, headers={"Accept-Encoding": "gzip"})
        assert (plain.status, packed.status) == (200, 200)
        assert gzip.decompress(packed.body) == plain.body
        assert "default-src 'none'" in plain.headers["content-security-policy"]
        assert "access-control-allow-origin" not in plain.headers


REFUSED = {
    "a cut JPEG": (422, "cut short", picture()[:400], JPEG),
    "a bomb": (422, "24,500,000 pixels: make it smaller", zip_bomb(), JPEG),
    "a body that is too large": (413, "larger than 2 MB", bytes(2_000_001), JPEG),
    "a huge body": (413, "larger than 2 MB", bytes(100_000_000), JPEG),
    "text": (415, "is not a JPEG, PNG, WebP, BMP or GIF", b"hello", JPEG),
    "nothing": (400, "is empty", b"", JPEG),
    "a wrong type": (415, "'text/plain' is not taken", picture(), {"Content-Type": "text/plain"}),
    "curl's usual type": (415, "add -H", picture(), {"Content-Type": "application/x-www-form-urlencoded"}),
    "a form without boundary": (400, "no boundary", b"x", {"Content-Type": "multipart/form-data"}),
    "a form that is cut": (400, "cut short", form(("a", picture()))[0][:-9], form()[1]),
    "a form without files": (400, "no image", *form()),
    "a form with a bad file": (
        422,
        "image 2 (b.jpg) cannot be read: cut short",
        *form(("a", picture()), ("b.jpg", picture()[:400])),
    ),
    "too many images": (413, "41 images are too many: at most 40", *form(*[("a", picture())] * 41)),
    "no JSON": (400, "not valid JSON", b'{"image": ', JSON),
    "JSON without end": (400, "not valid JSON", b"[" * 100_000, JSON),
    "JSON of something else": (422, '"image" or "images"', b'{"picture": ""}', JSON),
    "a number for an image": (422, "must be a base64 text, not int", b'{"image": 3}', JSON),
    "a text for a list": (422, "must be a list", b'{"images": "abc"}', JSON),
    "no base64": (422, "image 1 is not valid base64", b'{"images": ["%%%"]}', JSON),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_in_a_line_within_a_second(service: Service, what: str) -> None:
    status, text, body, headers = REFUSED[what]
    answer = service.predict(body, headers)
    assert (answer.status, text in answer.error) == (status, True), answer.error
    assert answer.seconds < 1


@pytest.mark.parametrize("top", ["0", "-1", "x", "", "1.5", "9" * 5000, "²"])
def test_a_wrong_top_is_refused(service: Service, top: str) -> None:
    from urllib.parse import quote

    answer = service.predict(picture(), query=f"?top={quote(top)}")
    assert (answer.status, "top must be a whole number from 1 to 4" in answer.error) == (422, True)


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/nothing", 404, "there is nothing at /nothing"),
        ("GET", "/docs", 404, "nothing at /docs"),
        ("POST", "/predict/", 404, "nothing at /predict/"),
        ("GET", "/predict", 405, "use POST"),
        ("POST", "/", 405, "use GET"),
        ("DELETE", "/health", 405, "does not take DELETE"),
    ],
)
def test_other_paths_and_methods_are_told_what_there_is(service: Service, method: str, path: str, status: int, text: str) -> None:
    answer = service.ask(method, path)
    assert (answer.status, text in answer.error) == (status, True), answer.error


def test_a_body_of_unknown_length_is_refused_as_soon_as_it_is_too_large(service: Service) -> None:
    answer = service.predict(iter([bytes(100_000)] * 200))  # sent in chunks
    assert answer.status == 413
    assert "larger than 2 MB" in answer.error


def test_an_image_that_takes_too_long_is_given_up_and_holds_nobody_up(service: Service) -> None:
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(service.predict, scan_bomb())
        time.sleep(0.3)
        assert not slow.done()
        assert service.predict(picture()).seconds < 0.6
        assert slow.result().status == 422
    assert "takes longer than 1 s to decode" in slow.result().error
    assert 0.9 < slow.result().seconds < 3


@pytest.mark.parametrize(
    "begun",
    [
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nslow",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-",
        b"POST /pre",
    ],
    ids=["body", "header", "first line"],
)
def test_a_client_that_is_too_slow_is_told_and_let_go(service: Service, begun: bytes) -> None:
    before = time.perf_counter()
    found = service.sent(begun)
    assert 0.8 < time.perf_counter() - before < 3
    assert found.startswith(b"HTTP/1.1 408 ")
    assert "within 1 s" in json.loads(found.partition(b"\r\n\r\n")[2])["error"]


def test_a_connection_without_a_request_is_closed(service: Service) -> None:
    assert service.sent(b"") == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"HELLO\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000, b"431"), (b"\x16\x03\x01\x02\x00", b"400")],
    ids=["no HTTP", "header without end", "TLS"],
)
def test_what_is_no_http_is_refused_in_json(service: Service, data: bytes, status: bytes) -> None:
    found = service.sent(data)
    assert found.split()[1] == status
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "localhost.evil.example"]
)
def test_a_name_that_is_not_this_machines_is_refused(service: Service, host: str) -> None:
    answer = service.ask("GET", "/health", headers={"Host": host})
    assert (answer.status, "answers to localhost" in answer.error) == (400, True)


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1", "[::1]:8000", "a.localhost"])
def test_names_of_this_machine_are_answered(service: Service, host: str) -> None:
    assert service.ask("GET", "/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_pages_of_other_sites_are_refused(service: Service, origin: str) -> None:
    answer = service.predict(picture(), {**JPEG, "Origin": origin})
    assert (answer.status, "pages of other sites" in answer.error) == (403, True)
    assert service.predict(picture(), {**JPEG, "Origin": service.url}).status == 200


@pytest.mark.parametrize("odd", ODD_FILES, ids=lambda odd: odd.name)
def test_an_odd_file_is_named_or_refused_in_words(service: Service, odd: OddFile) -> None:
    answer = service.predict(odd.make(), {"Content-Type": "application/octet-stream"})
    if odd.readable:
        assert answer.status == 200, answer.error
        assert answer.json["label"] in CLASSES
    else:
        assert answer.status in (400, 413, 415, 422)
        assert answer.error
