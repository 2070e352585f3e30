import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import NETS, build_net
from cifar_lit.models.whitened import whitening_filters

TINY: dict[str, Any] = {"widths": [8, 12]}


def made(size: int = 16, channels: int = 3, classes: int = 5, width: float = 1.0, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_net("whitened", channels=channels, image_size=size, num_classes=classes, width=width, options=options)


def some_images(size: int = 16, channels: int = 3, count: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


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


# ---- layout


def test_the_default_net_has_the_layers_of_the_94_record() -> None:
    net = made(size=32, classes=10)
    assert {name: tuple(parameter.shape) for name, parameter in net.named_parameters() if parameter.requires_grad} == {
        "whiten.bias": (24,),
        **{f"groups.0.convs.{place}.weight": (64, inputs, 3, 3) for place, inputs in ((0, 24), (1, 64))},
        **{f"groups.1.convs.{place}.weight": (256, inputs, 3, 3) for place, inputs in ((0, 64), (1, 256))},
        **{f"groups.2.convs.{place}.weight": (256, 256, 3, 3) for place in (0, 1)},
        **{f"groups.{group}.norms.{place}.bias": (width,) for group, width in ((0, 64), (1, 256), (2, 256)) for place in (0, 1)},
        "head.weight": (10, 256),
    }
    sides = []
    for layer in (net.whiten, *net.groups):
        layer.register_forward_hook(lambda _module, _inputs, output: sides.append(output.shape[2:]))
    assert net(some_images(32)).shape == (6, 10)
    assert [tuple(side) for side in sides] == [(31, 31), (15, 15), (7, 7), (3, 3)]


def by_hand(net: Any, images: Tensor, activation: Any, residual: bool, head_pool: str) -> Tensor:
    """The net by its description, layer after layer, from its weights, in evaluation mode."""
    maps = activation(F.conv2d(images, net.whiten.weight, net.whiten.bias))
    for group in net.groups:
        maps = F.max_pool2d(F.conv2d(maps, group.convs[0].weight, padding=1), 2)
        inner = list(zip(group.convs, group.norms, strict=True))

        def normed(maps: Tensor, norm: nn.BatchNorm2d) -> Tensor:
            mean, var, bias = (tensor.view(-1, 1, 1) for tensor in (norm.running_mean, norm.running_var, norm.bias))
            return (maps - mean) / (var + 1e-12).sqrt() + bias

        maps = before = activation(normed(maps, inner[0][1]))
        for conv, norm in inner[1:]:
            maps = normed(F.conv2d(maps, conv.weight, padding=1), norm)
            if residual and conv is inner[-1][0]:
                maps = maps + before
            maps = activation(maps)
    pooled = maps.amax((2, 3)) if head_pool == "max" else maps.mean((2, 3))
    return pooled @ net.head.weight.T


@pytest.mark.parametrize(
    ("activation", "function", "depth", "residual", "head_pool"),
    [
        ("gelu", F.gelu, 1, False, "max"),
        ("silu", F.silu, 2, False, "avg"),
        ("relu", F.relu, 2, True, "max"),
        ("silu", F.silu, 3, True, "max"),
        ("gelu", F.gelu, [3, 1], True, "avg"),
    ],
)
def test_the_net_computes_what_its_description_says(
    activation: str, function: Any, depth: int | list[int], residual: bool, head_pool: str
) -> None:
    net = made(**TINY, activation=activation, depth=depth, residual=residual, head_pool=head_pool, logit_scale=0.25)
    net = trained_a_little(net)
    images = some_images(seed=9)
    with torch.no_grad():
        torch.testing.assert_close(net(images), 0.25 * by_hand(net, images, function, residual, head_pool), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("patch", "stride", "first"), [(2, 1, 31), (2, 2, 16), (3, 1, 32), (3, 2, 16), (4, 2, 16), (4, 4, 8), (1, 1, 32)]
)
def test_the_first_layer_starts_at_the_resolution_of_its_stride(patch: int, stride: int, first: int) -> None:
    net = made(size=32, widths=[8], patch=patch, stride=stride)
    net.initialise(some_images(32))
    assert net.whiten(some_images(32)).shape == (6, 6 * patch**2, first, first)
    assert net(some_images(32)).shape == (6, 5)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 9),
        ({"widths": [8]}, 3),
        ({"widths": [8, 8]}, 5),
        ({"widths": [8] * 3, "patch": 4, "stride": 2}, 16),
        ({"widths": [8], "patch": 5}, 5),
    ],
)
def test_the_least_size_follows_from_the_options(options: dict[str, Any], least: int) -> None:
    net = made(size=least, **options)
    net.initialise(some_images(least))
    assert net(some_images(least)).shape == (6, 5)
    with pytest.raises(UsageError, match=rf"cannot take {least - 1}×{least - 1} images; the least size is {least}×{least}"):
        made(size=least - 1, **options)


