"""Muon against torch's own, SGD and the definition: directions, rates, skipped steps; its decay is test_optimizers'."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import SGD

from cifar_lit.training.muon import Muon, orthogonalized

MATRICES = [(24, 72), (72, 24), (16, 16), (24, 72), (3, 100)]
FILTERS = [(8, 3, 3, 3), (16, 8, 3, 3), (16, 8, 3, 3), (64, 4, 2, 2), (12, 5)]
VECTORS = [(7,), (), (4, 5)]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def give_gradients(params: list[Parameter], seed: int) -> None:
    """Random ones, the same in whatever shape and format."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        numbers = torch.randn(parameter.numel(), generator=generator)
        parameter.grad = torch.zeros_like(parameter).copy_(numbers.view(parameter.shape))


def stepped(optimizer: torch.optim.Optimizer, steps: int = 4, first: int = 0) -> list[Tensor]:
    """The parameters after steps on the same random gradients, numbered from `first`."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for seed in range(first, first + steps):
        give_gradients(params, seed)
        optimizer.step()
    return params


def assert_alike(first: list[Tensor], second: list[Tensor], tolerance: float = 0.0) -> None:
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def both_kinds(lr: Any = 0.1, **settings: Any) -> Muon:
    """Filters under Muon with all options, and the rest under SGD with decay."""
    muon = {"params": parameters(FILTERS), "rescale": True, "weight_decay": 0.05, "momentum": 0.6}
    sgd = {"params": parameters(VECTORS), "orthogonal": False, "weight_decay": 0.1, "momentum": 0.85}
    rates = [lr.clone() if isinstance(lr, Tensor) else lr for _ in range(2)]
    return Muon([{**muon, "lr": rates[0]}, {**sgd, "lr": rates[1]}], 0.1, steps=3, **settings)


def everything(optimizer: Muon) -> list[Tensor]:
    """Copies of parameters and buffers."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [tensor.detach().clone() for one in params for tensor in (one, optimizer.state[one]["momentum_buffer"])]


@pytest.mark.parametrize(
    ("nesterov", "momentum", "tolerance", "steps"), [(True, 0.75, 1e-6, 3), (False, 0.5, 1e-6, 5), (True, 0.95, 2e-3, 3)]
)
def test_on_matrices_it_is_torchs_muon(nesterov: bool, momentum: float, tolerance: float, steps: int) -> None:
    """Momenta that are sums of few powers of two round alike in bfloat16 in torch's averaging form and in ours."""
    shared: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov}
    before, matrices = parameters(MATRICES), parameters(MATRICES)
    factors = [max(1.0, len(matrix) / matrix.shape[1]) ** 0.5 for matrix in matrices]  # of the rate, by which torch adjusts it
    groups = [
        {"params": [matrix], "lr": 0.1 * factor, "weight_decay": 0.2 / factor}
        for matrix, factor in zip(matrices, factors, strict=True)
    ]
    ours = stepped(Muon(groups, 0.1, steps=steps, **shared))
    theirs = stepped(torch.optim.Muon(parameters(MATRICES), lr=0.1, weight_decay=0.2, ns_steps=steps, **shared))
    moved = [float((after - was).detach().norm()) for after, was in zip(theirs, before, strict=True)]
    apart = [float((mine - torchs).detach().norm()) for mine, torchs in zip(ours, theirs, strict=True)]
    assert min(moved) > 0.1
    assert all(gap <= 10 * tolerance * way for gap, way in zip(apart, moved, strict=True)), (apart, moved)


