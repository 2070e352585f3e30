"""Muon equals torch's Muon, SGD and its definition. test_optimizers has its decay and the norms of filters."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from cifar_lit.training.muon import Muon

MATRICES = [(24, 72), (72, 24), (16, 16), (24, 72), (3, 100)]
FILTERS = [(8, 3, 3, 3), (16, 8, 3, 3), (16, 8, 3, 3), (64, 4, 2, 2), (12, 5)]
VECTORS = [(7,), (), (4, 5)]


def parameters(shapes: list[tuple[int, ...]]) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def stepped(*optimizers: torch.optim.Optimizer, steps: range = range(4)) -> list[Tensor]:
    """Return the parameters after steps on random gradients, which do not depend on their shapes."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    params = [parameter for group in groups for parameter in group["params"]]
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        for parameter in params:
            numbers = torch.randn(parameter.numel(), generator=generator)
            parameter.grad = torch.zeros_like(parameter).copy_(numbers.view(parameter.shape))
        for optimizer in optimizers:
            optimizer.step()
    return params


def assert_alike(first: list[Tensor], second: list[Tensor], tolerance: float = 0.0) -> None:
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("nesterov", "momentum", "tolerance", "steps"),
    [(True, 0.75, 1e-6, 3), (False, 0.5, 1e-6, 5), (True, 0.95, 2e-3, 3)],
)
def test_on_matrices_muon_equals_torchs(nesterov: bool, momentum: float, tolerance: float, steps: int) -> None:
    """Momenta are sums of few powers of two, which round alike in bfloat16 in torch's averaging form and in ours."""
    shared: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov}
    before, matrices = parameters(MATRICES), parameters(MATRICES)
    groups = []
    for matrix in matrices:
        factor = max(1.0, len(matrix) / matrix.shape[1]) ** 0.5  # torch multiplies the rate by it
        groups.append({"params": [matrix], "lr": 0.1 * factor, "weight_decay": 0.2 / factor})
    ours = stepped(Muon(groups, 0.1, steps=steps, **shared))
    theirs = stepped(torch.optim.Muon(parameters(MATRICES), lr=0.1, weight_decay=0.2, ns_steps=steps, **shared))
    moves = [float((after - start).detach().norm()) for after, start in zip(theirs, before, strict=True)]
    errors = [float((our - their).detach().norm()) for our, their in zip(ours, theirs, strict=True)]
    assert min(moves) > 0.1
    assert all(error <= 10 * tolerance * move for error, move in zip(errors, moves, strict=True)), (errors, moves)


@pytest.mark.parametrize("form", ["alone", "flat", "channels_last"])
def test_batched_filters_move_as_single_ones_flattened_ones_and_in_any_memory_format(form: str) -> None:
    settings: dict[str, Any] = {"products": "float32", "rescale": True}
    expected, params = stepped(Muon(parameters(FILTERS), 0.1, **settings)), parameters(FILTERS)
    for parameter in params:
        if form == "flat":
            parameter.data = parameter.data.flatten(1)
        elif form == "channels_last" and parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizers = [Muon(part, 0.1, **settings) for part in ([[one] for one in params] if form == "alone" else [params])]
    assert_alike(stepped(*optimizers), expected, 1e-5)
    if form != "alone":
        assert all(optimizers[0].state[one]["momentum_buffer"].stride() == one.stride() for one in params)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.85, True), (0.9, False), (0.0, False)])
def test_the_other_groups_equal_torchs_sgd(momentum: float, nesterov: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov}
    ours, theirs = Muon(parameters(VECTORS), orthogonal=False, **settings), SGD(parameters(VECTORS), **settings)
    assert_alike(stepped(ours), stepped(theirs), 1e-6)


def test_the_rate_is_read_at_each_step_and_clamped_at_zero() -> None:
    muon = {"params": parameters(FILTERS), "momentum": 0.6}
    sgd = {"params": parameters(VECTORS), "orthogonal": False, "momentum": 0.85}
    optimizer = Muon([muon, sgd], 0.1, steps=3)
    params = stepped(optimizer)
    before = [parameter.detach().clone() for parameter in params]
    for group in optimizer.param_groups:
        group["lr"] = -0.1
    assert_alike(stepped(optimizer), before)
    optimizer.param_groups[0]["lr"] = 0.1
    assert not torch.equal(stepped(optimizer)[0], before[0])
