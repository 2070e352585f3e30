import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import NETS, build_net, net_names, takes_any_size


def shapes_of(net: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in net.parameters()]


def logits(net: nn.Module, channels: int, height: int, width: int) -> Tensor:
    with torch.no_grad():
        return net.eval()(torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", ["tudui", "sjnet"])
def test_tudui_has_the_tutorials_parameters_and_nothing_else(name: str) -> None:
    net = build_net(name, channels=3, image_size=32, num_classes=10)
    assert shapes_of(net) == [
        *[(32, 3, 5, 5), (32,), (32, 32, 5, 5), (32,), (64, 32, 5, 5), (64,)],
        *[(64, 1024), (64,), (10, 64), (10,)],
    ]
    # 3·32·25+32, 32·32·25+32, 32·64·25+64, 1024·64+64, 64·10+10
    assert sum(parameter.numel() for parameter in net.parameters()) == 2432 + 25632 + 51264 + 65600 + 650 == 145_578
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Conv2d, nn.MaxPool2d] * 3 + [nn.Flatten, nn.Linear, nn.Linear]
    assert not list(net.buffers())


def test_lenet_has_the_tutorials_parameters() -> None:
    net = build_net("lenet", channels=3, image_size=32, num_classes=10)
    assert shapes_of(net) == [
        *[(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,)],
        *[(120, 400), (120,), (84, 120), (84,), (10, 84), (10,)],
    ]
    assert sum(parameter.numel() for parameter in net.parameters()) == 456 + 2416 + 48120 + 10164 + 850 == 62_006


def test_fashion_cnn_has_the_tutorials_parameters() -> None:
    net = build_net("fashion_cnn", channels=1, image_size=28, num_classes=10)
    assert shapes_of(net) == [
        *[(6, 1, 5, 5), (6,), (12, 6, 5, 5), (12,)],
        *[(120, 192), (120,), (60, 120), (60,), (10, 60), (10,)],
    ]
    assert sum(parameter.numel() for parameter in net.parameters()) == 156 + 1812 + 23160 + 7260 + 610 == 32_998


@pytest.mark.parametrize(("name", "channels", "size"), [("lenet", 3, 32), ("fashion_cnn", 1, 28)])
def test_the_lenets_rectify_after_every_layer_but_the_last(name: str, channels: int, size: int) -> None:
    net = build_net(name, channels=channels, image_size=size, num_classes=10)
    convolution = [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    assert [type(layer) for layer in net] == [*convolution, *convolution, nn.Flatten, *[nn.Linear, nn.ReLU] * 2, nn.Linear]


def test_signs_mlp_has_the_tutorials_parameters() -> None:
    net = build_net("signs_mlp", channels=3, image_size=64, num_classes=6)
    assert shapes_of(net) == [(25, 12288), (25,), (16, 25), (16,), (6, 16), (6,)]
    assert sum(parameter.numel() for parameter in net.parameters()) == 307_225 + 416 + 102 == 307_743
    assert [type(layer) for layer in net] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]


def test_shapenet_stays_under_a_hundred_thousand_parameters() -> None:
    net = build_net("shapenet", channels=3, image_size=32, num_classes=10)
    convolved = 9 * (3 * 16 + 16 * 32 + 32 * 64 + 64 * 128)
    normalised = 2 * (16 + 32 + 64 + 128)
    assert sum(parameter.numel() for parameter in net.parameters()) == convolved + normalised + 1290 == 98_970


@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, (16, 16), 2), (3, (28, 45), 7), (4, (64, 33), 100)])
def test_nets_of_ours_take_any_channels_size_and_classes(name: str, channels: int, size: tuple[int, int], classes: int) -> None:
    net = build_net(name, channels=channels, image_size=size, num_classes=classes)
    result = logits(net, channels, *size)
    assert result.shape == (2, classes)
    assert result.isfinite().all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", sorted(NETS))
