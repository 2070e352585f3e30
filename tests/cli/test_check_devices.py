"""`cifar-lit devices --check`: one line for each device, and an error for one that cannot train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from contract.command_line import assert_refused, run_command

from cifar_lit import hardware
from cifar_lit.cli import check_devices as check
from cifar_lit.errors import Failure
from cifar_lit.hardware import Machine

GPU = Machine("a CPU", 4, False, (("H200", 2**37),), gpu_bf16=True)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "BATCH", 8)


def test_a_working_device_is_listed_with_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Probe the CPU in this process: in its own it would take half a minute.
    probes = {"machine": check.run_probe, "cpu": check.try_device}
    monkeypatch.setattr(check, "run_probe", lambda target: probes[target](target))
    answer = run_command("devices", "--check", "--accelerator", "cpu")
    assert (answer.code, answer.err) == (0, "")
    (line,) = answer.out.splitlines()
    assert line.startswith("cpu: works · float32 ") and line.count(" images/s") == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_gpu_works() -> None:
    answer = run_command("devices", "--check")
    assert answer.code == 0 and "cuda:0: works · float32 " in answer.out


def test_a_failing_device_is_reported_with_a_remedy_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_probe(target: str) -> str:
        if target == "cuda:0":
            raise Failure("no answer in 90 s")
        return json.dumps(vars(GPU)) if target == "machine" else "float32 9 images/s"

    monkeypatch.setattr(check, "run_probe", run_probe)
    answer = run_command("devices", "--check")
    assert answer.out.splitlines() == ["cpu: works · float32 9 images/s", "cuda:0: fails · no answer in 90 s"]
    assert answer.code == 1
    (line,) = answer.error_lines
    assert line.startswith("cifar-lit: cuda:0 cannot train. ") and "--accelerator cpu" in line
    assert run_command("devices", "--check", "--accelerator", "cpu").code == 0


def test_check_with_a_net_is_refused() -> None:
    assert_refused(run_command("devices", "--check", "--net", "lenet"), 2, "--check trains on devices")


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("import time; time.sleep(600)", r"no answer in 0\.5 s"),
        ("import os; os.abort()", "its process was killed by SIGABRT"),
        ("raise RuntimeError('CUDA error')", "RuntimeError: CUDA error"),
    ],
    ids=["hangs", "crashes", "raises"],
)
def test_a_probe_that_hangs_or_fails_is_reported(
    program: str, answer: str, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = working_folder / "python"
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(check, "LIMIT", 0.5 if "sleep" in program else 60.0)
    with pytest.raises(Failure, match=answer):
        check.run_probe("cpu")


def test_a_gpu_without_bfloat16_is_listed_with_its_precision_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a CPU", 4, False, (("Tesla T4", 15 << 30),), gpu_fp16=True)
    monkeypatch.setattr(hardware, "detect_machine", lambda: machine)
    answer = run_command("devices")
    assert answer.code == 0
    (row,) = (line for line in answer.out.splitlines() if "Tesla T4" in line)
    assert "16-mixed" in row and "--devices 0," in row
    assert "gpu: 16-mixed by default (float16 is fast on this GPU, bfloat16 is not)" in answer.out.splitlines()
    assert "cpu: 32-true by default (this CPU does not support bfloat16)" in answer.out.splitlines()


def test_a_gpu_is_checked_in_its_default_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    train, trained = check.train, list[torch.dtype]()

    def train_on_the_cpu(device: str, dtype: torch.dtype) -> tuple[list[float], float]:
        trained.append(dtype)
        return train("cpu", dtype)

    monkeypatch.setattr(check, "train", train_on_the_cpu)
    monkeypatch.setattr(check, "detect_machine", lambda: Machine("", 1, False, (("T4", 1),), gpu_fp16=True))
    assert " · float16 " in check.try_device("cuda:0")
    assert trained == [torch.float64, torch.float32, torch.float16]


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_device_that_computes_wrong_numbers_fails(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gelu, factors = torch.nn.functional.gelu, {torch.float32: factor}
    monkeypatch.setattr(torch.nn.GELU, "forward", lambda self, x: gelu(x) * factors.get(x.dtype, 1))
    with pytest.raises(Failure, match=r"wrong losses in float32: off by .*, where 1e-04 is allowed"):
        check.try_device("cpu")
