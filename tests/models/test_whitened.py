import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.base.errors import UsageError
from cifar_lit.models import whitened
from cifar_lit.models.registry import build_net
from cifar_lit.models.whitened import EPS, whitening_filters

TINY: dict[str, Any] = {"widths": [8, 12]}


def build(size: int = 16, channels: int = 3, classes: int = 5, width: float = 1.0, **options: Any) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"channels": channels, "image_size": size, "num_classes": classes, "width": width}
    net: Any = build_net("whitened", **shape, options=options)
    net.is_prepared = True  # the feature whitening sets it
    return net


def random_images(size: int = 16, channels: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(6, channels, size, size, generator=torch.Generator().manual_seed(seed))


def with_statistics(net: Any) -> Any:
    """Return the net in evaluation mode, with running statistics and biases that are not zero."""
    net.initialise(random_images())
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad and parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5)
        for seed in range(5):
            net.train()(random_images(seed=seed))
    return net.eval()


def test_the_default_net_has_the_layers_of_airbench94() -> None:
    net = build(size=32, classes=10)
    shapes = {"whiten.bias": (24,), "head.weight": (10, 256)}
    for group, inputs, width in ((0, 24, 64), (1, 64, 256), (2, 256, 256)):
        for layer, channels in ((0, inputs), (1, width)):
            shapes[f"groups.{group}.convs.{layer}.weight"] = (width, channels, 3, 3)
            shapes[f"groups.{group}.norms.{layer}.bias"] = (width,)
    assert {name: tuple(p.shape) for name, p in net.named_parameters() if p.requires_grad} == shapes
    sides: list[torch.Size] = []
    for module in (net.whiten, *net.groups):
        module.register_forward_hook(lambda _module, _inputs, output: sides.append(output.shape[2:]))
    assert net(random_images(32)).shape == (6, 10)
    assert [tuple(side) for side in sides] == [(31, 31), (15, 15), (7, 7), (3, 3)]
    assert (net.activation, net.logit_scale) == (F.gelu, 1 / 256)
    assert float(net.head.weight.detach().std()) == pytest.approx(1, rel=1e-5)


