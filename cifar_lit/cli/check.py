"""`cifar-lit devices --check`: every device and the paths between processes, tried out in probes: processes that can be ended.

Each rank that the Trainer would start has one: it tries its device, then the group, and announces each try in a JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Column, Table
from torch import Tensor, nn

from cifar_lit import text
from cifar_lit.bench.process import child_environment
from cifar_lit.cli.console import for_tables
from cifar_lit.cli.errors import LOST_PEER
from cifar_lit.cli.flags import Command
from cifar_lit.cli.launch import apply_launcher
from cifar_lit.distributed.join import free_port
from cifar_lit.distributed.rank_info import by_torchrun
from cifar_lit.distributed.rank_watch import describe_exit
from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.hardware import Machine, choose_devices, detect_machine

# The largest difference from the CPU in float64, over the largest number: CPUs were off by 2e-6 and 7e-3, GPUs round more.
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 5e-2}
Answer = tuple[list[dict[str, Any]], int | None]  # what a probe said, and its exit code, None when it fell silent and was ended


def say(**message: object) -> None:
    """Prints a JSON object at once."""
    print(json.dumps(message), flush=True)


def attempt(name: str, work: Callable[..., tuple[str, str]], *args: Any) -> None:
    """Tries something. work: returns a figure such as "12 GB/s", and what is wrong, empty if nothing."""
    say(tries=name)
    started = time.perf_counter()
    figure, wrong = work(*args)
    say(tried=[name, "wrong" if wrong else "right", f"{time.perf_counter() - started:.2f}", figure], wrong=wrong)


def probe(device: str) -> None:
    """Tries a device, such as cuda:0, then with it the group of ranks that torchrun's variables tell of."""
    torch.backends.cudnn.allow_tf32 = False  # it would round to 10 bits, and hide what is wrong in the others
    attempt("convolution net forward and backward, float32", try_net, device, torch.float32)
    if device == "mps":  # which has no bf16 in older systems, and no backend that sends its tensors
        return
    if device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        attempt("convolution net forward and backward, bf16", try_net, device, torch.bfloat16)
    say(tries="connecting")
    backend, own = ("gloo", None) if device == "cpu" else ("nccl", torch.device(device))
    dist.init_process_group(backend, timeout=timedelta(hours=1), device_id=own)  # whoever started this ends it long before
    attempt("all_reduce of 8 bytes", try_all_reduce, device, 2, 50)
    attempt("all_reduce of 64 MiB", try_all_reduce, device, 2**24, 3)  # the gradients of resnet18 take 43
    dist.destroy_process_group()


