"""Fast gradients of convolutions equal those of torch, and are used only where they are faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.models.fast_gradients import LENGTH, MAX_WIDTH, MIN_CHANNELS, FastConvolution, fast_gradients
from cifar_lit.training.classifier import ImageClassifier


@pytest.fixture
def _amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar_lit.base.hardware.has_amx", lambda: True)


@pytest.mark.parametrize("shape", [(2 * LENGTH, 3, 5, 5), (LENGTH + 3, 3, 4, 7), (1, 2, 1, 1)])
def test_gradients_from_strips_equal_those_of_the_plain_convolution(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    maps = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, shape[1], 3, 3, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(shape[0], 4, *shape[2:], dtype=torch.float64)
    plain = F.conv2d(maps, weight, padding=1)
    joined = FastConvolution.apply(maps, weight, {"stride": 1, "padding": 1, "dilation": 1, "groups": 1})
    assert torch.equal(joined, plain)
    expected = torch.autograd.grad(plain, (maps, weight), gradient)
    actual = torch.autograd.grad(joined, (maps, weight), gradient)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(5, 2, 1), (3, 2, 2)])
@pytest.mark.parametrize("frozen", ["nothing", "maps", "weight"])
def test_depthwise_gradients_equal_those_of_float32_up_to_the_rounding_of_bfloat16(
    kernel: int, stride: int, dilation: int, frozen: str
) -> None:
    torch.manual_seed(0)
    shape = {"stride": stride, "padding": 2, "dilation": dilation, "groups": 6}
    maps = torch.randn(3, 6, 12, 9).bfloat16().requires_grad_(frozen != "maps")
    weight = torch.randn(6, 1, kernel, kernel).bfloat16().requires_grad_(frozen != "weight")
    result = FastConvolution.apply(maps, weight, shape)
    trained = [tensor for tensor in (maps, weight) if tensor.requires_grad]
    actual = torch.autograd.grad(result.float().square().sum() / 2, trained)
    doubles = [tensor.detach().float().requires_grad_() for tensor in (maps, weight)]
    expected = F.conv2d(doubles[0], doubles[1], **shape)  # type: ignore[arg-type]
    sought = [double for double, tensor in zip(doubles, (maps, weight), strict=True) if tensor.requires_grad]
    for ours, theirs in zip(actual, torch.autograd.grad(expected, sought, result.float()), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-3)


def kind_of_gradient(
    channels: int = MIN_CHANNELS, width: int = MAX_WIDTH, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> str:
    """Return how the gradients of a convolution are computed under autocast to bfloat16, or in a dtype."""
    options = {"kernel_size": 3, "padding": 1, "bias": False} | options
    conv = nn.Conv2d(channels, options.pop("outputs", channels), **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        maps = torch.randn(2, channels, 6, width)
        with fast_gradients(maps):
            result = conv(maps)
    assert result.dtype == dtype
    return kind_of(result)


STRIPS, DEPTHWISE, PLAIN = "strips", "float32", "ConvolutionBackward0"


def kind_of(result: Tensor) -> str:
    name = type(result.grad_fn).__name__
    if name != "FastConvolutionBackward":
        return name
    function: Any = result.grad_fn
    return DEPTHWISE if function.shape["groups"] > 1 else STRIPS


@pytest.mark.usefixtures("_amx")
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, STRIPS),
        ({"width": MAX_WIDTH + 1}, PLAIN),
        ({"outputs": MIN_CHANNELS - 1}, PLAIN),
        ({"kernel_size": 5}, PLAIN),
        ({"stride": 2}, PLAIN),
        ({"groups": 2}, PLAIN),
        ({"bias": True}, PLAIN),
        ({"padding": "same"}, PLAIN),
        ({"dtype": torch.float32}, PLAIN),
        ({"channels": 8, "groups": 8, "stride": 2, "kernel_size": 5, "width": 20}, DEPTHWISE),
        ({"channels": 1, "groups": 1}, PLAIN),
    ],
)
def test_each_convolution_gets_the_gradient_that_is_fast_for_it(options: dict[str, Any], kind: str) -> None:
    assert kind_of_gradient(**options) == kind


def test_strips_are_used_on_cpus_with_amx_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar_lit.base.hardware.has_amx", lambda: False)
    assert kind_of_gradient() == PLAIN
    assert kind_of_gradient(groups=MIN_CHANNELS) == DEPTHWISE


def test_a_training_step_uses_them() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = ImageClassifier(net=net, num_classes=3, input_shape=[3, 8, 8])
    names: list[str] = []
    net[0].register_forward_hook(lambda conv, inputs, output: names.append(kind_of(output)))
    with torch.autocast("cpu", torch.bfloat16):
        model.training_step((torch.randn(2, 3, 8, 8), torch.tensor([0, 1])), 0)
    assert names == [DEPTHWISE]
