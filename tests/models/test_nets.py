import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cifar_lit import plugins
from cifar_lit.errors import Failure, UsageError
from cifar_lit.models.registry import NETS, NetSpec, build_net, build_on_meta_device, net_names, takes_any_size


def logits(net: nn.Module, channels: int, height: int, width: int) -> Tensor:
    with torch.no_grad():
        return net.eval()(torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0)))


def convolved(*shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of weights, each with that of its bias."""
    return [shape for weight in shapes for shape in (weight, weight[:1])]


CONVOLUTION = [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
TUDUI = convolved((32, 3, 5, 5), (32, 32, 5, 5), (64, 32, 5, 5), (64, 1024), (10, 64))


LENET = [*CONVOLUTION * 2, nn.Flatten, *[nn.Linear, nn.ReLU] * 2, nn.Linear]
FASHION_CNN = convolved((6, 1, 5, 5), (12, 6, 5, 5), (120, 192), (60, 120), (10, 60))


@pytest.mark.parametrize(
    ("name", "image", "classes", "layers", "shapes"),
    [
        ("tudui", (3, 32), 10, [*[nn.Conv2d, nn.MaxPool2d] * 3, nn.Flatten, *[nn.Linear] * 2], TUDUI),
        ("sjnet", (3, 32), 10, [*[nn.Conv2d, nn.MaxPool2d] * 3, nn.Flatten, *[nn.Linear] * 2], TUDUI),
        ("lenet", (3, 32), 10, LENET, convolved((6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84))),
        ("fashion_cnn", (1, 28), 10, LENET, FASHION_CNN),
        ("signs_mlp", (3, 64), 6, [nn.Flatten, *[nn.Linear, nn.ReLU] * 2, nn.Linear], convolved((25, 12288), (16, 25), (6, 16))),
    ],
)
def test_a_tutorials_net_has_its_layers_and_parameters_and_nothing_else(
    name: str, image: tuple[int, int], classes: int, layers: list[type], shapes: list[tuple[int, ...]]
) -> None:
    net = build_net(name, channels=image[0], image_size=image[1], num_classes=classes)
    assert [type(layer) for layer in net] == layers
    assert [tuple(parameter.shape) for parameter in net.parameters()] == shapes and not list(net.buffers())


def test_shapenet_stays_under_a_hundred_thousand_parameters() -> None:
    net = build_net("shapenet", channels=3, image_size=32, num_classes=10)
    assert sum(parameter.numel() for parameter in net.parameters()) == 98_970


def weightless(name: str, channels: int = 3, image_size: int = 32) -> Any:
    return build_on_meta_device(name, channels=channels, image_size=image_size, num_classes=10)


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
    spec = NETS[name].min_size
    least = spec if isinstance(spec, int) else spec()
    assert logits(build_net(name, channels=3, image_size=least, num_classes=5), 3, least, least).shape == (2, 5)
    if least > 1:
        for size in ((least - 1, 40), (40, least - 1)):
            text = f"{name} cannot take {size[0]}×{size[1]} images; the least size is {least}×{least}"
            with pytest.raises(UsageError, match=text):
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
def test_memory_format_does_not_change_the_logits_nor_the_meta_device_the_shapes(name: str) -> None:
    net = build_net(name, channels=3, image_size=32, num_classes=10).eval()
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = net(images)
        last = net.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)
    without_memory = weightless(name)
    assert without_memory(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    assert all(parameter.is_meta for parameter in without_memory.parameters())


def test_the_list_of_names_starts_with_ours_and_names_each_net_once() -> None:
    names = net_names()
    assert names[: len(NETS)] == list(NETS)
    assert {"resnet18", "vit_b_16", "convnext_tiny"} < set(names)
    assert len(set(names)) == len(names)
    assert not any("rcnn" in name or "deeplab" in name or "quantized" in name for name in names)


@pytest.mark.parametrize(("typed", "meant"), [("lennet", "lenet"), ("TuDui", "tudui"), ("resnet.18", "resnet18")])
def test_an_unknown_name_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    for use in (takes_any_size, lambda name: build_net(name, channels=3, image_size=32, num_classes=10)):
        with pytest.raises(UsageError, match=rf"no net named '{typed}'. Did you mean {meant}\?"):
            use(typed)


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
    net, images = weightless(name, image_size=224).eval(), torch.empty(2, 3, 160, 160, device="meta")
    if any_size:
        assert net(images).shape == (2, 10)
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            net(images)


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("lenet", {"channels": 0}, "at least 1 channel"),
        ("lenet", {"num_classes": 0}, "at least 1 channel, 1 class"),
        ("lenet", {"image_size": 0}, "and 0×0 pixels"),
        ("lenet", {"image_size": (32, -1)}, "and 32×-1 pixels"),
        ("lenet", {"width": 0.0}, "must be above 0, not 0.0"),
        ("lenet", {"width": float("nan")}, "must be above 0, not nan"),
        ("mobilenet_v2", {"width": 0.5}, "mobilenet_v2 has a width of its own"),
        ("lenet", {"options": {"depth": 3}}, "lenet has no options: leave model.net_options out, not 'depth'"),
        ("resnet18", {"options": {"depth": 3}}, "resnet18 has no options: leave model.net_options out, not 'depth'"),
        ("alexnet", {}, "alexnet cannot take 32×32 images; the least size is 63×63"),
        ("squeezenet1_1", {"image_size": 8}, "squeezenet1_1 cannot take 8×8 images; the least size is 17×17"),
        ("vit_b_16", {"image_size": (32, 48)}, "multiple of 16, not 32×48"),
        ("vit_b_16", {"image_size": 28}, "multiple of 16, not 28×28"),
        ("maxvit_t", {}, "multiples of 224, not 32×32"),
    ],
)
def test_settings_that_a_net_cannot_be_built_with_are_refused(name: str, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        build_net(name, **{"channels": 3, "image_size": 32, "num_classes": 10, **wrong})


def test_resnets_have_the_stem_for_small_images_and_else_the_published_parameters() -> None:
    for name in ("resnet18", "resnet34", "resnet50"):
        net = weightless(name)
        assert net.conv1.weight.shape == (64, 3, 3, 3)
        assert (net.conv1.stride, net.conv1.padding, net.conv1.bias) == ((1, 1), (1, 1), None)
        assert isinstance(net.maxpool, nn.Identity)  # the first stage sees 32×32 pixels; with the published stem, 8×8
    published = 11_689_512  # of resnet18, by torchvision's documentation: 7×7 stem, 1,000 classes
    count = sum(parameter.numel() for parameter in weightless("resnet18").parameters())
    assert count == published - 64 * 3 * (49 - 9) - 513 * (1000 - 10)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "googlenet"])
def test_torchvision_nets_train_on_grey_images_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = build_net(name, channels=1, image_size=32, num_classes=7)
    assert net.training and not any(parameter.is_meta for parameter in net.parameters())
    net(torch.rand(2, 1, 32, 32)).logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_new_first_convolution_is_drawn_with_the_spread_of_the_old_one() -> None:
    torch.manual_seed(0)
    colour = build_net("mobilenet_v2", channels=3, image_size=32, num_classes=10)
    grey = build_net("mobilenet_v2", channels=1, image_size=32, num_classes=10)
    first, replaced = (next(net.parameters()).detach() for net in (colour, grey))
    assert replaced.shape == (32, 1, 3, 3)
    assert float(replaced.std()) == pytest.approx(float(first.std()), rel=0.2)


def test_vits_are_made_for_the_images_size() -> None:
    vit = weightless("vit_b_16", channels=1, image_size=32)
    assert vit.encoder.pos_embedding.shape == (1, 4 + 1, 768)


def test_building_a_net_of_ours_does_not_load_torchvision() -> None:
    program = (
        "import sys; from cifar_lit.models.registry import build_net; "
        "build_net('tudui', channels=3, image_size=32, num_classes=10); sys.exit('torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---- nets of one's own


OWN_NETS = """
from torch import nn
from cifar_lit.models.registry import NetSpec

class Own(nn.Sequential):
    def __init__(self, channels, image_size, num_classes, width=1.0, depth=1):
        super().__init__(nn.Flatten(), nn.Linear(channels * image_size[0] * image_size[1], num_classes))
        self.depth = depth

class NoWidth(nn.Module):
    def __init__(self, channels, image_size, num_classes):
        super().__init__()

def anything(**settings):
    return settings

spec = NetSpec(Own, min_size=9, any_size=True)
"""


@pytest.fixture
def own_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_nets.py").write_text(OWN_NETS)
    (tmp_path / "my_broken_nets.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    names = ["my_own_nets.Own", "my_own_nets.NoWidth", "my_own_nets.anything", "my_own_nets.spec", "my_own_nets.Ohn"]
    monkeypatch.setattr(plugins, "_allowed", {*names, "my_broken_nets.Net", "no_nets_here.Net"})


def test_a_net_of_ones_own_is_a_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETS, "mine", NetSpec(lambda **settings: nn.Flatten(), min_size=4))
    assert "mine" in net_names() and not takes_any_size("mine")
    assert isinstance(build_net("mine", channels=3, image_size=4, num_classes=2), nn.Flatten)


@pytest.mark.usefixtures("own_nets")
def test_a_net_in_ones_own_file_is_named_by_its_import_path() -> None:
    net = build_net("my_own_nets.Own", channels=1, image_size=(8, 9), num_classes=3, options={"depth": 2})
    assert net.depth == 2 and logits(net, 1, 8, 9).shape == (2, 3)
    assert not takes_any_size("my_own_nets.Own") and takes_any_size("my_own_nets.spec")
    assert "" not in sys.path and str(Path.cwd()) not in sys.path


@pytest.mark.usefixtures("own_nets")
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("my_own_nets.Own", {"dept": 2}, "model.net_options of my_own_nets.Own has no 'dept'. Did you mean depth?"),
        ("my_own_nets.spec", {}, "my_own_nets.spec cannot take 8×8 images; the least size is 9×9."),
        ("my_own_nets.NoWidth", {}, "my_own_nets.NoWidth cannot be built with channels, image_size, num_classes, width: "),
        ("my_own_nets.anything", {"any": 1}, "my_own_nets.anything must return a torch.nn.Module, not a dict"),
        ("my_own_nets.Ohn", {}, "my_own_nets has no 'Ohn'. Did you mean Own?"),
        ("no_nets_here.Net", {}, "no_nets_here.Net: there is no module 'no_nets_here' here or on PYTHONPATH"),
        ("os.system", {}, "os.system would run code of its module: type it on the command line, or add --trust"),
        ("my_broken_nets.Net", {}, "my_broken_nets cannot be imported: ModuleNotFoundError: No module named 'no_such_package"),
    ],
)
def test_a_net_of_ones_own_that_cannot_be_had_is_refused_in_one_line(name: str, options: dict[str, int], text: str) -> None:
    with pytest.raises((UsageError, Failure)) as refusal:
        build_net(name, channels=1, image_size=8, num_classes=3, options=options)
    assert str(refusal.value).startswith(text) and "\n" not in str(refusal.value)