def try_net(device: str, dtype: torch.dtype) -> tuple[str, str]:
    """Loss and gradients of a small net; without ReLU and max pooling, whose steps turn rounding into differences."""
    from torch.utils.benchmark import Timer  # here, as it warns where there is no CUDA

    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.GELU(), nn.Conv2d(64, 64, 3, stride=2), nn.GELU()
    net = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)).to(device)
    images, labels = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))

    def gradients(images: Tensor, labels: Tensor, dtype: torch.dtype) -> list[Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = nn.functional.cross_entropy(net(images).to(images.dtype), labels)
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    args = images.to(device), labels.to(device), dtype
    timer = Timer("work()", globals={"work": lambda: gradients(*args)}, num_threads=torch.get_num_threads())
    figure = f"{len(images) / timer.blocked_autorange(min_run_time=0.2).median:,.0f} images/s"
    results = [result.cpu().double() for result in gradients(*args)]
    net.cpu().double()
    pairs = zip(results, gradients(images.double(), labels, torch.float64), strict=True)
    off = torch.stack([(result - right).abs().max() / right.abs().max() for result, right in pairs]).max().item()
    right = off <= TOLERANCE[dtype]  # nan is not
    return figure, "" if right else f"off by {off:.1e} of the largest number, where {TOLERANCE[dtype]:.0e} is allowed"


def try_all_reduce(device: str, count: int, times: int) -> tuple[str, str]:
    """The sum over the ranks of `count` whole float32 numbers, which must be exact; the first time does not count."""
    from torch.utils.benchmark import Timer

    numbers, world = torch.arange(count, device=device) % 1000.0, dist.get_world_size()
    total = numbers * (dist.get_rank() + 1)
    dist.all_reduce(total)
    wrong = int((total != numbers * (world * (world + 1) // 2)).sum())
    seconds = Timer("reduce(zeros)", globals={"reduce": dist.all_reduce, "zeros": numbers * 0}).timeit(times).median
    figure = f"{seconds * 1e3:,.3f} ms" if count == 2 else f"{4 * count / seconds / 1e9:,.2f} GB/s"
    return figure, f"{wrong:,} of {count:,} sums" if wrong else ""


def main(argv: list[str]) -> int:
    """Runs a probe; returns 1 when it failed. It ends with its parent, which holds the other end of its standard input."""
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    try:
        say(machine=vars(detect_machine())) if argv == ["look"] else probe(*argv)
    except Exception as error:
        say(error=f"{type(error).__name__}: {first_line(error)}")
        return 1
    say(done=True)
    return 0


# ---- probes as seen from outside


def run_probes(words: Sequence[str], variables: Mapping[str, str], limit: float) -> list[Answer]:
    """Runs a probe for each rank at the same time, and ends those that say nothing for `limit` seconds."""

    async def run_probe(rank: int, word: str) -> Answer:
        environment = {**child_environment(), "RANK": str(rank), **variables}
        argv, messages, code = [sys.executable, "-m", "cifar_lit.cli.check", word], [], None
        process = await asyncio.create_subprocess_exec(*argv, env=environment, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        assert process.stdout is not None
        with suppress(TimeoutError):
            while line := await asyncio.wait_for(process.stdout.readline(), limit):
                if line.startswith(b"{"):  # libraries print too
                    messages.append(json.loads(line))
            code = await asyncio.wait_for(process.wait(), limit)
        with suppress(ProcessLookupError, TimeoutError):
            process.kill()
            await asyncio.wait_for(process.wait(), 5.0)  # one that waits in a driver may never go
        return messages, code

    async def run_all() -> list[Answer]:
        return await asyncio.gather(*(run_probe(rank, word) for rank, word in enumerate(words)))

    return asyncio.run(run_all())


def fault(answer: Answer, limit: float) -> tuple[int, int, str] | None:
    """What is wrong with a probe: how likely it is to be another's fault, how far it came, and the end of a sentence about it."""
    messages, code = answer
    stage = next((message["tries"] for message in reversed(messages) if "tries" in message), "starting")
    if wrong := [message for message in messages if message.get("wrong")]:
        return 0, 0, f"computes wrong numbers: {wrong[0]['tried'][0]}: {wrong[0]['wrong']}"
    if error := next((message["error"] for message in messages if "error" in message), None):
        return (3 if LOST_PEER.search(error) else 1), len(messages), f"fails in {stage}: {error}"
    if any("done" in message for message in messages):
        return None
    if code is None:
        return 2, len(messages), f"gave no answer in {limit:g} s ({stage})"
    return 1, len(messages), f"fails in {stage}: it {describe_exit(code)}"


def judge(name: str, answers: Sequence[Answer], limit: float) -> tuple[list[list[str]], str]:
    """Rows of the table about a group's devices and, as its first rank sees it, itself; a line about what is wrong, or none."""
    rows = [
        [f"{name}, process {rank}", *message["tried"]]
        for rank, (messages, _) in enumerate(answers)
        for message in messages
        if "tried" in message and (rank == 0 or not message["tried"][0].startswith("all_reduce"))
    ]
    faults = {rank: wrong for rank, answer in enumerate(answers) if (wrong := fault(answer, limit))}
    if not faults:
        return rows, ""
    first = min(faults.values())  # where all came to a stop, the one that was behind: the others were waiting for it
    ranks = ", ".join(str(rank) for rank, wrong in faults.items() if wrong == first)
    rows.append([f"{name}, process {ranks}", "", "no answer" if first[0] == 2 else "failed", "", ""])
    return rows, f"process {ranks} of {name} {first[2]}"


# ---- the command


def check(accelerator: str, devices: str | None, limit: float) -> None:
    """Tries out the machine, or under torchrun all of the job's, and prints a table; raises Failure with all that is wrong."""
    groups = (try_job if by_torchrun(os.environ) else try_machine)(accelerator, devices, limit)
    if not groups:
        return  # the first process prints
    table = Table("what", "tried", "result", Column("seconds", justify="right"), Column("figure", justify="right"))
    complaints = []
    for name, answers in groups.items():
        rows, complaint = judge(name, answers, limit)
        for row in rows:
            table.add_row(*row)
        complaints += [complaint] if complaint else []
    for_tables().print(table)
    if complaints:
        raise Failure("; ".join(complaints))
    text.say("all is well")


def try_machine(accelerator: str, devices: str | None, limit: float) -> dict[str, list[Answer]]:
    """Tries the ranks that the Trainer would start and, where these are on GPUs, two on the CPU; returns answers by group."""
    answers = {}
    for group in look(accelerator, devices or "auto", limit):
        name = f"{len(group)} × {group[0].partition(':')[0]}"  # as on the start card
        text.say(f"trying {name}; whoever says nothing for {limit:g} s is ended")
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(group))}
        answers[name] = run_probes(group, {**meet, "TORCHELASTIC_USE_AGENT_STORE": "False"}, limit)
    return answers


def try_job(accelerator: str, devices: str | None, limit: float) -> dict[str, list[Answer]]:
    """Tries this process's rank of what torchrun has started; the first process returns the answers of all, the others none."""
    apply_launcher(Command("devices", flags=[f"--trainer.devices={devices}"] if devices else []), dict(os.environ))
    rank, world, local, here = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port, wait = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=limit)
    store = dist.TCPStore(address, port, is_master=serve, timeout=wait, wait_for_workers=False)
    device = look(accelerator, str(here), limit)[0][local]
    answers = run_probes([device], {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}, limit)  # this process serves it
    key = f"cifar_lit/check/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{key}/{rank}", json.dumps(answers[0]))
    if rank:
        return {}
    others = [f"{key}/{other}" for other in range(1, world)]
    with suppress(RuntimeError):  # there may be some that say nothing
        store.wait(others, timedelta(seconds=limit))
    answers += [tuple(json.loads(store.get(other))) if store.check([other]) else ([], None) for other in others]
    return {f"{world} × {device.partition(':')[0]}": answers}


def look(accelerator: str, devices: str, limit: float) -> list[list[str]]:
    """The devices of each rank that the Trainer would start on this machine and, beside GPUs, of two on the CPU."""
    (answer,) = run_probes(["look"], {}, limit)  # a driver that hangs would hang this process too
    machine = next((Machine(**message["machine"]) for message in answer[0] if "machine" in message), None)
    if machine is None:
        _, _, what = fault(answer, limit) or (0, 0, "says nothing")
        raise Failure(f"the look for devices {what}: the driver may hang or be broken")
    accelerator, count = choose_devices(machine, accelerator, devices)
    if accelerator in ("tpu", "hpu"):
        raise UsageError(f"--check tries CPUs, GPUs and Apple's GPU, no {accelerator}: use --accelerator auto, cpu, gpu or mps")
    gpus = [f"cuda:{number}" for number in range(len(machine.gpus))] or (["mps"] if machine.mps else [])
    if not gpus or accelerator == "cpu":
        return [["cpu"] * (2 if count == "auto" else count)]
    chosen = [gpus[number] for number in count] if isinstance(count, list) else gpus if count in ("auto", -1) else gpus[:count]
    return [chosen, ["cpu"] * 2] if accelerator == "auto" else [chosen]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
