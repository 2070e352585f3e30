"""`cifar-lit serve RUN`: a run's net as an HTTP service with a page for trying it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from importlib.util import find_spec

from cifar_lit import __version__
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import resolve_device
from cifar_lit.inference.serve.bodies import Limits
from cifar_lit.runs.run_folder import weights_file
from cifar_lit.text import say

DESCRIPTION = """Serves a run's net over HTTP, with a page at / for trying it.

POST /predict takes one image as the body (Content-Type: image/jpeg or the like), a form with files (multipart/form-data), or
JSON: {"image": "<base64>"} or {"images": ["<base64>", …]}. One image is answered with {"label", "probability", "top": [{"label",
"probability"}, …]}, a form or a list with {"predictions": […]} in the order sent. ?top=K asks for K classes (3), ?seen=1 for
the picture as the net sees it. GET /health says what is served. Whatever is wrong is answered with {"error": "one line"}.
Try it with: curl -F image=@cat.jpg http://127.0.0.1:8000/predict"""


def serve(argv: list[str]) -> None:
    """Runs the service until Ctrl-C or SIGTERM; raises UsageError and Failure when it cannot be started."""
    default = Limits()
    parser = command_parser("serve", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="folder of a run that ended, or its model.safetensors")
    add(
        "--host",
        type=str,
        default="127.0.0.1",
        help="address or name to be reached at; 0.0.0.0 for all of this machine's",
    )
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--accelerator", type=str, default="auto", help="where to compute: auto, cpu, gpu, cuda:1, mps")
    add("--max-mb", type=float, default=default.body / 1e6, help="largest body of a request, in MB")
    add("--max-pixels", type=int, default=default.pixels, help="of one image, as its header says")
    add("--max-images", type=int, default=default.images, help="in one request")
    add(
        "--decode-seconds",
        type=float,
        default=default.decode_seconds,
        help="of a CPU for a request's images to be decoded",
    )
    add(
        "--body-seconds",
        type=float,
        default=default.body_seconds,
        help="for which a client may pause; a slow one uses them up",
    )
    settings = parsed(parser, argv)
    names = ("max_mb", "max_pixels", "max_images", "decode_seconds", "body_seconds")
    for name in names:
        if not 0 < settings[name] < 1e12:
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, not {settings[name]:g}")
    limits = Limits(round(settings.max_mb * 1e6), *(settings[name] for name in names[1:]))
    file = weights_file(settings.run)
    if missing := [package for package in ("starlette", "uvicorn", "httptools") if find_spec(package) is None]:
        raise Failure(f'serve needs {" and ".join(missing)}, not installed here: pip install "cifar-lit[serve]"')
    from cifar_lit.inference.load import load
    from cifar_lit.inference.serve.http import serve as run_service

    with _listen(settings.host, settings.port) as sock:
        host, port = sock.getsockname()[:2]
        local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        own = socket.gethostname().lower()
        own_names = None if local else frozenset({settings.host.lower(), own, f"{own}.local"})
        device = resolve_device(settings.accelerator)
        classifier = load(file, device)

        def on_ready() -> None:
            size = "×".join(map(str, classifier.card.input_shape))
            say(f"serving {classifier.card.net} ({size}, {len(classifier.classes)} classes) on {device}")
            if not local:
                say(f"open to every machine that reaches {host}: there is no password and no encryption")
            say(f"page and POST /predict at {_url(host, port)} · Ctrl-C stops it")

        run_service(classifier, sock, own_names, limits, __version__, on_ready)
    say("stopped")


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises UsageError or Failure when there can be none."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        text = f"--host {host} is no address: use 127.0.0.1 for this machine alone, 0.0.0.0 for every other too"
        raise UsageError(text) from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: is for IPv4 too
    try:
        sock = socket.create_server(address, family=family, backlog=512, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Failure(f"port {port} is in use: choose another with --port, or --port 0 for a free one") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {host} is not an address of this machine: use 127.0.0.1 or 0.0.0.0") from None
        if error.errno == errno.EACCES:
            raise UsageError(
                f"port {port} may not be used without more rights: choose one above 1023 with --port"
            ) from None
        raise
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # connections inherit it: an answer would wait 40 ms otherwise
    return sock


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
