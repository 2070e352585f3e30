"""What a device is tried with: right numbers pass, a wrong one among many does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_lit.cli.check.device import difference, memory, net, product
from cifar_lit.cli.check.group import wrong

CPU = torch.device("cpu")
FLOAT32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn is enough where no figure is wanted."""
    monkeypatch.setattr("cifar_lit.cli.check.device.LEAST_SECONDS", 0.0)


def test_a_cpu_that_computes_as_it_should_is_right() -> None:
    for kind in (FLOAT32, BF16):
        assert product(CPU, lambda x: x, kind).wrong == ""
        assert net(CPU, lambda x: x, kind).wrong == ""
    found = memory(CPU, lambda x: x, 1)
    assert found.wrong == "" and found.figure.endswith(" GB/s")


@pytest.mark.parametrize("kind", [FLOAT32, BF16])
def test_one_wrong_number_among_those_of_a_product_is_seen(kind: torch.dtype) -> None:
    def broken(matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix.clone()
        matrix[3, 5] += 50
        return matrix

    assert "of the largest number, where" in product(CPU, broken, kind).wrong


def test_weights_and_bytes_that_change_on_their_way_are_seen() -> None:
    def weaker(what: Any) -> Any:
        if isinstance(what, torch.nn.Module):
            with torch.no_grad():
                what[0].weight *= 1.1
                what[-1].weight *= 1.1
        return what

    def flipped(what: torch.Tensor) -> torch.Tensor:
        what[77] ^= 1 << 20
        return what

    assert "off by" in net(CPU, weaker, FLOAT32).wrong
    assert memory(CPU, flipped, 1).wrong == "1 of 262,144 numbers came back changed"


def test_a_number_that_is_none_is_wrong() -> None:
    one = torch.ones(3)
    assert difference([one], [one], 1e-5) == ""
    assert difference([one * float("nan")], [one], 1e-5) == "off by nan of the largest number, where 1e-05 is allowed"


def test_sums_of_a_group_must_be_exact() -> None:
    good, bad = (torch.ones(5), torch.ones(5)), (torch.ones(5), torch.tensor([1.0, 1, 1, 2, 3]))
    assert wrong({"all_reduce": good}) == ""
    assert wrong({"all_reduce": good, "all_gather": bad}) == "all_gather brought 2 wrong numbers"
