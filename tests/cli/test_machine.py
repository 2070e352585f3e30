from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_lit.errors import UsageError
from cifar_lit.hardware import Machine, choose_devices, choose_precision, detect_machine, probe_bf16

GIB = 2**30
CPU = Machine(cpu="a CPU", threads=4, bf16=False)
CPU_BF16 = Machine(cpu="a CPU", threads=4, bf16=True)
CPU_BUILD = Machine(cpu="a CPU", threads=4, bf16=False, cuda_build=False)
MPS = Machine(cpu="an M3", threads=8, bf16=False, mps=True, cuda_build=False)


def gpus(count: int, bf16: bool = True) -> Machine:
    return Machine(cpu="a CPU", threads=4, bf16=False, gpus=(("H200", 140 * GIB),) * count, gpu_bf16=bf16)


ONE, TWO, EIGHT = gpus(1), gpus(2), gpus(8)


@pytest.mark.parametrize(
    ("machine", "accelerator", "devices", "expected"),
    [
        (CPU, "auto", "auto", ("auto", "auto")),
        (CPU, "auto", 2, ("auto", 2)),
        (CPU, "auto", "2", ("auto", 2)),
        (CPU, "cpu", "2", ("cpu", 2)),
        (CPU, "cpu", "auto", ("cpu", "auto")),
        (CPU, "cpu", 1, ("cpu", 1)),
        (MPS, "auto", "auto", ("auto", "auto")),
        (MPS, "auto", "1", ("auto", 1)),
        (MPS, "gpu", "auto", ("gpu", "auto")),
        (MPS, "mps", "1", ("mps", 1)),
        (MPS, "cpu", "2", ("cpu", 2)),
        (ONE, "auto", "auto", ("auto", "auto")),
        (ONE, "gpu", "auto", ("gpu", "auto")),
        (ONE, "gpu", "1", ("gpu", 1)),
        (ONE, "gpu", "-1", ("gpu", -1)),
        (ONE, "auto", "[0]", ("auto", [0])),
        (ONE, "auto", "0,", ("auto", [0])),
        (ONE, "cpu", "2", ("cpu", 2)),
        (TWO, "gpu", "2", ("gpu", 2)),
        (TWO, "cuda", "[1]", ("cuda", [1])),
        (TWO, "auto", "0,1", ("auto", [0, 1])),
        (TWO, "auto", [1, 0], ("auto", [1, 0])),
        (TWO, "auto", -1, ("auto", -1)),
        (EIGHT, "gpu", "8", ("gpu", 8)),
        (EIGHT, "gpu", "3, 7", ("gpu", [3, 7])),
        (EIGHT, "auto", "[0, 2, 4]", ("auto", [0, 2, 4])),
    ],
)
def test_what_the_machine_has_is_passed_to_the_trainer(machine: Machine, accelerator: str, devices: Any, expected: Any) -> None:
    assert choose_devices(machine, accelerator, devices) == expected


NO_GPU = "this machine has no GPU, a CPU with 4 threads"
ADVICE = "use a number (2), ids (0,1) or auto"
TWO_GPUS = "this machine has GPUs 0 H200, 1 H200"