def test_each_least_size_is_the_least_that_works(name: str) -> None:
    least = NETS[name].min_size
    least = least if isinstance(least, int) else least()
    assert logits(build_net(name, channels=3, image_size=least, num_classes=5), 3, least, least).shape == (2, 5)
    if least > 1:
        for size in ((least - 1, 40), (40, least - 1)):
            told = f"{name} cannot take {size[0]}×{size[1]} images; the least size is {least}×{least}"
            with pytest.raises(UsageError, match=told):
                build_net(name, channels=3, image_size=size, num_classes=5)
            unchecked = NETS[name].build(channels=3, image_size=size, num_classes=5, width=1.0)
            with pytest.raises(RuntimeError):
                logits(unchecked, 3, *size)


@pytest.mark.parametrize("name", sorted(NETS.keys() - {"whitened"}))  # its first layer is as wide as its patches
def test_width_multiplies_the_hidden_widths_only(name: str) -> None:
    def outputs(width: float) -> list[int]:
        net = build_net(name, channels=3, image_size=32, num_classes=10, width=width)
        return [layer.weight.shape[0] for layer in net if isinstance(layer, nn.Conv2d | nn.Linear)]

    plain = outputs(1.0)
    assert outputs(2.0) == [2 * units for units in plain[:-1]] + [10]
    assert outputs(0.001) == [1] * (len(plain) - 1) + [10]
    assert outputs(1.5) == [round(1.5 * units) for units in plain[:-1]] + [10]


@pytest.mark.parametrize("name", sorted(NETS))
def test_memory_format_does_not_change_the_logits(name: str) -> None:
    net = build_net(name, channels=3, image_size=32, num_classes=10).eval()
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = net(images)
        last = net.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


def test_nets_can_be_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        for name in NETS:
            net = build_net(name, channels=3, image_size=32, num_classes=10)
            assert net(torch.empty(2, 3, 32, 32)).shape == (2, 10)


def test_the_list_of_names_starts_with_ours_and_names_each_net_once() -> None:
    names = net_names()
    assert names[: len(NETS)] == list(NETS)
    assert {"resnet18", "vit_b_16", "convnext_tiny"} < set(names)
    assert len(set(names)) == len(names)
    assert not any("rcnn" in name or "deeplab" in name or "quantized" in name for name in names)


@pytest.mark.parametrize(("typed", "meant"), [("lennet", "lenet"), ("TuDui", "tudui"), ("resnet-18", "resnet18")])
def test_an_unknown_name_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"no net named '{typed}'. Did you mean {meant}\?"):
        build_net(typed, channels=3, image_size=32, num_classes=10)


@pytest.mark.parametrize("name", ["lenet", "shapenet", "resnet18"])
def test_options_are_refused_for_a_net_that_has_none(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} has no options: leave model.net_options out, not 'depth'"):
        build_net(name, channels=3, image_size=32, num_classes=10, options={"depth": 3})


@pytest.mark.parametrize("name", sorted(NETS))
def test_a_net_takes_other_sizes_than_it_was_built_for_exactly_where_the_table_says_so(name: str) -> None:
    net = build_net(name, channels=3, image_size=32, num_classes=10)
    if takes_any_size(name):
        for size in ((24, 24), (28, 28), (48, 33)):
            assert logits(net, 3, *size).shape == (2, 10)
    else:
        with pytest.raises(RuntimeError):
            logits(net, 3, 24, 24)


@pytest.mark.parametrize(("name", "any_size"), [("resnet18", True), ("swin_t", True), ("vit_b_16", False), ("maxvit_t", False)])
def test_torchvisions_nets_take_any_size_but_for_those_with_windows_or_positions(name: str, any_size: bool) -> None:
    assert takes_any_size(name) is any_size
    with torch.device("meta"):
        net = build_net(name, channels=3, image_size=224, num_classes=10).eval()
        images = torch.empty(2, 3, 160, 160)
        if any_size:
            assert net(images).shape == (2, 10)
        else:
            with pytest.raises((AssertionError, RuntimeError)):
                net(images)


def test_whether_an_unknown_net_takes_any_size_is_not_guessed() -> None:
    with pytest.raises(UsageError, match=r"Did you mean resnet18\?"):
        takes_any_size("resnet-18")


