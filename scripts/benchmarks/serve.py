"""Put a service under load from another process: python scripts/benchmarks/serve.py RUN [--slow 1000]."""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from script import run_script

from cifar_lit.bench.process import as_error, child_environment
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.errors import Failure, UsageError

if sys.platform == "win32":
    raise SystemExit("serve.py forks its clients, which Windows cannot do: run it on Linux or macOS")

WHAT = (
    "Put a newly started service under load from this process. Measure requests/s and latency with one client and "
    "with several at a time, each sending small JPEGs one after the other over its own connection. With --slow, also "
    "measure one client that opens a connection per request, while many slow clients hold connections open."
)
ANSWER_SECONDS = 60.0  # timeout of a request
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
COMING_SECONDS = 5.0  # in which the slow clients connect, one after the other
SLOW = {  # first bytes of a slow client, and the bytes that it sends once a second
    "no": (b"", b""),  # baseline without slow clients
    "slow headers": (HEAD, b"x"),
    "slow bodies": (HEAD + b"Content-Length: 9000000\r\n\r\n" + bytes(200_000), b"x"),
    "slow readers": (b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n", b""),
    "idlers": (b"", b""),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("run", help="folder of a finished run, or its model.safetensors")
    parser.add_argument("--images", help="folder of JPEGs to send; generated ones if not given")
    parser.add_argument("--clients", default="1,32", help="numbers of concurrent clients")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of load in each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds for each number of clients, in turns")
    parser.add_argument("--accelerator", default="auto", help="accelerator of the net")
    parser.add_argument("--slow", type=int, default=0, help="number of slow clients of each kind")
    parser.add_argument(
        "--files", type=int, default=0, help="limit of open files of the service; default: the limit of this process"
    )


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.seconds <= 0 or settings.rounds < 1:
        raise UsageError("--seconds must be more than 0 and --rounds at least 1")
    counts = [int(count) for count in settings.clients.split(",")]
    images = jpegs_of(settings.images) if settings.images else drawn_jpegs(64)
    times: dict[int, list[list[float]]] = {count: [] for count in counts}
    rates: dict[int, list[float]] = {count: [] for count in counts}
    among: dict[str, tuple[list[float], int]] = {}
    with started([settings.run, "--accelerator", settings.accelerator], settings.files) as service:
        asyncio.run(load(service, images, max(counts), 1.0))  # warm
        for _, count in itertools.product(range(settings.rounds), counts):
            before = time.perf_counter()
            seconds = asyncio.run(load(service, images, count, settings.seconds))
            rates[count].append(len(seconds) / (time.perf_counter() - before))
            times[count].append(seconds)
        memory = service.memory()
        for kind in SLOW if settings.slow else ():
            with crowd(service, kind, settings.slow):
                among[kind] = asyncio.run(load_among(service, images, settings.rounds * settings.seconds))
    rows: list[Row] = [("start", service.start_seconds, "s"), *([("memory", memory, "MB")] if memory else [])]
    for count in counts:
        slowest = (1000 * float(np.percentile(seconds, 99, method="higher")) for seconds in times[count])
        rows += [
            (f"{count} at a time", spread(rates[count]), "requests/s"),
            (f"{count} at a time, p50", spread(1000 * statistics.median(seconds) for seconds in times[count]), "ms"),
            (f"{count} at a time, p99", spread(slowest), "ms"),
        ]
    for kind, (seconds, failed) in among.items():
        rows += [
            (f"among {kind}, p50", round(1000 * statistics.median(seconds), 2), "ms"),
            (f"among {kind}, p99", round(1000 * float(np.percentile(seconds, 99, method="higher")), 2), "ms"),
            (f"among {kind}, slowest", round(1000 * max(seconds), 2), "ms"),
            (f"among {kind}, not answered", float(failed), f"of {len(seconds)}"),
        ]
    sent = "a folder's" if settings.images else "drawn"
    publish(
        "serve",
        {**vars(settings), "run": Path(settings.run).name, "net": service.net, "images": sent},
        f"{service.net} · {sent} JPEGs",
        rows,
        f"of {settings.rounds} rounds of {settings.seconds:g} s; client on the same machine; memory of all processes",
    )


def jpegs_of(folder: str) -> list[bytes]:
    """Return up to 256 JPEGs of a folder; raise UsageError if there are none."""
    paths = sorted(path for path in Path(folder).expanduser().rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise UsageError(f"there are no JPEGs in {folder}: name another folder, or leave out --images to generate some")
    return [path.read_bytes() for path in paths[:: max(1, len(paths) // 256)][:256]]


def drawn_jpegs(count: int) -> list[bytes]:
    """Generate JPEGs of 32 × 32 smooth colours, similar in file size to those of CIFAR-10."""
    generator = np.random.default_rng(0)
    files = [io.BytesIO() for _ in range(count)]
    for file in files:
        colours = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        colours.resize((32, 32), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return [file.getvalue() for file in files]


# ---- the service in its own processes


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        start_seconds: time from the start of its process until it accepts requests.
        net: name of the served net.
    """

    process: subprocess.Popen[str]
    host: str
    port: int
    start_seconds: float
    net: str

    def memory(self) -> float | None:
        """Return the memory of all its processes in MB, shared pages counted once (PSS); None without /proc."""
        try:
            texts = [
                Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
                for pid in _with_children(self.process.pid)
            ]
        except OSError:
            return None
        return (
            sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:")) / 1000
        )


def _with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [pid, *(one for child in children.read_text(encoding="utf-8").split() for one in _with_children(int(child)))]


@contextmanager
def started(argv: Sequence[str], files: int) -> Iterator[Service]:
    """Run `cifar-lit serve` on a free port, and stop it on exit.

    Args:
        argv: arguments of the command.
        files: limit of open files, 0 for the limit of this process.

    Raises:
        UsageError, Failure: the error of the process.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        before = time.perf_counter()
        command = [sys.executable, "-m", "cifar_lit", "serve", *argv, "--port", "0"]
        if files:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=child_environment()
        ) as process:
            assert process.stdout is not None
            try:
                net = "?"
                for line in process.stdout:
                    if line.startswith("serving "):
                        net = line.split()[1]
                    if "http://" in line:
                        host, _, port = line.split("http://")[1].split()[0].rpartition(":")
                        yield Service(process, host, int(port), time.perf_counter() - before, net)
                        break
                else:
                    process.wait()
                    errors.seek(0)
                    raise as_error(process.returncode, errors.read(), "the service")
            finally:
                process.terminate()


async def load(service: Service, images: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Return the latency in seconds of every request that concurrent clients made over persistent connections."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    times: list[float] = []

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(service.host, service.port)
        for place in itertools.count(number):
            before = loop.time()
            if before >= end:
                break
            await post(reader, writer, images[place % len(images)])
            times.append(loop.time() - before)
        writer.transport.abort()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return times


async def load_among(service: Service, images: Sequence[bytes], seconds: float) -> tuple[list[float], int]:
    """Return the latencies in seconds of one client that opens a connection per request, and the number of failures."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    failed = 0
    end = loop.time() + seconds
    while (before := loop.time()) < end:
        try:
            reader, writer = await asyncio.open_connection(service.host, service.port)
            await post(reader, writer, images[len(times) % len(images)])
            writer.close()
        except (OSError, Failure):
            failed += 1
        times.append(loop.time() - before)
    return times, failed


@contextmanager
def crowd(service: Service, kind: str, count: int) -> Iterator[None]:
    """Keep slow clients of a kind connected, in their own process, inside the `with` block."""

    async def come() -> None:
        delays = np.linspace(0, COMING_SECONDS, count if kind != "no" else 0).tolist()
        await asyncio.gather(*(keep_waiting(service, *SLOW[kind], delay) for delay in delays))

    process = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(come()))
    process.start()
    time.sleep(COMING_SECONDS + 1)
    try:
        yield
    finally:
        process.kill()
        process.join()


async def keep_waiting(service: Service, first: bytes, then: bytes, delay: float) -> None:
    """Act as a slow client: connect after `delay` seconds, read no answers, and reconnect after a disconnect."""
    await asyncio.sleep(delay)
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(service.host, service.port, limit=1)
            try:
                writer.write(first)
                for _ in range(15):
                    await asyncio.sleep(1)
                    if reader.at_eof() or writer.is_closing():
                        break
                    writer.write(then)
            finally:
                writer.transport.abort()


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, image: bytes) -> None:
    """Send one POST /predict and read the answer; raise Failure if there is none, or its status is not 200."""
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(image) + image)
    try:
        lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_SECONDS)).lower().split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
        body = await reader.readexactly(length)
    except (TimeoutError, OSError, EOFError, StopIteration) as error:
        raise Failure(f"no answer from the service ({type(error).__name__}): see its output") from None
    if b" 200 " not in lines[0]:
        raise Failure(f"the service answered {lines[0].decode()}: {body.decode()}")


if __name__ == "__main__":
    raise SystemExit(run_script())
