"""`cifar-lit devices --check`: what is wrong is found and named, in time, and nothing is left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract.command_line import Answer as Printed
from contract.command_line import assert_refused, run_command, run_process, table_rows

from cifar_lit.cli import check
from cifar_lit.cli.check import Answer, fault, judge, look, try_all_reduce, try_net
from cifar_lit.distributed.join import free_port
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine

TRIED = {"tried": ["a net", "right", "0.20", "9 images/s"], "wrong": ""}
WRONG = {"tried": ["a net", "wrong", "0.20", "9 images/s"], "wrong": "off by 0.3"}
TRIES, DONE = {"tries": "a net"}, {"done": True}
LOST = {"error": "RuntimeError: Connection closed by peer"}


def machine_with(gpus: int = 0, **more: Any) -> Answer:
    """What a look for devices would say of a machine."""
    return [{"machine": vars(Machine("a CPU", 4, False, (("H200", 2**37),) * gpus, gpu_bf16=True, **more))}, DONE], 0


# ---- what is made of answers


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ([([TRIES, TRIED, DONE], 0)], ""),
        ([([TRIES], None)], "process 0 of G gave no answer in 3 s (a net)"),
        ([([], -signal.SIGSEGV)], "process 0 of G fails in starting: it was killed by SIGSEGV"),
        ([([TRIES], 1)], "process 0 of G fails in a net: it ended with exit code 1"),
        ([([TRIES, WRONG, DONE], 0)], "process 0 of G computes wrong numbers: a net: off by 0.3"),
        ([([TRIES, {"error": "ValueError: no"}], 1)], "process 0 of G fails in a net: ValueError: no"),
        # of several, the one that the others are waiting for
        ([([TRIES, TRIED, TRIES], None), ([TRIES], None)], "process 1 of G gave no answer in 3 s (a net)"),
        ([([TRIES, TRIED], None), ([], None), ([], None)], "process 1, 2 of G gave no answer in 3 s (starting)"),
        ([([TRIES, LOST], 1), ([TRIES], -signal.SIGSEGV)], "process 1 of G fails in a net: it was killed by SIGSEGV"),
        ([([TRIES, LOST], 1), ([TRIES, {"error": "ValueError: no"}], 1)], "process 1 of G fails in a net: ValueError: no"),
        ([([TRIES, LOST], 1), ([TRIES], None)], "process 1 of G gave no answer in 3 s (a net)"),
        ([([TRIES, LOST], 1)], "process 0 of G fails in a net: RuntimeError: Connection closed by peer"),
    ],
)
def test_what_fails_is_named_with_where_it_stood(answers: list[Answer], line: str) -> None:
    rows, complaint = judge("G", answers, 3.0)
    assert complaint == line
    assert len(rows) == sum(TRIED in said or WRONG in said for said, _ in answers) + bool(line)


@pytest.mark.parametrize(
    ("machine", "accelerator", "devices", "groups"),
    [
        (machine_with(), "auto", "auto", [["cpu", "cpu"]]),
        (machine_with(), "auto", "3", [["cpu"] * 3]),
        (machine_with(1), "auto", "auto", [["cuda:0"], ["cpu", "cpu"]]),
        (machine_with(4), "gpu", "2", [["cuda:0", "cuda:1"]]),
        (machine_with(4), "auto", "1,3", [["cuda:1", "cuda:3"], ["cpu", "cpu"]]),
        (machine_with(4), "cpu", "auto", [["cpu", "cpu"]]),
        (machine_with(mps=True), "auto", "auto", [["mps"], ["cpu", "cpu"]]),
    ],
)
def test_the_ranks_that_the_trainer_would_start_are_tried(
    monkeypatch: pytest.MonkeyPatch, machine: Answer, accelerator: str, devices: str, groups: list[list[str]]
) -> None:
    monkeypatch.setattr(check, "run_probes", lambda words, variables, limit: [machine])
    assert look(accelerator, devices, 1.0) == groups
    with pytest.raises(UsageError, match="--check tries CPUs"):
        look("tpu", "auto", 1.0)


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
    assert_refused(run_command("devices", *line.split()), 2, answer)


# ---- what is tried


def test_a_cpu_that_computes_as_it_should_is_right_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        figure, wrong = try_net("cpu", dtype)
        assert figure.endswith(" images/s") and wrong == ""
    plain = torch.nn.functional.gelu
    for broken in (lambda x: plain(x) * (1 + 1e-3 * (x.dtype == torch.float32)), lambda x: plain(x) * float("nan")):
        monkeypatch.setattr(torch.nn.GELU, "forward", lambda self, x, broken=broken: broken(x))
        assert "of the largest number, where 5e-04 is allowed" in try_net("cpu", torch.float32)[1]


def test_sums_of_a_group_must_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        figure, wrong = try_all_reduce("cpu", 2000, 1)
        monkeypatch.setattr(dist, "all_reduce", lambda numbers: numbers[7].add_(1))
        assert (figure[-5:], wrong, try_all_reduce("cpu", 2000, 1)[1]) == (" GB/s", "", "1 of 2,000 sums")
    finally:
        dist.destroy_process_group()


# ---- probes


BROKEN = {  # by the word that a probe is given
    "look": "import time; time.sleep(600)",
    "cpu": 'import os, signal, time; print(\'{"tries": "a net"}\', flush=True)\n'
    "os.kill(os.getpid(), signal.SIGSEGV) if os.environ['RANK'] == '1' else time.sleep(600)",
}


def test_probes_that_hang_or_crash_are_ended_and_known(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (working_folder / "python").write_text(f"#!{sys.executable}\nimport sys\nexec({BROKEN!r}[sys.argv[3]])\n")
    (working_folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(working_folder / "python"))
    with pytest.raises(Failure, match=r"the look for devices gave no answer in 0\.5 s \(starting\): the driver may hang"):
        look("auto", "auto", 0.5)
    hanging, crashed = check.run_probes(["cpu", "cpu"], {}, 5.0)
    assert (hanging, crashed) == (([TRIES], None), ([TRIES], -signal.SIGSEGV))
    assert fault(crashed, 5.0) == (1, 1, "fails in a net: it was killed by SIGSEGV")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_probe_ends_when_the_command_is_killed() -> None:
    meet = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [sys.executable, "-m", "cifar_lit.cli.check", "cpu"]
    with subprocess.Popen(argv, env={**os.environ, **meet}, stdin=-1, stdout=-1, stderr=-1) as probe:
        assert probe.stdout is not None and probe.stdin is not None
        while b"connecting" not in probe.stdout.readline():  # to one that never comes
            pass
        probe.stdin.close()  # as the system does when the other process is gone
        assert probe.wait(60) == 1


# ---- the command

CHECK = ["-m", "cifar_lit", "devices", "--check", "--accelerator", "cpu", "--limit", "90"]


def test_a_machine_on_which_all_is_well_passes_whatever_a_launcher_has_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launcher = {"MASTER_PORT": str(taken.getsockname()[1]), "RANK": "1", "WORLD_SIZE": "7"}
        answer = run_command(*CHECK[2:], **launcher)
    assert (answer.code, answer.err) == (0, "")
    rows = table_rows(answer.out)
    assert {row[0] for row in rows} == {"2 × cpu, process 0", "2 × cpu, process 1"}
    assert all(row[2] == "right" and float(row[3]) >= 0 for row in rows)
    assert [row[4].split()[-1] for row in rows if row[1].startswith("all_reduce of")] == ["ms", "GB/s"]


def test_what_fails_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"look": machine_with(1), "cuda:0": ([TRIES], None), "cpu": ([TRIES, TRIED, DONE], 0)}
    monkeypatch.setattr(check, "run_probes", lambda words, variables, limit: [answers[word] for word in words])
    answer = run_command("devices", "--check", "--limit", "3")
    assert answer.error_lines == ["cifar-lit: process 0 of 1 × cuda gave no answer in 3 s (a net)"]
    assert (answer.code, answer.out.count("no answer"), answer.out.count("right")) == (1, 1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_gpu_computes_right_and_forms_a_group_over_nccl(working_folder: Path) -> None:
    answer = run_process([sys.executable, "-m", "cifar_lit", "devices", "--check", "--accelerator", "gpu"], working_folder)
    assert answer.code == 0, answer.err
    assert "1 × cuda" in answer.out


# ---- under torchrun

# A command of which the process with rank 1 is never heard of, as if its machine had stopped.
STOPS = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(600)
from cifar_lit.cli import main
raise SystemExit(main(["devices", "--check", "--accelerator", "cpu", "--limit", "25"]))
"""


