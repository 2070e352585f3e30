"""`cifar-lit devices --check`: what is wrong is found and named, in time, and nothing is left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, started, typed

from cifar_lit.bench.process import environment
from cifar_lit.cli.check import command as check
from cifar_lit.cli.check.command import Device, Group, chosen, devices_of, groups_of, look_apart
from cifar_lit.cli.check.processes import Answer, together
from cifar_lit.cli.check.verdicts import device_verdict, group_verdict
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine


def machine(gpus: int = 0, **more: Any) -> Machine:
    return Machine("a CPU", 4, False, (("H200", 2**37),) * gpus, gpu_bf16=True, **more)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end_of(pid: int) -> None:
    """Waits until a process, which is not a child of this one, is gone."""
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


# ---- processes


HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"tries": "a net", "pid": child.pid}), flush=True)
time.sleep(600)
"""


def test_a_probe_that_hangs_is_ended_at_the_limit_with_what_it_started_and_named() -> None:
    begin = time.monotonic()
    (answer,) = together([python(HANGS)], 1.0, environment())
    assert time.monotonic() - begin < 10
    assert answer.code is None
    end_of(answer.said[0]["pid"])
    found = device_verdict("GPU 1", answer, 1.0)
    assert found.complaints == ["GPU 1 gave no answer in 1 s (a net)"]
    assert [(row.tried, row.result) for row in found.rows] == [("a net", "no answer")]


def test_a_probe_that_ignores_requests_to_end_is_ended_too() -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{}', flush=True)\ntime.sleep(600)"
    (answer,) = together([python(deaf)], 0.5, environment())
    assert answer.code is None


def test_a_probe_may_take_long_as_long_as_it_is_heard_of() -> None:
    talks = "import time\nfor turn in range(8): time.sleep(0.2); print('{\"turn\": %d}' % turn, flush=True)"
    (answer,) = together([python(talks)], 1.0, environment())
    assert answer.code == 0
    assert len(answer.said) == 8 and answer.seconds > 1.5


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process of GPU 0 crashed with SIGSEGV in a product"),
        ("import sys; sys.exit('no driver')", "the process of GPU 0 ended with exit code 1 in a product: no driver"),
    ],
)
def test_a_probe_that_crashes_is_named(code: str, line: str) -> None:
    (answer,) = together([python(f'print(\'{{"tries": "a product"}}\', flush=True)\n{code}')], 20, environment())
    found = device_verdict("GPU 0", answer, 20)
    assert found.complaints == [line]
    assert found.rows[-1].result == "failed"


def test_a_probe_that_answers_wrongly_is_named() -> None:
    words = {"tried": "a product", "seconds": 1.0, "figure": "3 GFLOP/s", "wrong": "off by 0.3"}
    (answer,) = together([python(f"import json; print(json.dumps({words})); print('{{\"done\": 1}}')")], 20, environment())
    found = device_verdict("GPU 0", answer, 20)
    assert found.complaints == ["GPU 0 computes wrong numbers: a product: off by 0.3"]
    assert [(row.tried, row.result) for row in found.rows] == [("a product", "wrong")]


def test_a_driver_that_hangs_when_it_is_asked_for_devices_is_named() -> None:
    with pytest.raises(Failure, match=r"the look for devices gave no answer in 0\.5 s"):
        look_apart(python("import time; time.sleep(600)"), 0.5)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_probe_ends_when_the_command_is_killed() -> None:
    command = [sys.executable, "-m", "cifar_lit.cli.check.probe", "group", "cpu", "0,1", "1"]
    code = f"from cifar_lit.cli.check.processes import together\ntogether([{command!r}], 60, {environment()!r})"
    outer = subprocess.Popen(python(code), env=environment())
    deadline = time.monotonic() + 20
    probes: list[int] = []
    while len(probes) < 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        probes = [int(word) for word in Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()]
    time.sleep(1)  # it imports
    outer.send_signal(signal.SIGKILL)
    outer.wait()
    for pid in probes:
        end_of(pid)


# ---- what is tried