# ---- what is trained, and how it starts


@pytest.mark.parametrize("whiten_bias", [True, False])
def test_whitening_weights_and_norm_scales_are_frozen_and_all_else_is_trained(whiten_bias: bool) -> None:
    net = made(**TINY, norm_momentum=0.443, whiten_bias=whiten_bias)
    for norm in (norm for group in net.groups for norm in group.norms):  # as in the records
        assert (norm.eps, norm.momentum, norm.track_running_stats) == (1e-12, 0.443, True)
        assert torch.equal(norm.weight, torch.ones_like(norm.weight)) and not norm.bias.any()
    net(some_images()).square().sum().backward()
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    norms = {f"groups.{group}.norms.{place}.weight" for group in (0, 1) for place in (0, 1)}
    assert frozen == {"whiten.weight", *norms} | (set() if whiten_bias else {"whiten.bias"})
    for name, parameter in net.named_parameters():
        assert (parameter.grad is None) == (name in frozen)
        if name not in frozen:
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("widths", [[40, 60], [8, 4]])
def test_convolutions_start_as_the_identity_on_as_many_channels_as_they_have(widths: list[int]) -> None:
    for group in made(widths=widths).groups:
        for conv in group.convs:
            same = min(conv.in_channels, conv.out_channels)
            maps = some_images(5, conv.in_channels)
            torch.testing.assert_close(conv(maps)[:, :same], maps[:, :same])
            rest = conv.weight[same:]
            # torch's own: uniform up to the root of one over the inputs of a filter
            bound = (9 * conv.in_channels) ** -0.5
            if len(rest):
                assert rest.abs().max() <= bound
                assert float(rest.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_the_logit_scale_decides_how_the_head_starts() -> None:
    net = made(widths=[8, 64])
    assert float(net.head.weight.detach().std()) == pytest.approx(1, rel=1e-5)
    scaled, plain = net.eval(), made(widths=[8, 64], logit_scale=1.0)
    assert float(plain.head.weight.detach().abs().max()) <= 64**-0.5  # as torch's linear layers
    assert float(plain.head.weight.detach().std()) == pytest.approx((3 * 64) ** -0.5, rel=0.1)
    plain.eval().load_state_dict(scaled.state_dict())
    torch.testing.assert_close(scaled(some_images()), plain(some_images()) / 64)


# ---- the first layer


@pytest.mark.parametrize(("channels", "patch"), [(3, 2), (1, 3)])
def test_initialise_puts_the_whitening_filters_in_and_says_so(channels: int, patch: int) -> None:
    net = made(channels=channels, patch=patch, **TINY).to(memory_format=torch.channels_last)
    images = some_images(channels=channels)
    assert not net.whitened
    net.initialise(images)
    assert net.whitened
    assert torch.equal(net.whiten.weight, whitening_filters(images, patch))
    assert net.whiten.weight.is_contiguous(memory_format=torch.channels_last)
    assert not net.whiten.weight.requires_grad
    assert torch.equal(net.whiten.bias, torch.zeros(2 * channels * patch**2))


@pytest.mark.parametrize("shape", [(0, 3, 16, 16), (3, 16, 16), (2, 1, 16, 16)])
def test_images_that_cannot_initialise_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images must be \(N, 3, height, width\), not"):
        made(**TINY).initialise(torch.zeros(shape))


def test_a_state_dict_says_whether_the_net_is_whitened() -> None:
    net = trained_a_little(made(**TINY))
    other = made(**TINY).eval()
    other.load_state_dict(net.state_dict())
    assert other.whitened
    assert torch.equal(other(some_images()), net(some_images()))
    other.load_state_dict(made(**TINY).state_dict())
    assert not other.whitened


# ---- precision and memory


def test_under_autocast_both_ends_keep_float32_and_the_middle_is_bfloat16() -> None:
    net = made(**TINY)
    kinds: dict[str, torch.dtype] = {}
    for name in ("whiten", "groups", "head"):
        net.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: kinds.update({name: output.dtype})
        )
    net.groups.register_forward_pre_hook(lambda _module, inputs: kinds.update({"activated": inputs[0].dtype}))
    for dtype in (torch.bfloat16, torch.float64):
        other = made(**TINY).to(dtype)
        other.initialise(some_images())
        assert other.whiten.weight.dtype == other(some_images()).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert net(some_images()).dtype == torch.float32
        assert net(some_images().bfloat16()).dtype == torch.float32
    assert kinds == {"whiten": torch.float32, "activated": torch.bfloat16, "groups": torch.bfloat16, "head": torch.float32}


