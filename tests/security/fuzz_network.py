"""Readers of what comes over the network: bodies of requests, answers of mirrors."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import strategies as st
from security.fuzz_files import PICTURES, pictures
from security.fuzzing import Reader, refused_or_read
from security.mutations import damaged, json_files

from cifar_lit.data import download
from cifar_lit.data.download import fetch
from cifar_lit.inference.serve.bodies import Limits, parse_body


def put_impatience() -> None:
    download.RETRY_PAUSE, download.STALL_SECONDS = 0.0, 0.3
    os.environ["no_proxy"] = "127.0.0.1"


@contextmanager
def answering(answers: list[bytes]) -> Iterator[str]:
    """Gives each connection the next answer, the last one to all further ones."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            rest = [*answers]
            with suppress(OSError):
                while True:
                    with server.accept()[0] as connection, suppress(OSError):
                        connection.recv(4096)
                        connection.sendall(rest.pop(0) if len(rest) > 1 else rest[0])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/a.gz"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


WANTED = b"the file that is wanted" * 20
MD5 = hashlib.md5(WANTED).hexdigest()
status_lines = st.sampled_from(
    [b"200 OK", b"206 Partial", b"301 Moved", b"416 No", b"404 No", b"500 No", b"100 Go on", b"999 x", b"x"]
)
header_values = st.sampled_from([
    b"0", b"5", b"460", b"-1", b"9" * 30, b"x", b"chunked", b"gzip", b"bytes 5-459/460", b"bytes */0", b"text/html", b"\xff",
    b"a\0b", b"http://127.0.0.1:9/x", b"file:///etc/passwd", b"//", b"http://[", b"",
])  # fmt: skip
header_names = st.sampled_from(
    [b"Content-Length", b"Transfer-Encoding", b"Content-Range", b"Content-Type", b"Location", b"X", b""]
)
answers = st.tuples(
    status_lines, st.lists(st.tuples(header_names, header_values), max_size=4), damaged(WANTED) | st.sampled_from([WANTED, b""])
).map(
    lambda parts: (
        b"HTTP/1.1 " + parts[0] + b"\r\n" + b"".join(b": ".join(each) + b"\r\n" for each in parts[1]) + b"\r\n" + parts[2]
    )
)
GOOD_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 460\r\nContent-Type: a/b\r\n\r\n" + WANTED


ENDLESS = [[b"HTTP/1.1 301 Moved\r\nContent-Length: " + b"9" * 30 + b"\r\nLocation: /\r\n\r\nx"]]


def read_answers(given: list[bytes]) -> None:
    Path("data").mkdir()
    try:
        with answering(given) as url:
            refused_or_read(lambda: fetch("a.gz", [url], MD5, Path("data/a.gz")))
    finally:
        shutil.rmtree("data")


FORM = (
    b'--xx\r\nContent-Disposition: form-data; name="image"; filename="cat.png"\r\nContent-Type: image/png\r\n\r\n'
    + PICTURES[0]
    + b'\r\n--xx\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n--xx\r\nContent-Disposition: form-data; '
    b"filename*=UTF-8''%e2%82%ac.gif\r\n\r\nGIF89a\r\n--xx--\r\n"
)
FORM_TYPE = "multipart/form-data; boundary=xx"
BASE64 = {"images": ["R0lGODlhAQABAAAAACw=", "data:image/gif;base64,R0lGODlh"]}
TYPE_WORDS = (
    "multipart/form-data", "; boundary=", "; boundary*=", "; boundary*0=xx", "; boundary*1*=utf-8''x", "xx", '"', "''", ";",
    "image/png", "application/json", "; charset=bogus", "application/octet-stream", "\xff", "%", "\r\n", "*", ",",
)  # fmt: skip
content_types = st.sampled_from([FORM_TYPE, "application/json", "image/png", ""]) | st.lists(
    st.sampled_from(TYPE_WORDS) | st.text(st.characters(max_codepoint=255), max_size=4), max_size=6
).map("".join)
DISPOSITIONS = (
    b"filename*0=", b"filename*0*=", b"filename*=bogus''x", b"filename*=''%ff", b'filename="', b"=?utf-8?q?=ff?=", b";",
    b"\r\n ", b"\0",
)  # fmt: skip


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    """The form with pieces of the grammar of its headers anywhere."""
    form = FORM
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, 120) | st.integers(0, len(form)))
        form = form[:place] + draw(st.sampled_from(DISPOSITIONS) | st.binary(max_size=4)) + form[place:]
    return form


bodies = damaged(FORM) | forms() | json_files(BASE64) | json_files({"image": BASE64["images"][0]}) | pictures


def read_body(given: tuple[str, bytes]) -> None:
    parsed = refused_or_read(lambda: parse_body(*given, Limits()))
    if parsed is not None:
        assert all(name.isprintable() and len(name) < 200 and data for name, data in parsed.files), parsed


READERS = {
    "the answers of a mirror": Reader(
        st.lists(answers | damaged(GOOD_ANSWER), min_size=1, max_size=3), read_answers, put_impatience, ENDLESS, connects=True
    ),
    "the body of a request": Reader(
        st.tuples(content_types, bodies), read_body, found=[(FORM_TYPE, FORM.replace(b"UTF-8''", b"\0TF-8''"))]
    ),
}
