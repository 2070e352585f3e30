"""`cifar-lit serve RUN`: serve the net of a run over HTTP, with a web page to try it."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from importlib.util import find_spec
from pathlib import Path

from jsonargparse.typing import PositiveInt

from cifar_lit import __version__
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import resolve_device
from cifar_lit.inference.serve.bodies import Limits
from cifar_lit.inference.serve.collect import MAX_BYTES, MAX_FILES, Collector
from cifar_lit.runs.run_folder import display_path, weights_file
from cifar_lit.text import say

DESCRIPTION = """Serve the net of a run over HTTP, with a web page to try it at /.

POST /predict accepts one image as the body (Content-Type: image/jpeg or another image type), a form with files
(multipart/form-data), or JSON: {"image": "<base64>"} or {"images": ["<base64>", …]}. The response to one image is
{"label", "probability", "top": [{"label", "probability"}, …]}, to a form or a list {"predictions": […]} in the order
sent. With --reject, each prediction has "unknown" (true or false). ?top=K returns K classes (default 3), ?seen=1 the
image as the net gets it. GET /health describes the net. Errors are {"error": "one line"}.
Example: curl -F image=@cat.jpg http://127.0.0.1:8000/predict"""


def serve(argv: list[str]) -> None:
    """Run the service until Ctrl-C or SIGTERM."""
    default = Limits()
    parser = command_parser("serve", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="folder of a finished run, or its model.safetensors")
    add("--host", type=str, default="127.0.0.1", help="address to listen on; 0.0.0.0 for every network interface")
    add("--port", type=int, default=8000, help="port to listen on; 0 for a free one")
    add("--reject", type=float | None, default=None, help="mark images as unknown at this false-alarm rate, up to 0.5")
    add("--accelerator", type=str, default="auto", help="device: auto, cpu, gpu, cuda:1 or mps")
    add("--threads", type=PositiveInt | None, default=None, help="CPU threads, by default those that are free")
    add("--max-mb", type=float, default=default.body / 1e6, help="largest request body in MB")
    add("--max-pixels", type=int, default=default.pixels, help="largest image in pixels, according to its header")
    add("--max-images", type=int, default=default.images, help="most images per request")
    decode = "CPU seconds to decode the images of a request"
    add("--decode-seconds", type=float, default=default.decode_seconds, help=decode)
    body = "seconds for which a client may pause while it sends the body; a slow transfer counts as a pause"
    add("--body-seconds", type=float, default=default.body_seconds, help=body)
    collect = "keep pictures whose largest probability is below P, or that are unknown (--reject), in DIR"
    add("--collect-below", type=str, nargs=2, default=None, metavar=("P", "DIR"), help=collect)
    settings = parsed(parser, argv)
    names = ("max_mb", "max_pixels", "max_images", "decode_seconds", "body_seconds")
    for name in names:
        if not 0 < settings[name] < 1e12:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {settings[name]:g}")
    limits = Limits(round(settings.max_mb * 1e6), *(settings[name] for name in names[1:]))
    file = weights_file(settings.run)
    collector = _collector(*settings.collect_below) if settings.collect_below else None
    if missing := [package for package in ("starlette", "uvicorn", "httptools") if find_spec(package) is None]:
        raise Failure(f'serve needs missing packages ({", ".join(missing)}): pip install "cifar-lit[serve]"')
    from cifar_lit.inference.load import load
    from cifar_lit.inference.serve.http import serve as run_service
    from cifar_lit.runs.card import check_rate

    with listen(settings.host, settings.port) as sock:
        host, port = sock.getsockname()[:2]
        local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        own = socket.gethostname().lower()
        own_names = None if local else frozenset({settings.host.lower(), own, f"{own}.local"})
        device = resolve_device(settings.accelerator)
        classifier = load(file, device)
        classifier.reject = None
        if settings.reject is not None:
            classifier.reject = check_rate(settings.reject, classifier.card.reject)

        def on_ready() -> None:
            size = "×".join(map(str, classifier.card.input_shape))
            say(f"serving {classifier.card.net} ({size}, {len(classifier.classes)} classes) on {device}")
            if not local:
                say(f"any machine on the network can connect to {host}: there is no password and no encryption")
            address = f"[{host}]" if ":" in host else host
            if collector:
                limits_text = f"at most {MAX_FILES:,} files and {MAX_BYTES / 1e6:.0f} MB"
                say(f"uncertain pictures are kept in {display_path(collector.folder)} ({limits_text}): tell your users")
            say(f"web page and POST /predict at http://{address}:{port} · stop with Ctrl-C")

        run_service(classifier, sock, own_names, limits, __version__, on_ready, collector, settings.threads)
    say("stopped")


def _collector(threshold: str, folder: str) -> Collector:
    if not re.fullmatch(r"0?\.[0-9]+|[01](\.0*)?", threshold):
        rule = "--collect-below takes a probability from 0 to 1 and a folder, as in --collect-below 0.6 uncertain"
        raise UsageError(f"{rule}: not {threshold}")
    return Collector(float(threshold), Path(folder).expanduser())


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise UsageError or Failure if it cannot be opened."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        text = (
            f"--host {host} is not an address: use 127.0.0.1 (this machine only) or 0.0.0.0 (every network interface)"
        )
        raise UsageError(text) from None
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: accepts IPv4 too
    try:
        sock = socket.create_server(address, family=family, backlog=512, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Failure(f"port {port} is in use: choose another with --port, or --port 0 for a free one") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host} is not an address of this machine: use 127.0.0.1 or 0.0.0.0") from None
        if error.errno == errno.EACCES:
            raise UsageError(f"port {port} needs administrator rights: choose one above 1023 with --port") from None
        raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # for all connections: Nagle would delay answers 40 ms
    return sock