def reference_logits(net: Any, images: Tensor, activation: Any, residual: bool) -> Tensor:
    """Return the logits of the net in evaluation mode, computed layer by layer from its weights."""

    def normalise(maps: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        mean, var, bias = (tensor.view(-1, 1, 1) for tensor in (norm.running_mean, norm.running_var, norm.bias))
        return (maps - mean) / (var + 1e-12).sqrt() + bias

    def conv2d(maps: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(maps, weight, padding={1: 0, 2: 0, 3: 1, 5: 2}[weight.shape[-1]])

    maps = activation(F.conv2d(images, net.whiten.weight, net.whiten.bias))
    for group in net.groups:
        maps = F.max_pool2d(conv2d(maps, group.convs[0].weight), 2)
        maps = before = activation(normalise(maps, group.norms[0]))
        for conv, norm in list(zip(group.convs, group.norms, strict=True))[1:]:
            maps = normalise(conv2d(maps, conv.weight), norm)
            maps = activation(maps + before if residual and conv is group.convs[-1] else maps)
    return maps.amax((2, 3)) @ net.head.weight.T / net.head.in_features


@pytest.mark.parametrize(
    ("activation", "depth", "residual"),
    [
        ("gelu", 1, False),
        ("gelu", [3, 1], True),
        ("silu", [[3, 1, 1], [2, 5]], True),
    ],
)
def test_the_net_computes_its_documented_layers(activation: str, depth: Any, residual: bool) -> None:
    net = build(**TINY, activation=activation, depth=depth, residual=residual)
    net, images = with_statistics(net), random_images(seed=9)
    with torch.no_grad():
        expected = reference_logits(net, images, getattr(F, activation), residual)
        torch.testing.assert_close(net(images), expected, rtol=1e-4, atol=1e-5)


def test_a_group_can_have_inner_widths_and_its_own_kernel_sizes() -> None:
    net = build(widths=[8, 12, 16], depth=[[3, 1, 1], [2, 3, 3, 1], 2], inner=[4, 6, 7], residual=True)
    shapes = [[tuple(conv.weight.shape) for conv in group.convs] for group in net.groups]
    assert shapes == [
        [(8, 24, 3, 3), (4, 8, 1, 1), (8, 4, 1, 1)],
        [(12, 8, 2, 2), (6, 12, 3, 3), (6, 6, 3, 3), (12, 6, 1, 1)],
        [(16, 12, 3, 3), (16, 16, 3, 3)],  # two convolutions have no inner one
    ]
    half = build(widths=[8], depth=3, inner=[4], width=0.5)
    assert [conv.weight.shape[0] for conv in half.groups[0].convs] == [4, 2, 4]


# ---- trained parameters and initialisation


@pytest.mark.parametrize("whiten_bias", [True, False])
def test_only_whitening_weights_and_norm_scales_are_frozen(whiten_bias: bool) -> None:
    net = build(**TINY, whiten_bias=whiten_bias)
    for norm in (norm for group in net.groups for norm in group.norms):  # the values of airbench
        assert (norm.eps, norm.momentum) == (1e-12, 0.4)
        assert torch.equal(norm.weight, torch.ones_like(norm.weight)) and not norm.bias.any()
    net(random_images()).square().sum().backward()
    norms = {f"groups.{group}.norms.{place}.weight" for group in (0, 1) for place in (0, 1)}
    frozen = {"whiten.weight", *norms} | (set() if whiten_bias else {"whiten.bias"})
    for name, parameter in net.named_parameters():
        assert parameter.grad is None if name in frozen else parameter.grad.abs().sum() > 0, name


def test_convolutions_start_as_the_identity_on_their_common_channels() -> None:
    for conv in (conv for group in build(widths=[40, 60]).groups for conv in group.convs):
        same = min(conv.in_channels, conv.out_channels)
        maps = random_images(5, conv.in_channels)
        torch.testing.assert_close(conv(maps)[:, :same], maps[:, :same])
        others = conv.weight[same:].detach()
        if len(others):  # torch's default: uniform within ±1/√fan_in
            bound = (9 * conv.in_channels) ** -0.5
            assert others.abs().max() <= bound and float(others.std()) == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize("channels", [3, 1])
def test_initialise_sets_the_whitening_filters_and_a_flag_in_the_state_dict(channels: int) -> None:
    net, other = (build(channels=channels, **TINY).to(memory_format=torch.channels_last) for _ in "12")
    images = random_images(channels=channels)
    net.initialise(images)
    assert torch.equal(net.whiten.weight, whitening_filters(images, 2))
    assert net.whiten.weight.is_contiguous(memory_format=torch.channels_last) and not net.whiten.weight.requires_grad
    assert torch.equal(net.whiten.bias, torch.zeros(8 * channels))
    assert net.whitened and not other.whitened
    other.load_state_dict(net.state_dict())
    assert other.whitened


# ---- the filters


def pictures(count: int = 6, channels: int = 3) -> Tensor:
    """Return images with correlated neighbouring pixels and channels, like photographs, and a non-zero mean."""
    random = torch.Generator().manual_seed(0)
    grey, colour = (torch.rand(count, depth, 9, 11, generator=random) for depth in (1, channels))
    mixed = grey + 0.3 * colour
    return mixed + 0.5 * mixed.roll(1, 3) + 0.25 * mixed.roll(1, 2) - 0.4


@pytest.mark.parametrize(("channels", "patch"), [(3, 2), (1, 3)])
def test_the_filters_match_a_float64_reference_up_to_sign(channels: int, patch: int) -> None:
    assert EPS == 5e-4  # the values of airbench
    images, size = pictures(channels=channels), channels * patch**2
    windows = np.lib.stride_tricks.sliding_window_view(images.double().numpy(), (patch, patch), axis=(2, 3))
    patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, size)
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    expected = (vectors / np.sqrt(values + EPS)).T[::-1]
    filters = whitening_filters(images, patch)
    assert (filters.shape, filters.dtype) == ((2 * size, channels, patch, patch), torch.float32)
    rows = filters[:size].reshape(size, -1).double().numpy()
    signs = np.sign((rows * expected).sum(1, keepdims=True))
    np.testing.assert_allclose(rows, signs * expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert torch.equal(filters[size:], -filters[:size])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whitening_filters(images, patch), filters)


def test_the_filters_depend_neither_on_blocks_nor_on_the_order_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(count=7)
    at_once = whitening_filters(images, 2)
    torch.testing.assert_close(whitening_filters(images.flip(0), 2), at_once, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(whitened, "BLOCK_NUMBERS", 2 * 12 * 8 * 10)  # patches of two images
    torch.testing.assert_close(whitening_filters(images, 2), at_once, rtol=1e-6, atol=1e-6)


# ---- precision


def test_under_autocast_the_first_and_last_layer_stay_in_float32() -> None:
    net = build(**TINY)
    dtypes: dict[str, torch.dtype] = {}
    for name in ("whiten", "groups", "head"):
        module = net.get_submodule(name)
        module.register_forward_hook(lambda _module, _inputs, output, name=name: dtypes.update({name: output.dtype}))
    net.groups.register_forward_pre_hook(lambda _module, inputs: dtypes.update({"activated": inputs[0].dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        assert net(random_images()).dtype == net(random_images().bfloat16()).dtype == torch.float32
    in_bfloat16 = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert in_bfloat16 == {"activated", "groups"} and dtypes["whiten"] == dtypes["head"] == torch.float32
    assert net.double()(random_images()).dtype == torch.float64


# ---- options


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"widhts": [8]}, "of whitened has no 'widhts'. Did you mean widths? It has widths, depth, residual"),
        ({"depth": [2, 2]}, "depth needs one entry per group, as widths: 3"),
        ({"activation": "glu"}, "activation must be one of gelu, silu, not 'glu'. Did you mean gelu?"),
    ],
)
def test_invalid_options_are_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        build(32, **options)