@pytest.mark.parametrize(
    ("machine", "accelerator", "devices", "line"),
    [
        (CPU, "gpu", "auto", f"{NO_GPU}: leave --accelerator out, or use --accelerator cpu"),
        (CPU, "cuda", "1", f"{NO_GPU}: leave --accelerator out, or use --accelerator cpu"),
        (
            CPU_BUILD,
            "gpu",
            "auto",
            f"{NO_GPU}, and this torch is a build for CPUs only: leave --accelerator out, or use --accelerator cpu",
        ),
        (CPU, "mps", "auto", f"{NO_GPU}, not Apple's: leave --accelerator out, or use --accelerator cpu"),
        (TWO, "mps", "auto", f"{TWO_GPUS}, not Apple's: leave --accelerator out, or use --accelerator cpu"),
        (
            MPS,
            "cuda",
            "auto",
            "this machine has an Apple GPU (mps), and this torch is a build for CPUs only: "
            "leave --accelerator out, or use --accelerator cpu",
        ),
        (CPU, "auto", "0,1", f"--devices 0,1 names GPUs, but {NO_GPU}: --devices 2 runs two processes on it"),
        (CPU, "cpu", "[1]", f"--devices [1] names GPUs, but {NO_GPU}: --devices 2 runs two processes on it"),
        (CPU, "auto", [1], f"--devices [1] names GPUs, but {NO_GPU}: --devices 2 runs two processes on it"),
        (CPU, "auto", "-1", f"--devices -1 means every GPU, but {NO_GPU}: use --devices 1"),
        (ONE, "gpu", "2", "--devices 2 asks for more GPUs than there are: this machine has GPUs 0 H200"),
        (ONE, "auto", "[1]", "there is no GPU 1: this machine has GPUs 0 H200"),
        (TWO, "auto", "3", f"--devices 3 asks for more GPUs than there are: {TWO_GPUS}"),
        (TWO, "gpu", "0,2", f"there is no GPU 2: {TWO_GPUS}"),
        (EIGHT, "gpu", "7,8", "there is no GPU 8: this machine has GPUs 0 H200, …, 7 H200"),
        (TWO, "auto", "0", f"--devices 0 leaves nothing to train on: {ADVICE}"),
        (CPU, "auto", 0, f"--devices 0 leaves nothing to train on: {ADVICE}"),
        (TWO, "auto", "-2", f"--devices -2 leaves nothing to train on: {ADVICE}"),
        (TWO, "auto", "two", f"--devices two is not understood: {ADVICE}"),
        (TWO, "auto", "0;1", f"--devices 0;1 is not understood: {ADVICE}"),
        (TWO, "auto", "1,1", f"--devices [1, 1] names no device, or one twice: {ADVICE}"),
        (TWO, "auto", "[]", f"--devices [] names no device, or one twice: {ADVICE}"),
        (TWO, "auto", "0,-1", f"--devices [0, -1] names no device, or one twice: {ADVICE}"),
        (CPU, "gpus", "auto", "no accelerator is called 'gpus'. Did you mean gpu?"),
        (CPU, "CPU", "auto", "no accelerator is called 'CPU'. Did you mean cpu?"),
    ],
)
def test_what_the_machine_does_not_have_is_answered_with_what_it_has(
    machine: Machine, accelerator: str, devices: Any, line: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_devices(machine, accelerator, devices)
    said = str(caught.value)
    start, _, end = line.partition("…")
    assert said.startswith(start)
    assert said.endswith(end)
    assert "\n" not in said
    assert "…" in line or said == line


@pytest.mark.parametrize(
    ("machine", "accelerator", "precision"),
    [
        (CPU, "auto", "32-true"),
        (CPU, "cpu", "32-true"),
        (CPU_BF16, "auto", "bf16-mixed"),
        (CPU_BF16, "cpu", "bf16-mixed"),
        (MPS, "auto", "32-true"),
        (MPS, "mps", "32-true"),
        (MPS, "gpu", "32-true"),
        (MPS, "cpu", "32-true"),
        (ONE, "auto", "bf16-mixed"),
        (EIGHT, "gpu", "bf16-mixed"),
        (TWO, "cuda", "bf16-mixed"),
        (TWO, "cpu", "32-true"),
        (gpus(1, bf16=False), "auto", "32-true"),
        (gpus(1, bf16=False), "gpu", "32-true"),
    ],
)
def test_precision_is_bf16_exactly_where_the_device_computes_in_it(machine: Machine, accelerator: str, precision: str) -> None:
    chosen, reason = choose_precision(machine, accelerator)
    assert chosen == precision
    assert reason  # for the start card


def test_this_machine_is_seen_with_its_processor() -> None:
    found = detect_machine()
    assert found.threads >= 1
    assert found.cpu
    assert "GPU" in str(found)


def test_the_probe_of_bf16_leaves_threads_and_random_numbers_as_they_are() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert 0.01 < probe_bf16() < 100
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
