"""`cifar-lit devices --check`: every device and the paths between processes, tried out in processes that can be ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from cifar_lit.bench.process import environment
from cifar_lit.cli import console, flags
from cifar_lit.cli.check.processes import together
from cifar_lit.cli.check.torchrun import Board, Job
from cifar_lit.cli.check.verdicts import Row, Verdict, device_verdict, group_verdict
from cifar_lit.cli.launch import apply_launcher
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine, choose_devices

PROBE = (sys.executable, "-m", "cifar_lit.cli.check.probe")
# what another launcher has set would make a probe wait for processes that nobody starts, or use a port that is taken
STRANGE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"),
    *("MASTER_ADDR", "MASTER_PORT", "STANDALONE_PORT"),
)


class Device(NamedTuple):
    """A device: its name in words, and how its probe is told of it."""

    name: str
    kind: str
    number: int
    bf16: bool

    @property
    def command(self) -> list[str]:
        """The command line of its probe."""
        return [*PROBE, "device", self.kind, str(self.number), str(int(self.bf16))]


class Group(NamedTuple):
    """Processes to be formed into a group. ids: of each machine's GPUs, or as many numbers as it has processes."""

    kind: str
    ids: list[int]
    nodes: int = 1

    @property
    def backend(self) -> str:
        """What Lightning takes for these devices."""
        return "nccl" if self.kind == "gpu" else "gloo"

    @property
    def command(self) -> list[str]:
        """The command line of its probe."""
        return [*PROBE, "group", self.kind, ",".join(map(str, self.ids)), str(self.nodes)]


def check(accelerator: str, devices: str | None, limit: float) -> None:
    """Tries out the machine, or under torchrun all machines of the job, and prints a table.

    limit: seconds that a probe may say nothing before it is ended. Raises UsageError for what the machine does not have,
    Failure, with all that is wrong, if anything is.
    """
    if not 0 < limit < 1e6:
        raise UsageError(f"--limit must be more than 0 seconds, not {limit:g}")
    started = time.monotonic()
    job = Job.of(os.environ)
    if job is None:
        verdicts = _alone(accelerator, devices, limit)
    else:
        apply_launcher(flags.Command("devices", flags=[f"--trainer.devices={devices}"] if devices else []), dict(os.environ))
        board = Board(job, os.environ, limit)
        verdicts = _under_torchrun(job, board, accelerator, limit)
        if job.rank:
            return  # the first process prints; it hears of this one over the board
    _show([row for verdict in verdicts for row in verdict.rows])
    if complaints := [line for verdict in verdicts for line in verdict.complaints]:
        raise Failure("; ".join(complaints))
    console.say(f"all is well; it took {time.monotonic() - started:.1f} s")


def _alone(accelerator: str, devices: str | None, limit: float) -> list[Verdict]:
    apart = alone(os.environ)
    machine = look_apart([*PROBE, "look"], limit)
    kind, ids = chosen(machine, accelerator, devices or "auto")
    found, wanted = devices_of(machine, accelerator, kind, ids), groups_of(kind, ids)
    _announce(len(found), wanted, limit)
    verdicts = try_devices(found, limit)
    for group in wanted:
        (answer,) = together([group.command], limit, apart)
        late = dict.fromkeys(range(len(group.ids))) if answer.code is None else {0: answer.code}
        verdicts.append(group_verdict(len(group.ids), group.backend, answer.said, late, limit))
    return verdicts