@pytest.mark.parametrize("training", [True, False])
def test_bfloat16_autocast_changes_statistics_logits_and_gradients_by_rounding_only(training: bool) -> None:
    results = []
    for enabled in (False, True):
        net = trained_a_little(made(**TINY, head_pool="avg", activation="silu")).train(training)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = net(some_images(seed=9))
        F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4, 0])).backward()
        last, norm = net.groups[-1].convs[-1], net.groups[-1].norms[-1]
        results.append(
            (norm.running_mean, norm.running_var, logits.detach(), last.weight.grad, net.groups[0].convs[0].weight.grad)
        )
    # behind a maximum, rounding also changes the pixel that a gradient goes to
    for plain, lowered, limit in zip(*results, (0.005, 0.005, 0.03, 0.03, 0.25), strict=True):
        assert lowered.dtype == torch.float32
        assert float((plain - lowered).norm() / plain.norm()) < limit


# ---- options


def test_no_options_are_all_defaults() -> None:
    defaults = {
        "widths": [64, 256, 256], "depth": 2, "residual": False, "patch": 2, "stride": 1, "activation": "gelu",
        "whiten_bias": True, "head_pool": "max", "norm_momentum": 0.4, "logit_scale": None,
    }  # fmt: skip
    assert set(defaults) == set(NETS["whitened"].options)
    assert repr(made(32)) == repr(made(32, **defaults)) == repr(build_net("whitened", channels=3, image_size=32, num_classes=5))
    assert made(32).logit_scale == made(32, **defaults).logit_scale == 1 / 256


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"widhts": [8]}, "model.net_options of whitened has no 'widhts'. Did you mean widths? It has widths, depth, residual"),
        ({"widths": []}, "widths must be a list of whole numbers above 0, one a group, not []"),
        ({"widths": 64}, "widths must be a list of whole numbers above 0, one a group, not 64"),
        ({"widths": [64, 0]}, "widths must be a list of whole numbers above 0, one a group, not [64, 0]"),
        ({"widths": [64, "128"]}, "widths must be a list"),
        ({"depth": 0}, "depth must be a whole number above 0, or a list of 3, one a group, not 0"),
        ({"depth": [2, 2]}, "depth must be a whole number above 0, or a list of 3, one a group, not [2, 2]"),
        ({"depth": True}, "depth must be a whole number above 0"),
        ({"residual": "yes"}, "residual must be true or false, not 'yes'"),
        ({"residual": True, "depth": 1}, "residual goes around the second convolution and those after: set depth above 1"),
        ({"patch": 0}, "patch must be a whole number of pixels above 0, not 0"),
        ({"patch": 2.5}, "patch must be a whole number of pixels above 0, not 2.5"),
        ({"stride": -1}, "stride must be a whole number of pixels above 0, not -1"),
        ({"stride": 3}, "stride 3 would skip pixels: it can be 2 (patch) at most"),
        ({"activation": "glu"}, "activation must be one of gelu, silu, relu, not 'glu'. Did you mean gelu?"),
        ({"head_pool": "mean"}, "head_pool must be one of max, avg, not 'mean'"),
        ({"norm_momentum": 0}, "norm_momentum must be above 0 and at most 1, not 0"),
        ({"norm_momentum": "fast"}, "norm_momentum must be above 0 and at most 1, not 'fast'"),
        ({"logit_scale": 0.0}, "logit_scale must be a number above 0, or null, not 0.0"),
        ({"logit_scale": float("nan")}, "logit_scale must be a number above 0, or null, not nan"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)) as refused:
        made(32, **options)
    assert str(refused.value).startswith("model.net_options")
    assert "\n" not in str(refused.value)


def test_building_a_narrow_net_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(32, width=0.001)