@pytest.mark.parametrize("shape", [(24, 72), (72, 24), (32, 32)])
def test_the_direction_of_a_step_is_the_nearest_orthogonal_one(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    matrices = left @ torch.diag_embed(values.clamp(min=values.max() / 20)) @ right  # 5 steps lift no less than that to 1
    made = orthogonalized(matrices, steps=5)
    turned = left.mT @ made @ right.mT
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.65 and values.max() < 1.25
    torch.testing.assert_close(turned, torch.diag_embed(torch.diagonal(turned, dim1=1, dim2=2)))  # the singular vectors stay
    assert not orthogonalized(torch.zeros(2, 4, 6)).any()


@pytest.mark.parametrize("products", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["alone", "flat", "channels_last"])
def test_filters_move_together_as_each_would_alone_as_a_matrix_of_its_outputs_and_in_any_format(products: str, form: str) -> None:
    settings: dict[str, Any] = {"products": products, "rescale": True}
    expected = stepped(Muon(parameters(FILTERS), 0.1, **settings))
    params = parameters(FILTERS)
    for parameter in params:
        if form == "flat":
            parameter.data = parameter.data.flatten(1)
        elif form == "channels_last" and parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizers = (
        [Muon([parameter], 0.1, **settings) for parameter in params] if form == "alone" else [Muon(params, 0.1, **settings)]
    )
    for seed in range(4):
        give_gradients(params, seed)
        for optimizer in optimizers:
            optimizer.step()
    tolerance = 5e-3 if products == "bfloat16" else 1e-5
    for parameter, other in zip(params, expected, strict=True):
        torch.testing.assert_close(parameter.reshape(other.shape), other, rtol=tolerance, atol=tolerance)
        if form != "alone":
            assert optimizers[0].state[parameter]["momentum_buffer"].stride() == parameter.stride()


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.85, True), (0.9, False), (0.0, False)])
def test_the_other_groups_are_torchs_sgd(momentum: float, nesterov: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov}
    assert_alike(
        stepped(Muon(parameters(VECTORS), orthogonal=False, **settings)), stepped(SGD(parameters(VECTORS), **settings)), 1e-6
    )


def test_a_rate_in_a_tensor_is_the_same_rate_and_read_anew_at_each_step() -> None:
    tensors, numbers = both_kinds(torch.tensor(0.1)), both_kinds(0.1)
    stepped(tensors), stepped(numbers)
    for group in tensors.param_groups:
        group["lr"].fill_(0.03)
    for group in numbers.param_groups:
        group["lr"] = 0.03
    assert_alike(stepped(tensors, first=4), stepped(numbers, first=4), 1e-6)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_rate_below_zero_counts_as_zero(kind: Callable[[float], Any]) -> None:
    optimizer = both_kinds(kind(0.1))
    params = stepped(optimizer)
    optimizer.param_groups[0]["rescale"] = False
    before = [parameter.detach().clone() for parameter in params]
    for group in optimizer.param_groups:
        group["lr"] = kind(-0.1)
    assert_alike(stepped(optimizer), before)


@pytest.mark.parametrize(
    ("shape", "lr", "value"), [((), 0.1, 1.0), ((1,), 0.1, float("nan")), ((), torch.tensor(0.1), float("nan"))]
)
def test_a_step_with_found_inf_changes_nothing(shape: tuple[int, ...], lr: Any, value: float) -> None:
    optimizer = both_kinds(lr)
    params = stepped(optimizer)
    before = everything(optimizer)
    optimizer.found_inf = torch.ones(shape)
    for parameter in params:
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    assert_alike(everything(optimizer), before)


def test_parameters_without_gradient_are_left_out() -> None:
    optimizer, whole = both_kinds(), both_kinds()
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in params]
    expected = stepped(whole, 1)
    give_gradients(params, 0)
    for parameter in params[::2]:
        parameter.grad = None
    optimizer.step()
    assert_alike(params[::2], before[::2])
    assert_alike(params[1::2], expected[1::2], 5e-3)  # another batch, other roundings in bfloat16
    assert all(parameter not in optimizer.state for parameter in params[::2])


def test_a_step_never_waits_for_the_device() -> None:
    """Tensors without content refuse every question about their values, and to meet tensors of another device."""
    with FakeTensorMode():
        filters, others = ([Parameter(torch.ones(shape, device="cuda:0")) for shape in shapes] for shapes in (FILTERS, VECTORS))
        rates = [torch.tensor(0.1, device="cuda:0") for _ in range(2)]
        groups = [
            {"params": filters, "lr": rates[0], "rescale": True, "weight_decay": 0.1},
            {"params": others, "lr": rates[1], "orthogonal": False, "weight_decay": 0.1},
        ]
        optimizer = Muon(groups, 0.1)
        for parameter in (*filters, *others):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.found_inf = torch.zeros(1, device="cuda:0")
        optimizer.step()


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="orthogonal=False"):
        Muon(parameters(VECTORS), 0.1)
