"""`cifar-lit bench serve RUN`: a service under load from another process, and its answers to bad inputs."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar_lit.bench.bad_inputs import BadInput, Verdict, bad_inputs, judge, small_jpegs
from cifar_lit.bench.report import environment, footer, headline, settings_of, show, shown_spread, spread, write_figures
from cifar_lit.bench.service import Connection, Service, predict_request, started
from cifar_lit.errors import UsageError

WHAT = (
    "A service that was just started, under load from this process: requests/s and how long they take, with one client and "
    "with several at a time, each sending one small JPEG after the other over its own connection; then bad inputs, the "
    "status that each is answered with, after how long, and whether the service goes on."
)
BODY_SECONDS = 1.0  # --body-seconds of the measured service: what a slow client is given


def add_arguments(parser: Any) -> None:
    """The flags of this measurement."""
    parser.add_argument("run", type=str, help="folder of a run that ended, or its model.safetensors")
    parser.add_argument("--images", type=str | None, default=None, help="folder of JPEGs to send; drawn ones if not given")
    parser.add_argument("--clients", type=str, default="1,32", help="how many at a time")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load in each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds for each number of clients, in turns")
    parser.add_argument("--accelerator", type=str, default="auto", help="what the net runs on")


def run(settings: Any) -> None:
    """Runs the measurement; raises UsageError and Failure, those of the service with the line that it ended with."""
    counts = _counts(settings.clients)
    if settings.seconds <= 0 or settings.rounds < 1:
        raise UsageError("--seconds must be more than 0 and --rounds at least 1")
    images = _images(settings.images)
    words = [settings.run, "--accelerator", settings.accelerator, "--body-seconds", str(BODY_SECONDS)]
    with started(words) as service:
        requests = [predict_request(image) for image in images]
        asyncio.run(load(service, requests, max(counts), 1.0))  # warm
        seconds: dict[int, list[list[float]]] = {count: [] for count in counts}
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for _, count in itertools.product(range(settings.rounds), counts):
            before = time.perf_counter()
            found = asyncio.run(load(service, requests, count, settings.seconds))
            rates[count].append(len(found) / (time.perf_counter() - before))
            seconds[count].append(found)
        memory = service.memory()
        verdicts = [(bad, judge(service, bad, requests[0])) for bad in bad_inputs()]
    figures = figures_of(settings, service, images, rates, seconds, memory, verdicts)
    if settings.json:
        write_figures(Path(settings.json), figures)
    _print(figures)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"--clients must be whole numbers with commas between, such as 1,32, not {text}")
    return counts


def _images(folder: str | None) -> list[bytes]:
    if folder is None:
        return small_jpegs(64)
    paths = sorted(path for path in Path(folder).expanduser().rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise UsageError(f"there are no JPEGs in {folder}: name another folder, or leave --images out for drawn ones")
    return [path.read_bytes() for path in paths[:: max(1, len(paths) // 256)][:256]]


async def load(service: Service, requests: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds of every request that so many clients made one after the other within a time, over connections kept open."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    found: list[float] = []

    async def client(number: int) -> None:
        connection = await Connection.to(service)
        for place in itertools.count(number):
            before = loop.time()
            if before >= end:
                break
            status, body = await connection.ask(requests[place % len(requests)])
            if status != 200:
                raise UsageError(f"the service answered {status}: {body.decode()}")
            found.append(loop.time() - before)
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return found


def figures_of(
    settings: Any,
    service: Service,
    images: Sequence[bytes],
    rates: dict[int, list[float]],
    seconds: dict[int, list[list[float]]],
    memory: float | None,
    verdicts: Sequence[tuple[BadInput, Verdict]],
) -> dict[str, Any]:
    """The figures: rates and times by number of clients over the rounds, and the answers to bad inputs."""
    load_of = {}
    rows = []
    for count, all_rounds in seconds.items():
        found = {
            "requests/s": spread(rates[count]),
            "p50 ms": spread(1000 * statistics.median(times) for times in all_rounds),
            "p99 ms": spread(1000 * quantile(times, 0.99) for times in all_rounds),
        }
        load_of[str(count)] = {**found, "requests": sum(map(len, all_rounds))}
        rows += [(f"{count} at a time, {name.split()[0]}", value, name.split()[-1]) for name, value in found.items()]
    answers = {bad.name: verdict._asdict() for bad, verdict in verdicts}
    return {
        "bench": "serve",
        "settings": {
            **{name: value for name, value in settings_of(settings).items() if name not in ("run", "images")},
            "net": service.net,
            "body_seconds": BODY_SECONDS,
            "images": "drawn" if settings.images is None else "a folder's",
            "bytes": round(statistics.mean(map(len, images))),
        },
        "environment": environment(),
        **headline(
            *rows,
            ("start", service.start_seconds, "s"),
            ("slowest refusal of a bad input", max(one["seconds"] for one in answers.values()), "s"),
        ),
        "clients": load_of,
        "start_seconds": service.start_seconds,
        "memory_mb": memory,
        "bad_inputs": answers,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _print(figures: dict[str, Any]) -> None:
    one = figures["settings"]
    show(
        f"bench serve · {one['net']} · {one['images']} JPEGs of {one['bytes']:,} bytes",
        ("at a time", "requests/s", "p50 ms", "p99 ms", "requests"),
        [
            (
                count,
                *(
                    shown_spread(found[name], form)
                    for name, form in (("requests/s", ",.0f"), ("p50 ms", ".2f"), ("p99 ms", ".2f"))
                ),
                f"{found['requests']:,}",
            )
            for count, found in figures["clients"].items()
        ],
        f"medians (quartiles) of {one['rounds']} rounds of {one['seconds']:g} s; the client shares the machine",
    )
    memory = f", {figures['memory_mb']:,.0f} MB in all its processes" if figures["memory_mb"] else ""
    show(
        "bad inputs",
        ("", "status", "seconds", "answer"),
        [
            (
                name,
                str(found["status"]),
                f"{found['seconds']:.3f}",
                found["answer"] + ("" if found["goes_on"] else " — AND THEN DEAD"),
            )
            for name, found in figures["bad_inputs"].items()
        ],
        f"a slow client was given {one['body_seconds']:g} s (--body-seconds)",
        f"up after {figures['start_seconds']:.1f} s{memory}",
        footer(figures),
    )
