"""`cifar-lit devices --check`: a row for each device, and an error for one that cannot train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.command_line import run_command, run_process

from cifar_lit.base.errors import Failure
from cifar_lit.base.hardware import Machine
from cifar_lit.cli import devices


def test_every_device_has_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"cpu": {"float32": 10.0, "bfloat16": 20.0}, "cuda:0": {"float32": 40.0}}
    machine = Machine("a CPU", 4, True, (("H200", 2**37),), gpu_bf16=True)
    monkeypatch.setattr(devices, "detect_machine", lambda: machine)
    monkeypatch.setattr(devices, "try_device", speeds.get)
    answer = run_command("devices", "--check")
    assert answer.code == 0
    rows = [line.replace("│", " ").split() for line in answer.out.splitlines()]
    assert ["cuda:0", "float32", "40", "2.0"] in rows and ["cpu", "float32", "10", "0.5"] in rows


def test_a_driver_that_hangs_ends_the_check_and_its_device_is_named(working_folder: Path) -> None:
    code = (
        "import threading; from cifar_lit.cli import devices, main; devices.LIMIT = 0.2; "
        "devices.try_device = lambda device: threading.Event().wait(); main(['devices', '--check'])"
    )
    answer = run_process([sys.executable, "-c", code], working_folder)
    assert (answer.code, answer.err.split(":")[0]) == (1, "checking cpu")


def test_a_failing_device_is_reported_with_a_remedy_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_device(device: str) -> dict[str, float]:
        if device == "cuda:0":
            raise RuntimeError("CUDA error: no kernel image\nis available")
        return {"float32": 9.0}

    machine = Machine("a CPU", 4, False, (("H200", 2**37),), gpu_bf16=True)
    monkeypatch.setattr(devices, "detect_machine", lambda: machine)
    monkeypatch.setattr(devices, "try_device", try_device)
    answer = run_command("devices", "--check")
    assert answer.code == 1 and "fails: CUDA error: no kernel image" in answer.out
    line = answer.error_lines[-1]
    assert line.startswith("cifar-lit: cuda:0 cannot train. ") and "--accelerator cpu" in line


def test_a_gpu_without_bfloat16_is_listed_with_its_precision_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a CPU", 4, False, (("Tesla T4", 15 << 30),), gpu_fp16=True)
    monkeypatch.setattr(devices, "detect_machine", lambda: machine)
    answer = run_command("devices")
    assert answer.code == 0
    (row,) = (line for line in answer.out.splitlines() if "Tesla T4" in line)
    assert "16-mixed" in row and "--devices 0," in row
    assert "gpu: 16-mixed by default (float16 is fast on this GPU, bfloat16 is not)" in answer.out.splitlines()
    assert "cpu: 32-true by default (this CPU does not support bfloat16)" in answer.out.splitlines()


def test_a_gpu_is_checked_in_its_default_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    train, trained = devices.train, list[torch.dtype]()

    def train_on_the_cpu(device: str, dtype: torch.dtype) -> Any:
        trained.append(dtype)
        return train("cpu", dtype)

    monkeypatch.setattr(devices, "train", train_on_the_cpu)
    monkeypatch.setattr(devices, "detect_machine", lambda: Machine("", 1, False, (("T4", 1),), gpu_fp16=True))
    assert devices.try_device("cuda:0").keys() == {"float32", "float16"}
    assert trained == [torch.float64, torch.float32, torch.float16]


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_device_that_computes_wrong_numbers_fails(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, factors = torch.nn.Linear.forward, {torch.float32: factor}
    wrong = lambda self, x: forward(self, x) * factors.get(x.dtype, 1)  # noqa: E731
    monkeypatch.setattr(torch.nn.Linear, "forward", wrong)
    with pytest.raises(Failure, match=r"wrong losses in float32: off by .*, where 1e-04 is allowed"):
        devices.try_device("cpu")