def torchrun(folder: Path, *argv: str) -> Printed:
    return run_process([sys.executable, "-m", "torch.distributed.run", *argv], folder)


@pytest.mark.stress  # mostly waits for time limits and for imports
def test_two_machines_form_one_group_and_a_process_that_does_not_answer_is_named(working_folder: Path) -> None:
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    for node in "01":
        (working_folder / node).mkdir()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda node: torchrun(working_folder / node, *place, "--node-rank", node, *CHECK), "01")
    assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
    assert {row[0] for row in table_rows(first.out)} == {"2 × cpu, process 0", "2 × cpu, process 1"}
    (working_folder / "stops.py").write_text(STOPS)
    answer = torchrun(working_folder, "--standalone", "--nproc-per-node", "2", "stops.py")
    lines = [line for line in answer.err.splitlines() if line.startswith("cifar-lit:")]
    assert (lines, answer.code) == (["cifar-lit: process 1 of 2 × cpu gave no answer in 25 s (starting)"], 1)


def test_flags_that_contradict_torchrun_are_refused() -> None:
    launcher = {"TORCHELASTIC_RUN_ID": "one", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    answer = run_command("devices", "--check", "--devices", "3", **launcher)
    assert_refused(answer, 2, "--devices 3 contradicts torchrun, which started 2 (--nproc-per-node)")
