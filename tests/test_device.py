"""Which device computes, whatever command asks."""

from __future__ import annotations

import pytest
import torch

from cifar_lit.errors import UsageError
from cifar_lit.hardware import Machine, detect_machine, resolve_device

GPU = ("a GPU", 2**30)
CPU, ONE, TWO = (Machine("a CPU", 2, False, (GPU,) * count) for count in range(3))
APPLE = Machine("an M3", 8, False, mps=True)


@pytest.mark.parametrize(
    ("machine", "name", "found"),
    [
        (CPU, "auto", "cpu"),
        (CPU, "cpu", "cpu"),
        (ONE, "auto", "cuda"),
        (ONE, "cpu", "cpu"),
        (ONE, "gpu", "cuda"),
        (ONE, "cuda:0", "cuda:0"),
        (TWO, "cuda", "cuda"),
        (TWO, "cuda:1", "cuda:1"),
        (TWO, "gpu:1", "cuda:1"),
        (APPLE, "auto", "mps"),
        (APPLE, "gpu", "mps"),
        (APPLE, "mps", "mps"),
        (APPLE, "gpu:0", "mps"),
        (APPLE, "cpu", "cpu"),
    ],
)
def test_a_name_is_turned_into_torchs(machine: Machine, name: str, found: str) -> None:
    assert resolve_device(name, machine) == found
    assert str(torch.device(found)) == found


@pytest.mark.parametrize(
    ("machine", "name", "has"),
    [
        (CPU, "gpu", "cpu"),
        (CPU, "cuda", "cpu"),
        (CPU, "mps", "cpu"),
        (CPU, "cpu:1", "cpu"),
        (CPU, "auto:0", "cpu"),
        (ONE, "cuda:1", "cpu, cuda:0"),
        (ONE, "mps", "cpu, cuda:0"),
        (TWO, "gpu:2", "cpu, cuda:0, cuda:1"),
        (APPLE, "cuda", "cpu, mps"),
        (APPLE, "gpu:1", "cpu, mps"),
        (APPLE, "auto:0", "cpu, mps"),
        (CPU, "", "cpu"),
        (CPU, "cuda:x", "cpu"),
    ],
)
def test_what_the_machine_does_not_have_is_answered_with_what_it_has(machine: Machine, name: str, has: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_device(name, machine)
    assert str(caught.value).startswith(f"this machine has no device {name!r}: it has {has}.")


def test_a_slip_is_answered_with_the_nearest_right_name() -> None:
    with pytest.raises(UsageError, match=r"no device 'cuba': it has cpu\. Did you mean cuda\? auto takes the fastest\."):
        resolve_device("cuba", CPU)


def test_this_machine_computes_where_auto_says() -> None:
    assert torch.zeros(1, device=resolve_device("auto")).sum() == 0
    assert detect_machine().devices[0] == "cpu"