@pytest.mark.parametrize(
    "wrong",
    [{"channels": 0}, {"num_classes": 0}, {"image_size": 0}, {"image_size": (32, -1)}, {"width": 0.0}, {"width": float("nan")}],
)
def test_numbers_that_cannot_be_meant_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        build_net("lenet", **{"channels": 3, "image_size": 32, "num_classes": 10, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnets_have_the_stem_for_small_images(name: str) -> None:
    net = build_net(name, channels=3, image_size=32, num_classes=10)
    assert net.conv1.weight.shape == (64, 3, 3, 3)
    assert (net.conv1.stride, net.conv1.padding, net.conv1.bias) == ((1, 1), (1, 1), None)
    sides = []
    net.layer1.register_forward_hook(lambda _module, _inputs, output: sides.append(tuple(output.shape[2:])))
    assert logits(net, 3, 32, 32).shape == (2, 10)
    assert sides == [(32, 32)]  # with the published stem it would be 8×8


def test_resnet18_has_the_published_parameters_but_for_stem_and_head() -> None:
    net = build_net("resnet18", channels=3, image_size=32, num_classes=10)
    published = 11_689_512  # torchvision's documentation: 7×7 stem, 1,000 classes
    count = sum(parameter.numel() for parameter in net.parameters())
    assert count == published - 64 * 3 * (49 - 9) - 513 * (1000 - 10)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "squeezenet1_1", "densenet121", "googlenet", "resnet18", "swin_t"])
def test_torchvision_nets_train_on_grey_images_without_a_warning(name: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = build_net(name, channels=1, image_size=32, num_classes=7)
    assert net.training
    assert not any(parameter.is_meta for parameter in net.parameters())
    output = net(torch.rand(2, 1, 32, 32))
    assert output.shape == (2, 7)
    output.logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_new_first_convolution_is_drawn_with_the_spread_of_the_old_one() -> None:
    torch.manual_seed(0)
    colour = build_net("mobilenet_v2", channels=3, image_size=32, num_classes=10)
    grey = build_net("mobilenet_v2", channels=1, image_size=32, num_classes=10)
    first, replaced = (next(net.parameters()).detach() for net in (colour, grey))
    assert replaced.shape == (32, 1, 3, 3)
    assert float(replaced.std()) == pytest.approx(float(first.std()), rel=0.2)


@pytest.mark.parametrize(
    ("name", "size", "remedy"),
    [
        ("alexnet", 32, "alexnet cannot take 32×32 images; the least size is 63×63"),
        ("squeezenet1_1", 8, "squeezenet1_1 cannot take 8×8 images; the least size is 17×17"),
        ("vit_b_16", (32, 48), "multiple of 16, not 32×48"),
        ("vit_b_16", 28, "multiple of 16, not 28×28"),
        ("maxvit_t", 32, "multiples of 224, not 32×32"),
    ],
)
def test_a_size_that_a_torchvision_net_cannot_take_is_refused_at_once(
    name: str, size: int | tuple[int, int], remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy):
        build_net(name, channels=3, image_size=size, num_classes=10)


def test_the_least_size_named_for_a_torchvision_net_works() -> None:
    assert logits(build_net("squeezenet1_1", channels=3, image_size=17, num_classes=10), 3, 17, 17).shape == (2, 10)


def test_vits_are_made_for_the_images_size() -> None:
    net = build_net("vit_b_16", channels=1, image_size=32, num_classes=3)
    assert net.encoder.pos_embedding.shape == (1, 4 + 1, 768)
    assert logits(net, 1, 32, 32).shape == (2, 3)


def test_width_is_refused_for_a_torchvision_net() -> None:
    with pytest.raises(UsageError, match="mobilenet_v2 has a width of its own"):
        build_net("mobilenet_v2", channels=3, image_size=32, num_classes=10, width=0.5)


def test_building_a_net_of_ours_does_not_load_torchvision() -> None:
    program = (
        "import sys; from cifar_lit.models.registry import build_net; "
        "build_net('tudui', channels=3, image_size=32, num_classes=10); sys.exit('torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
