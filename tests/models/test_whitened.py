import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.errors import UsageError
from cifar_lit.models import whitened
from cifar_lit.models.registry import build_net
from cifar_lit.models.whitened import EPS, whitening_filters

TINY: dict[str, Any] = {"widths": [8, 12]}


def made(size: int = 16, channels: int = 3, classes: int = 5, width: float = 1.0, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_net("whitened", channels=channels, image_size=size, num_classes=classes, width=width, options=options)


def some_images(size: int = 16, channels: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(6, channels, size, size, generator=torch.Generator().manual_seed(seed))


def trained_a_little(net: Any) -> Any:
    """With norms that have seen images and biases that are not zero, in evaluation mode."""
    net.initialise(some_images())
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad and parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5)
        for seed in range(5):
            net.train()(some_images(seed=seed))
    return net.eval()


def test_the_default_net_has_the_layers_of_the_94_record() -> None:
    net = made(size=32, classes=10)
    assert {name: tuple(parameter.shape) for name, parameter in net.named_parameters() if parameter.requires_grad} == {
        "whiten.bias": (24,),
        **{f"groups.0.convs.{place}.weight": (64, inputs, 3, 3) for place, inputs in ((0, 24), (1, 64))},
        **{f"groups.1.convs.{place}.weight": (256, inputs, 3, 3) for place, inputs in ((0, 64), (1, 256))},
        **{f"groups.2.convs.{place}.weight": (256, 256, 3, 3) for place in (0, 1)},
        **{
            f"groups.{group}.norms.{place}.bias": (width,)
            for group, width in ((0, 64), (1, 256), (2, 256))
            for place in (0, 1)
        },
        "head.weight": (10, 256),
    }
    sides = []
    for layer in (net.whiten, *net.groups):
        layer.register_forward_hook(lambda _module, _inputs, output: sides.append(output.shape[2:]))
    assert net(some_images(32)).shape == (6, 10)
    assert [tuple(side) for side in sides] == [(31, 31), (15, 15), (7, 7), (3, 3)]
    assert (net.activation, net.pool, net.logit_scale) == (F.gelu, "max", 1 / 256)


def by_hand(net: Any, images: Tensor, activation: Any, residual: bool, head_pool: str) -> Tensor:
    """The net by its description, layer after layer, from its weights, in evaluation mode."""

    def normed(maps: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        mean, var, bias = (tensor.view(-1, 1, 1) for tensor in (norm.running_mean, norm.running_var, norm.bias))
        return (maps - mean) / (var + 1e-12).sqrt() + bias

    def conv2d(maps: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(maps, weight, padding={1: 0, 2: 0, 3: 1, 5: 2}[weight.shape[-1]])

    maps = activation(F.conv2d(images, net.whiten.weight, net.whiten.bias))
    for group in net.groups:
        maps = F.max_pool2d(conv2d(maps, group.convs[0].weight), 2)
        maps = before = activation(normed(maps, group.norms[0]))
        for conv, norm in list(zip(group.convs, group.norms, strict=True))[1:]:
            maps = normed(conv2d(maps, conv.weight), norm)
            maps = activation(maps + before if residual and conv is group.convs[-1] else maps)
    pooled = maps.amax((2, 3)) if head_pool == "max" else maps.mean((2, 3))
    return pooled @ net.head.weight.T


@pytest.mark.parametrize(
    ("activation", "depth", "residual", "head_pool"),
    [
        ("gelu", 1, False, "max"),
        ("relu", 2, True, "max"),
        ("silu", 3, True, "avg"),
        ("gelu", [3, 1], True, "avg"),
        ("silu", [[3, 1, 1], [2, 5]], True, "max"),
    ],
)
def test_the_net_computes_what_its_description_says(
    activation: str, depth: int | list[Any], residual: bool, head_pool: str
) -> None:
    net = made(**TINY, activation=activation, depth=depth, residual=residual, head_pool=head_pool, logit_scale=0.25)
    net, images = trained_a_little(net), some_images(seed=9)
    with torch.no_grad():
        expected = 0.25 * by_hand(net, images, getattr(F, activation), residual, head_pool)
        torch.testing.assert_close(net(images), expected, rtol=1e-4, atol=1e-5)


def test_a_group_can_be_narrower_inside_with_kernels_of_its_own() -> None:
    net = made(widths=[8, 12, 16], depth=[[3, 1, 1], [2, 3, 3, 1], 2], inner=[4, 6, 7], residual=True)
    shapes = [[tuple(conv.weight.shape) for conv in group.convs] for group in net.groups]
    assert shapes == [
        [(8, 24, 3, 3), (4, 8, 1, 1), (8, 4, 1, 1)],
        [(12, 8, 2, 2), (6, 12, 3, 3), (6, 6, 3, 3), (12, 6, 1, 1)],
        [(16, 12, 3, 3), (16, 16, 3, 3)],  # nothing lies between two
    ]
    assert [conv.weight.shape[0] for conv in made(widths=[8], depth=3, inner=[4], width=0.5).groups[0].convs] == [
        4,
        2,
        4,
    ]


@pytest.mark.parametrize(("channels", "further"), [(3, 1), (1, 3), (4, 0)])
def test_channels_of_zeros_change_neither_logits_nor_gradients(channels: int, further: int) -> None:
    outcomes = []
    for padded in (False, True):
        net = made(**TINY, channels=channels, pad_input=padded).double()
        logits = net(some_images(channels=channels).double())
        logits.square().sum().backward()
        outcomes.append(
            (logits.detach(), [parameter.grad for parameter in net.parameters() if parameter.requires_grad])
        )
    torch.testing.assert_close(*outcomes)
    assert net.zero_channels == further


@pytest.mark.parametrize(("patch", "stride", "first"), [(3, 1, 32), (4, 2, 16), (4, 4, 8)])
def test_the_first_layer_starts_at_the_resolution_of_its_stride(patch: int, stride: int, first: int) -> None:
    net = made(size=32, widths=[8], patch=patch, stride=stride)
    net.initialise(some_images(32))
    assert net.whiten(some_images(32)).shape == (6, 6 * patch**2, first, first)


@pytest.mark.parametrize(
    ("options", "least"),
    [({}, 9), ({"widths": [8] * 3, "patch": 4, "stride": 2}, 16), ({"widths": [8, 8], "depth": [1, [2, 3]]}, 7)],
)
def test_the_least_size_follows_from_the_options(options: dict[str, Any], least: int) -> None:
    assert made(size=least, **options)(some_images(least)).shape == (6, 5)
    with pytest.raises(
        UsageError, match=rf"cannot take {least - 1}×{least - 1} images; the smallest size is {least}×{least}"
    ):
        made(size=least - 1, **options)


# ---- what is trained, and how it starts


@pytest.mark.parametrize("whiten_bias", [True, False])
def test_whitening_weights_and_norm_scales_are_frozen_and_all_else_is_trained(whiten_bias: bool) -> None:
    net = made(**TINY, norm_momentum=0.443, whiten_bias=whiten_bias)
    for norm in (norm for group in net.groups for norm in group.norms):  # as in the records
        assert (norm.eps, norm.momentum) == (1e-12, 0.443)
        assert torch.equal(norm.weight, torch.ones_like(norm.weight)) and not norm.bias.any()
    net(some_images()).square().sum().backward()
    norms = {f"groups.{group}.norms.{place}.weight" for group in (0, 1) for place in (0, 1)}
    frozen = {"whiten.weight", *norms} | (set() if whiten_bias else {"whiten.bias"})
    for name, parameter in net.named_parameters():
        assert parameter.grad is None if name in frozen else parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("widths", [[40, 60], [8, 4]])
def test_convolutions_start_as_the_identity_on_as_many_channels_as_they_have(widths: list[int]) -> None:
    for conv in (conv for group in made(widths=widths).groups for conv in group.convs):
        same = min(conv.in_channels, conv.out_channels)
        maps = some_images(5, conv.in_channels)
        torch.testing.assert_close(conv(maps)[:, :same], maps[:, :same])
        rest = conv.weight[same:].detach()
        if len(rest):  # torch's own: uniform up to the root of one over the inputs of a filter
            bound = (9 * conv.in_channels) ** -0.5
            assert rest.abs().max() <= bound and float(rest.std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_the_logit_scale_decides_how_the_head_starts() -> None:
    scaled, plain = made(widths=[8, 64]).eval(), made(widths=[8, 64], logit_scale=1.0).eval()
    assert float(scaled.head.weight.detach().std()) == pytest.approx(1, rel=1e-5)
    assert float(plain.head.weight.detach().std()) == pytest.approx(
        (3 * 64) ** -0.5, rel=0.1
    )  # as torch's linear layers
    plain.load_state_dict(scaled.state_dict())
    torch.testing.assert_close(scaled(some_images()), plain(some_images()) / 64)


@pytest.mark.parametrize(("channels", "patch"), [(3, 2), (1, 3)])
def test_initialise_puts_the_whitening_filters_in_and_the_state_dict_says_so(channels: int, patch: int) -> None:
    net, other = (made(channels=channels, patch=patch, **TINY).to(memory_format=torch.channels_last) for _ in range(2))
    images = some_images(channels=channels)
    net.initialise(images)
    assert torch.equal(net.whiten.weight, whitening_filters(images, patch))
    assert net.whiten.weight.is_contiguous(memory_format=torch.channels_last) and not net.whiten.weight.requires_grad
    assert torch.equal(net.whiten.bias, torch.zeros(2 * channels * patch**2))
    assert net.whitened and not other.whitened
    other.load_state_dict(net.state_dict())
    assert other.whitened


# ---- the filters


def pictures(count: int = 6, channels: int = 3) -> Tensor:
    """Images whose neighbouring pixels and channels go together, as photographs' do, with a mean that is not zero."""
    random = torch.Generator().manual_seed(0)
    grey, colour = (torch.rand(count, depth, 9, 11, generator=random) for depth in (1, channels))
    mixed = grey + 0.3 * colour
    return mixed + 0.5 * mixed.roll(1, 3) + 0.25 * mixed.roll(1, 2) - 0.4


@pytest.mark.parametrize(("channels", "patch", "eps"), [(3, 2, EPS), (1, 2, 0.1), (3, 3, 0.1), (2, 1, EPS)])
def test_the_filters_are_those_of_a_float64_reference_up_to_their_signs(channels: int, patch: int, eps: float) -> None:
    assert EPS == 5e-4  # airbench's
    images, size = pictures(channels=channels), channels * patch**2
    windows = np.lib.stride_tricks.sliding_window_view(images.double().numpy(), (patch, patch), axis=(2, 3))
    patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, size)
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    expected = (vectors / np.sqrt(values + eps)).T[::-1]
    filters = whitening_filters(images, patch, eps)
    assert (filters.shape, filters.dtype) == ((2 * size, channels, patch, patch), torch.float32)
    rows = filters[:size].reshape(size, -1).double().numpy()
    signs = np.sign((rows * expected).sum(1, keepdims=True))
    np.testing.assert_allclose(rows, signs * expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert torch.equal(filters[size:], -filters[:size])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whitening_filters(images, patch, eps), filters)


def test_sums_by_blocks_and_in_any_order_are_those_of_all_images_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(count=7)
    at_once = whitening_filters(images, 2)
    torch.testing.assert_close(whitening_filters(images.flip(0), 2), at_once, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(whitened, "BLOCK_NUMBERS", 2 * 12 * 8 * 10)  # two images' patches
    torch.testing.assert_close(whitening_filters(images, 2), at_once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("patch", [2, 3])
def test_the_first_component_of_every_filter_of_the_first_half_is_positive_unless_it_is_zero(patch: int) -> None:
    images = (
        pictures()
    )  # mirror images make eigenvectors that are odd or even, with components of equal size and of zero
    images = torch.cat((images, images.flip(3), images.flip(2), images.flip((2, 3))))
    for values in whitening_filters(images, patch)[: 3 * patch**2].flatten(1):
        assert values[values.abs() > 1e-3 * values.abs().max()][0] > 0


# ---- precision


def test_under_autocast_both_ends_keep_float32_and_the_middle_is_bfloat16() -> None:
    net = made(**TINY)
    kinds: dict[str, torch.dtype] = {}
    for name in ("whiten", "groups", "head"):
        net.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: kinds.update({name: output.dtype})
        )
    net.groups.register_forward_pre_hook(lambda _module, inputs: kinds.update({"activated": inputs[0].dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        assert net(some_images()).dtype == net(some_images().bfloat16()).dtype == torch.float32
    assert kinds == {
        "whiten": torch.float32,
        "activated": torch.bfloat16,
        "groups": torch.bfloat16,
        "head": torch.float32,
    }
    assert net.double()(some_images()).dtype == torch.float64


# ---- options


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"widhts": [8]},
            "model.net_options of whitened has no 'widhts'. Did you mean widths? It has widths, depth, residual",
        ),
        ({"widths": []}, "widths must be a list of positive integers, one per group, not []"),
        ({"depth": 0}, "depth must be an integer from 1 to 100, or a list of 3, one per group, not 0"),
        ({"depth": [2, [3, 2], 2]}, "kernel sides from 1 to 7 pixels, all odd except the first, not [2, [3, 2], 2]"),
        ({"depth": [2, [3, "1"], 2]}, "depth must be made of kernel sides"),
        ({"inner": [8, 8]}, "inner must be null, or a list of positive integers, one per group, not [8, 8]"),
        ({"residual": "yes"}, "residual must be true or false, not 'yes'"),
        (
            {"residual": True, "depth": 1},
            "residual needs two convolutions in a group: set depth above 1",
        ),
        ({"patch": 2.5}, "patch must be a positive integer, not 2.5"),
        ({"stride": 3}, "stride must be from 1 to 2 (patch) pixels, not 3"),
        ({"activation": "glu"}, "activation must be one of gelu, silu, relu, not 'glu'. Did you mean gelu?"),
        ({"head_pool": "mean"}, "head_pool must be one of max, avg, not 'mean'"),
        ({"logit_scale": float("nan")}, "logit_scale must be a number above 0, or null, not nan"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)) as refused:
        made(32, **options)
    assert str(refused.value).startswith("model.net_options") and "\n" not in str(refused.value)
