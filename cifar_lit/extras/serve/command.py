"""`cifar-lit serve RUN`: serve the net of a run over HTTP, with a web page to try it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from cifar_lit.base.command_line import add_coverage, add_device, command_parser, parsed
from cifar_lit.base.errors import check_packages
from cifar_lit.base.hardware import resolve_device
from cifar_lit.base.text import say
from cifar_lit.base.threads import choose_threads
from cifar_lit.inference.load import load
from cifar_lit.inference.model_file import weights_file
from cifar_lit.inference.rejection import check_rate
from cifar_lit.inference.sets import check_coverage

DESCRIPTION = """Serve the net of a run over HTTP, with a web page to try it at /.

POST /predict accepts one image as the body, or a form with files (multipart/form-data). The response to one image is
{"label", "probability", "top": [{"label", "probability"}, …]}, to a form {"predictions": […]} in the order sent. With
--reject, each prediction has "unknown" (true or false); with --coverage, it has "prediction_set" (a list of classes).
?top=K returns K classes (default 3), ?seen=1 the image as the net gets it. GET /health describes the net. Errors are
{"error": "one line"}. Limits on time and connections, TLS and passwords are the work of a reverse proxy.
Example: curl -F image=@cat.jpg http://127.0.0.1:8000/predict"""


def serve(argv: list[str]) -> None:
    """Run the service until Ctrl-C or SIGTERM."""
    settings = _settings(argv)
    file = weights_file(settings.run)
    check_packages("serve", ("starlette", "uvicorn", "python_multipart"), "serve")
    from cifar_lit.extras.serve.app import PAGE, Service
    from cifar_lit.extras.web import THIS_MACHINE, Server, application, listen

    with listen(settings.host, settings.port) as sock:
        device = resolve_device(settings.accelerator)
        classifier = load(file, device)
        check_rate(settings.reject, classifier.card.reject)
        classifier.reject = settings.reject
        check_coverage(settings.coverage, classifier.card.coverage)
        classifier.coverage = settings.coverage
        # Leave one core to the connections: torch's threads spin while they wait.
        torch.set_num_threads(max(1, choose_threads()[0] - 1))
        size = "×".join(map(str, classifier.card.input_shape))
        say(f"serving {classifier.card.net} ({size}, {len(classifier.classes)} classes) on {device}")
        names: Sequence[str] = THIS_MACHINE
        host, port = sock.getsockname()[:2]
        if not ipaddress.ip_address(host).is_loopback:
            names = ["*"]
            say(f"any machine on the network can connect to {host}: there is no password and no encryption")
        if ":" in host:
            host = f"[{host}]"
        say(f"web page and POST /predict at http://{host}:{port} · stop with Ctrl-C")
        Server(application(Service(classifier, settings.max_mb * 1_000_000).routes, PAGE, names)).run([sock])
    say("stopped")


def _settings(argv: list[str]) -> Namespace:
    parser = command_parser("serve", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, help="folder of a finished run, or its model.safetensors")
    add("--host", type=str, default="127.0.0.1", help="address to listen on; 0.0.0.0 for every network interface")
    add("--port", type=int, default=8000, help="port to listen on; 0 for a free one")
    add("--reject", type=float | None, default=None, help="mark images as unknown at this false-alarm rate, up to 0.5")
    add_coverage(parser)
    add_device(parser)
    add("--max-mb", type=PositiveInt, default=10, help="largest request body in MB")
    return parsed(parser, argv)
