"""A bucket on a local S3 server, whose answers a test can spoil."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

obstore = pytest.importorskip("obstore", reason="pip install 'cifar-lit[cloud]'")
moto_server = pytest.importorskip("moto.server", reason="pip install 'moto[s3,server]'")

from obstore.store import S3Store  # noqa: E402
from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: E402

from cifar_lit.extras.cloud import images, store  # noqa: E402

Fault = Callable[[Any, Any, Any], Any]  # (application, environ, start_response) -> body


class QuietHandler(WSGIRequestHandler):
    def log(self, *words: object) -> None:
        """Write nothing."""


class Bucket:
    """A bucket with its URL. `requests` are the methods and keys of all requests, `faults` spoil matching ones.

    A fault is a pattern of "METHOD key?query" and a function that answers in place of the server.
    """

    def __init__(self, name: str, endpoint: str, server: Server) -> None:
        self.url, self.server = f"s3://{name}", server
        options: Any = {"allow_http": True}
        self.store = S3Store(name, endpoint=endpoint, region="us-east-1", client_options=options)
        self.faults: list[tuple[str, Fault]] = []
        self.requests: list[str] = []

    def put(self, key: str, data: bytes) -> None:
        obstore.put(self.store, key, data)

    def put_raw(self, key: str, data: bytes) -> None:
        """Put an object whose key is no path for obstore."""
        address = f"{self.server.endpoint}/{self.url.removeprefix('s3://')}/{quote(key)}"
        urlopen(Request(address, data, method="PUT")).close()

    def delete(self, key: str) -> None:
        obstore.delete(self.store, key)

    def fill(self, folder: Path, prefix: str) -> str:
        """Upload a folder, and return its URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"{self.url}/{prefix}"

    def names(self) -> list[str]:
        return sorted(meta["path"] for page in obstore.list(self.store) for meta in page)

    def content(self, key: str) -> bytes:
        return bytes(obstore.get(self.store, key).bytes())

    def read(self, method: str) -> list[str]:
        """Return the keys that were requested with a method, without lists."""
        words = (request.partition("?")[0].split(" ", 1) for request in self.requests if "list-type" not in request)
        return sorted(key for each, key in words if each == method and key)


class Server:
    """moto's S3 server in a thread. It hands requests of a bucket with a matching fault to the fault."""

    def __init__(self) -> None:
        self.app = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self.buckets: dict[str, Bucket] = {}
        self.http = make_server("127.0.0.1", 0, self.answer, threaded=True, request_handler=QuietHandler)
        self.endpoint = f"http://127.0.0.1:{self.http.port}"
        Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, environ: dict[str, Any], start: Any) -> Any:
        name, _, key = environ["PATH_INFO"].strip("/").partition("/")
        bucket = self.buckets.get(name)
        if bucket is None:
            return self.app(environ, start)
        request = f"{environ['REQUEST_METHOD']} {key}?{environ['QUERY_STRING']}"
        bucket.requests.append(request)
        for pattern, fault in bucket.faults:
            if re.search(pattern, request):
                return fault(self.app, environ, start)
        return self.app(environ, start)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return an empty bucket, which this process finds by its environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": server.endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(store.RETRY, "max_retries", 1)
    monkeypatch.setattr(store, "PAUSE", 0.01)
    name = f"bucket-{len(server.buckets)}"
    bucket = Bucket(name, server.endpoint, server)
    urlopen(Request(f"{server.endpoint}/{name}", method="PUT")).close()
    server.buckets[name] = bucket
    return bucket


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function after which buckets are listed again, as in a new process."""

    def forget() -> None:
        images.local_copy.cache_clear()
        monkeypatch.delenv(images.SINCE, raising=False)

    forget()
    yield forget
    forget()