def _under_torchrun(job: Job, board: Board, accelerator: str, limit: float) -> list[Verdict]:
    """What the first process of a job knows in the end; the others tell it what they know, and return what they have."""
    try:
        machine = look_apart([*PROBE, "look"], limit)
    except Failure as error:
        if job.rank:  # the first process tells of it: torchrun would end all if this one failed
            board.post("group", {"said": [{"rank": job.rank, "error": str(error)}], "code": 1})
            board.post("devices", [])
            return []
        raise
    kind, ids = chosen(machine, accelerator, str(job.local_size))
    group = Group(kind, ids, job.size // job.local_size)
    if job.rank == 0:
        _announce(len(devices_of(machine, accelerator, kind, ids)), [group], limit, job)
    # first of all, as the processes start at the same time, and wait for each other
    (answer,) = together([group.command], limit, {**environment(), **board.environment})
    board.post("group", {"said": answer.said, "code": answer.code})
    verdicts = []
    if job.local_rank == 0:
        verdicts = [named(verdict, job) for verdict in try_devices(devices_of(machine, accelerator, kind, ids), limit)]
        board.post("devices", verdicts)
    if job.rank:
        return verdicts
    told = board.read("group", range(job.size))
    codes = {rank: found["code"] if found else None for rank, found in told.items()}
    said = [one for found in told.values() if found for one in found["said"]]
    for rank, other in board.read("devices", range(job.local_size, job.size, job.local_size)).items():
        if other is None:
            verdicts.append(Verdict([], [f"process {rank} said nothing about the devices of machine {rank // job.local_size}"]))
        else:
            verdicts += [Verdict([Row(*row) for row in rows], complaints) for rows, complaints in other]
    return [*verdicts, group_verdict(job.size, group.backend, said, codes, limit)]


def look_apart(command: Sequence[str], limit: float) -> Machine:
    """The machine as a process of its own sees it: a driver that hangs would hang this one too. Raises Failure."""
    (answer,) = together([command], limit, alone(os.environ))
    found = next((one["machine"] for one in answer.said if "machine" in one), None)
    if found is not None:
        return Machine(**{**found, "gpus": tuple((name, memory) for name, memory in found["gpus"])})
    verdict = device_verdict("the look for devices", answer, limit)
    raise Failure(f"{verdict.complaints[0]}: the driver may hang or be broken")


def try_devices(devices: Sequence[Device], limit: float) -> list[Verdict]:
    """Tries the CPU by itself, then the others at the same time."""
    verdicts = []
    for part in ([one for one in devices if one.kind == "cpu"], [one for one in devices if one.kind != "cpu"]):
        answers = together([one.command for one in part], limit, alone(os.environ))
        verdicts += [device_verdict(one.name, answer, limit) for one, answer in zip(part, answers, strict=True)]
    return verdicts


def alone(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a probe that no launcher has to do with."""
    return {name: value for name, value in {**variables, **environment()}.items() if name not in STRANGE}


def chosen(machine: Machine, accelerator: str, devices: str) -> tuple[str, list[int]]:
    """cpu, gpu or mps, and the ids of the GPUs or one number a process; raises UsageError for what there is not."""
    accelerator, count = choose_devices(machine, accelerator, devices)
    if accelerator in ("tpu", "hpu"):
        raise UsageError(f"--check tries CPUs, GPUs and Apple's GPU, no {accelerator}: use --accelerator auto, cpu, gpu or mps")
    if machine.gpus and accelerator in ("auto", "gpu", "cuda"):
        every = list(range(len(machine.gpus)))
        return "gpu", count if isinstance(count, list) else every if count in ("auto", -1) else every[:count]
    if machine.mps and accelerator in ("auto", "gpu", "mps"):
        return "mps", [0]
    return "cpu", list(range(2 if count == "auto" else count))


def devices_of(machine: Machine, accelerator: str, kind: str, ids: Sequence[int]) -> list[Device]:
    """What is to be tried: the CPU too, if not only others are asked for."""
    found = [Device("the CPU", "cpu", 0, machine.bf16)] if accelerator in ("auto", "cpu") else []
    if kind == "gpu":
        found += [Device(f"GPU {number}", kind, number, machine.gpu_bf16) for number in ids]
    elif kind == "mps":
        found.append(Device("Apple's GPU", kind, 0, False))
    return found


def groups_of(kind: str, ids: list[int]) -> list[Group]:
    """The groups to be formed on one machine: as the Trainer would, and where that is one process, two on the CPU too."""
    if kind == "cpu":
        return [Group("cpu", ids)]
    several = [Group("cpu", [0, 1])] if len(ids) == 1 else []
    return [*([Group("gpu", ids)] if kind == "gpu" else []), *several]


def named(verdict: Verdict, job: Job) -> Verdict:
    """A verdict that says which machine it is about, where there are several."""
    if job.size == job.local_size:
        return verdict
    rows = [row._replace(what=f"machine {job.node}: {row.what}") for row in verdict.rows]
    return Verdict(rows, [f"machine {job.node}: {line}" for line in verdict.complaints])


def _announce(devices: int, groups: Sequence[Group], limit: float, job: Job | None = None) -> None:
    size = job.size if job else 0
    what = " and ".join(f"{size or len(group.ids)} over {group.backend}" for group in groups)
    where = f"{devices} device{'s' if devices > 1 else ''}" + (" of this machine" if job and job.size > job.local_size else "")
    console.say(f"trying {where}, then processes together: {what}; whoever says nothing for {limit:g} s is ended")


def _show(rows: Sequence[Row]) -> None:
    table = Table()
    for column in ("what", "tried", "result", "seconds", "figure"):
        table.add_column(column, justify="right" if column in ("seconds", "figure") else "left")
    for row in rows:
        table.add_row(row.what, row.tried, row.result, "" if row.seconds is None else f"{row.seconds:.2f}", row.figure)
    console.for_tables().print(table)