@pytest.mark.parametrize(
    ("found", "accelerator", "devices", "names", "groups"),
    [
        (machine(), "auto", "auto", ["the CPU"], [("gloo", 2)]),
        (machine(), "auto", "3", ["the CPU"], [("gloo", 3)]),
        (machine(1), "auto", "auto", ["the CPU", "GPU 0"], [("nccl", 1), ("gloo", 2)]),
        (machine(4), "auto", "auto", ["the CPU", "GPU 0", "GPU 1", "GPU 2", "GPU 3"], [("nccl", 4)]),
        (machine(4), "gpu", "2", ["GPU 0", "GPU 1"], [("nccl", 2)]),
        (machine(4), "gpu", "1,3", ["GPU 1", "GPU 3"], [("nccl", 2)]),
        (machine(4), "cpu", "auto", ["the CPU"], [("gloo", 2)]),
        (machine(mps=True), "auto", "auto", ["the CPU", "Apple's GPU"], [("gloo", 2)]),
    ],
)
def test_every_device_is_tried_and_the_group_that_the_trainer_would_form(
    found: Machine, accelerator: str, devices: str, names: list[str], groups: list[tuple[str, int]]
) -> None:
    kind, ids = chosen(found, accelerator, devices)
    assert [device.name for device in devices_of(found, accelerator, kind, ids)] == names
    assert [(group.backend, len(group.ids)) for group in groups_of(kind, ids)] == groups


def test_devices_that_the_machine_does_not_have_are_refused() -> None:
    with pytest.raises(UsageError, match="--devices 3 asks for more GPUs than there are"):
        chosen(machine(2), "auto", "3")
    with pytest.raises(UsageError, match="--check tries CPUs, GPUs and Apple's GPU, no tpu"):
        chosen(machine(), "tpu", "auto")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--check --net lenet", "--check tries devices, --net lists a net's parameters: leave one of them out"),
        ("--devices 2", "--devices goes with --check"),
        ("--limit 3", "--limit goes with --check"),
        ("--check --limit 0", "--limit must be more than 0 seconds, not 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(line: str, answer: str) -> None:
    refused(typed("devices", *line.split()), f"cifar-lit: {answer}", 2)


# ---- the command


def test_a_machine_on_which_all_is_well_passes_whatever_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in {"MASTER_PORT": str(taken.getsockname()[1]), "RANK": "1", "WORLD_SIZE": "7"}.items():
            monkeypatch.setenv(name, value)
        answer = started("-m", "cifar_lit", "devices", "--check", "--accelerator", "cpu", seconds=200)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in answer.out.splitlines() if line.startswith("│")]
    assert {row[0] for row in rows} == {"the CPU", "two processes over gloo"}
    assert all(row[2] == "right" and float(row[3]) >= 0 for row in rows)
    assert [row[4].split()[-1] for row in rows if row[1].startswith("all_reduce of")] == ["ms", "GB/s"]


def test_what_fails_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Answer([{"rank": 0, "tries": "a net"}], None, 3.0, "")
    monkeypatch.setattr(check, "look_apart", lambda command, limit: machine(1))
    monkeypatch.setattr(check, "together", lambda commands, limit, environment: [silent] * len(commands))
    answer = typed("devices", "--check", "--limit", "3")
    assert answer.complaints == [
        "cifar-lit: the CPU gave no answer in 3 s (a net); GPU 0 gave no answer in 3 s (a net); "
        "process 0 of 1 gave no answer in 3 s over nccl (a net); process 1 of 2 gave no answer in 3 s over gloo (starting)"
    ]
    assert answer.code == 1
    assert answer.out.count("no answer") == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_gpu_computes_right_and_forms_a_group_over_nccl() -> None:
    answer = started("-m", "cifar_lit", "devices", "--check", "--accelerator", "gpu", seconds=200)
    assert answer.code == 0, answer.err
    assert "GPU 0" in answer.out and "over nccl" in answer.out


CRASHES = """
import os, signal, sys
from cifar_lit.cli.check import group as check_group, probe as check_probe
if os.environ.get("LOCAL_RANK") == "1":
    check_group.values = lambda *these: os.kill(os.getpid(), signal.SIGSEGV)
raise SystemExit(check_probe.main(sys.argv[1:]))
"""


def test_a_process_that_crashes_in_a_group_that_lightning_has_started_is_named(here: Path) -> None:
    (here / "crashes.py").write_text(CRASHES)
    group = Group("cpu", [0, 1])
    command = [sys.executable, "crashes.py", *group.command[len(check.PROBE) :]]
    (answer,) = together([command], 30, {**check.alone(os.environ), "OMP_NUM_THREADS": "1"})
    found = group_verdict(2, "gloo", answer.said, {0: answer.code or 1}, 30)
    assert found.complaints == [
        "process 1 of 2 ended without a word over gloo, in all_reduce, broadcast and all_gather of known numbers"
    ]


def test_a_device_is_asked_for_by_its_kind_and_number() -> None:
    assert Device("GPU 3", "gpu", 3, True).command[-4:] == ["device", "gpu", "3", "1"]
