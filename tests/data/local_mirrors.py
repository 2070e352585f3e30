"""Local mirrors with configurable faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Mirror:
    """The files, faults and requests of a server."""

    files: dict[str, bytes]
    status: int = 0  # error status of every response
    cuts: list[int] = field(default_factory=list)  # bytes of the body of the nth response
    ranges: bool = True  # supports Range
    corrupt: bool = False
    stall_after: int = -1  # bytes until the server stalls
    content_type: str = "application/octet-stream"
    promised: int = -1  # a wrong Content-Length
    requests: list[tuple[str, int]] = field(default_factory=list)  # (path, first byte) of every request
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.lstrip("/")
        first = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.requests.append((path, first))
        if self.status or path not in self.files:
            return handler.send_error(self.status or 404)
        content = self.files[path]
        if self.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        first = first if self.ranges else 0
        if first >= len(content):
            return handler.send_error(416)
        handler.send_response(206 if first else 200)
        handler.send_header("Content-Type", self.content_type)
        handler.send_header("Content-Length", str(self.promised if self.promised >= 0 else len(content) - first))
        handler.end_headers()
        body, step = content[first:][: self.cuts.pop(0) if self.cuts else None], 1000
        for at in range(0, len(body), step):
            if 0 <= self.stall_after <= at:
                return time.sleep(2.0)  # longer than the timeout of any test
            handler.wfile.write(body[at : at + step])
        return None


@contextmanager
def serving(mirror: Mirror) -> Iterator[Mirror]:
    """Serve `mirror` on a free port while the block runs, and set `mirror.url` (with a final slash)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                mirror.answer(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client disconnected

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
