"""Gradients from strips of images equal those of the plain convolution, and are used only where they are faster."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.models import strips
from cifar_lit.models.registry import build_net
from cifar_lit.models.strips import LENGTH, MAX_WIDTH, StripConvolution, convolve


@pytest.fixture
def _amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "has_amx", lambda: True)


@pytest.mark.parametrize("shape", [(2 * LENGTH, 3, 5, 5), (LENGTH + 3, 3, 4, 7), (1, 2, 1, 1)])
def test_gradients_equal_those_of_the_plain_convolution(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    maps = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, shape[1], 3, 3, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(shape[0], 4, *shape[2:], dtype=torch.float64)
    plain = F.conv2d(maps, weight, padding=1)
    joined = StripConvolution.apply(maps, weight)
    assert torch.equal(joined, plain)
    expected = torch.autograd.grad(plain, (maps, weight), gradient)
    actual = torch.autograd.grad(joined, (maps, weight), gradient)
    torch.testing.assert_close(actual, expected)


def test_maps_without_gradient_get_none() -> None:
    weight = torch.randn(2, 2, 3, 3, requires_grad=True)
    StripConvolution.apply(torch.randn(3, 2, 4, 4), weight).sum().backward()
    assert weight.grad is not None


def uses_strips(kernel: int = 3, width: int = MAX_WIDTH, dtype: torch.dtype = torch.bfloat16) -> bool:
    conv = nn.Conv2d(2, 2, kernel, padding=(kernel - 1) // 2, bias=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = convolve(conv, torch.randn(3, 2, 6, width).type(dtype))
    return "StripConvolution" in str(result.grad_fn)


@pytest.mark.usefixtures("_amx")
def test_strips_are_used_for_small_maps_in_bfloat16_on_cpus_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses_strips()
    assert not uses_strips(width=MAX_WIDTH + 1)
    assert not uses_strips(kernel=1)
    assert not uses_strips(kernel=2)
    assert not uses_strips(dtype=torch.float32)
    monkeypatch.setattr(strips, "has_amx", lambda: False)
    assert not uses_strips()


def test_a_net_learns_the_same_with_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = build_net(
        "whitened", channels=3, image_size=24, num_classes=10, options={"widths": [8, 16, 16], "whiten_bias": False}
    )
    net.initialise(torch.randn(50, 3, 24, 24))  # type: ignore[operator]
    images, labels = torch.randn(30, 3, 24, 24), torch.arange(30) % 10

    def gradients(amx: bool) -> list[Tensor]:
        monkeypatch.setattr(strips, "has_amx", lambda: amx)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        return list(torch.autograd.grad(loss, [weight for weight in net.parameters() if weight.shape[2:] == (3, 3)]))

    for with_strips, direct in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(with_strips, direct, rtol=0, atol=0.02 * float(direct.abs().max()))
