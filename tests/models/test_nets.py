import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import squeezenet1_1

from cifar_lit import ImageClassifier, ImageData
from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.text import note_once
from cifar_lit.base.trust import trusting
from cifar_lit.inference.model_file import ModelCard, build_loaded_net
from cifar_lit.models.registry import NETS, build_net, check_shapes


def logits(net: nn.Module, channels: int, height: int, width: int) -> Tensor:
    with torch.no_grad():
        return net.eval()(torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0)))


def build(name: Any, image_size: Any = 32, channels: int = 3, num_classes: int = 10, **settings: Any) -> Any:
    return build_net(name, channels=channels, image_size=image_size, num_classes=num_classes, **settings)


def on_meta_device(name: str, channels: int = 3, image_size: int = 32, **settings: Any) -> Any:
    with torch.device("meta"):
        return build(name, image_size, channels, **settings)


DEPTH = {"options": {"depth": 3}}


@pytest.mark.parametrize(
    ("name", "options", "parameters", "products"),
    [
        ("tudui", {}, 145_578, None),
        ("sjnet", {}, 145_578, None),
        ("lenet", {}, 62_006, None),
        ("shapenet", {}, 98_970, None),
        ("resnet18", {}, 11_173_962, 555_422_720),
    ],
)
def test_a_net_has_the_parameters_and_products_of_its_tutorial_or_paper(
    name: str, options: dict[str, Any], parameters: int, products: int | None
) -> None:
    net = on_meta_device(name, options=options)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    if products:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.eval()(torch.empty(1, 3, 32, 32, device="meta"))
        assert counter.get_total_flops() == 2 * products


@pytest.mark.parametrize("name", sorted(NETS))
def test_built_in_nets_accept_any_channels_classes_and_sizes_above_their_minimum(name: str) -> None:
    for channels, size, classes in ((1, (16, 16), 2), (4, (64, 33), 100)):
        result = logits(build(name, size, channels, classes), channels, *size)
        assert result.shape == (2, classes) and result.isfinite().all()


@pytest.mark.parametrize(
    ("name", "side"), [("tudui", 7), ("lenet", 15), ("shapenet", 7), ("whitened", 8), ("alexnet", 32)]
)
def test_images_that_are_too_small_for_a_net_are_refused(name: str, side: int) -> None:
    line = f"{name} cannot take images of 3×{side}×40 .* Choose another --net, or larger images"
    with pytest.raises(UsageError, match=line):
        ImageClassifier(name, input_shape=[3, side, 40], num_classes=10)


@pytest.mark.parametrize("name", sorted(NETS))
def test_built_in_nets_work_with_channels_last_and_meta_tensors(name: str) -> None:
    net = build(name)
    expected = logits(net, 3, 32, 32)
    result = logits(net.to(memory_format=torch.channels_last), 3, 32, 32)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    meta_net = on_meta_device(name)
    assert meta_net(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    assert all(parameter.is_meta for parameter in meta_net.parameters())


@pytest.mark.parametrize("name", sorted(NETS.keys() - {"whitened"}))  # its patches fix the first width
def test_width_scales_only_the_hidden_layers(name: str) -> None:
    def outputs(width: float) -> list[int]:
        return [layer.weight.shape[0] for layer in build(name, width=width) if isinstance(layer, nn.Conv2d | nn.Linear)]

    plain = outputs(1.0)
    assert outputs(0.001) == [1] * (len(plain) - 1) + [10]
    assert outputs(1.5) == [round(1.5 * units) for units in plain[:-1]] + [10]


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("mobilenet_v2", {"width": 0.5}, "mobilenet_v2 takes no width: leave model.width at 1"),
        ("lenet", DEPTH, "net_options of lenet has no 'depth'. It has none: leave model.net_options out"),
    ],
)
def test_invalid_settings_of_a_net_are_refused(name: str, wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        build(name, **wrong)


# ---- torchvision


def test_resnets_have_a_small_stem_for_small_images_and_otherwise_the_published_layers() -> None:
    for name in ("resnet18", "resnet34", "resnet50"):
        net = on_meta_device(name)
        assert net.conv1.weight.shape == (64, 3, 3, 3)
        assert (net.conv1.stride, net.conv1.padding, net.conv1.bias) == ((1, 1), (1, 1), None)
        assert isinstance(net.maxpool, nn.Identity)  # 32×32 pixels reach the first stage, not 8×8
    photos = on_meta_device("resnet18", image_size=128)  # fits the published weights
    assert photos.conv1.weight.shape == (64, 3, 7, 7) and not isinstance(photos.maxpool, nn.Identity)


def test_torchvision_nets_train_on_grey_images_without_a_warning() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_meta_device("googlenet", channels=1)
        net, colour = build("mobilenet_v3_small", channels=1), build("mobilenet_v3_small")
    first, original = next(net.parameters()), next(colour.parameters())
    assert first.shape == (16, 1, 3, 3)
    assert float(first.detach().std()) == pytest.approx(float(original.detach().std()), rel=0.2)
    assert net.training
    net(torch.rand(2, 1, 32, 32)).logsumexp(1).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


# ---- custom nets


CUSTOM_NETS = """
from torch import nn
from cifar_lit import ImageClassifier, ImageData
from cifar_lit.base.text import note_once
from cifar_lit.base.trust import trusting
from cifar_lit.inference.model_file import ModelCard, build_loaded_net

class Own(nn.Sequential):
    def __init__(self, channels, image_size, num_classes, width=1.0, depth=1):
        super().__init__(nn.Flatten(), nn.Linear(channels * image_size[0] * image_size[1], num_classes))
        self.depth = depth

class Tutorial(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))

    def forward(self, images):
        return self.layers(images)

def anything(**settings):
    return settings

class Convolutions(nn.Module):
    def __init__(self, num_classes, width: int = 16):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 8, 3, stride=2)
        self.head = nn.Linear(8 * 49, num_classes)

    def forward(self, images):
        return self.head(self.second(self.first(images)).view(-1, 8 * 49))

class Softmax(Convolutions):
    def forward(self, images):
        return super().forward(images).softmax(1)

class Pair(Convolutions):
    def forward(self, images):
        return super().forward(images), images

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(10, 10)]
"""
NO_PACKAGE = "no_such_package_at_all"


@pytest.fixture
def custom_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_nets.py").write_text(CUSTOM_NETS)
    (tmp_path / "my_broken_nets.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("custom_nets")
def test_a_custom_net_can_be_registered_or_named_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETS, "mine", lambda **settings: nn.Flatten())
    assert isinstance(build("mine", 4), nn.Flatten)
    monkeypatch.setitem(NETS, "plain", lambda channels, num_classes: nn.Conv2d(channels, num_classes, 1))
    assert build("plain", 4, 3, 5).out_channels == 5
    net = build("my_own_nets.Own", (8, 9), 1, 3, options={"depth": 2})
    assert net.depth == 2 and logits(net, 1, 8, 9).shape == (2, 3)


@pytest.mark.usefixtures("custom_nets")
def test_a_net_gets_only_the_arguments_that_it_accepts() -> None:
    assert logits(build("my_own_nets.Tutorial", 8, 3, 10), 3, 8, 8).shape == (2, 10)
    with pytest.raises(UsageError, match=r"my_own_nets\.Tutorial takes no width: leave model\.width at 1"):
        build("my_own_nets.Tutorial", 8, 3, 10, width=2.0)
    linear = partial(nn.Linear, 3 * 8 * 8, 4)
    assert build(linear).out_features == 4


@pytest.mark.usefixtures("custom_nets")
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("my_own_nets.Own", {"dept": 2}, "model.net_options of my_own_nets.Own has no 'dept'. Did you mean depth?"),
        ("my_own_nets.anything", {"any": 1}, "my_own_nets.anything must return a torch.nn.modules.module.Module"),
        ("my_own_nets.Ohn", {}, "my_own_nets has no 'Ohn'. Did you mean Own?"),
        ("no_nets_here.Net", {}, "no_nets_here.Net: there is no module 'no_nets_here' here or on PYTHONPATH"),
        ("my_broken_nets.Net", {}, f"my_broken_nets.Net: there is no module '{NO_PACKAGE}'"),
    ],
)
def test_a_custom_net_that_cannot_be_built_is_refused(name: Any, options: dict[str, int], text: str) -> None:
    with pytest.raises((UsageError, Failure)) as refusal:
        build(name, 8, options=options)
    assert str(refusal.value).startswith(text) and "\n" not in str(refusal.value)


@pytest.mark.usefixtures("custom_nets")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_net_that_views_its_maps_trains_and_predicts(precision: str, tmp_path: Path) -> None:
    """It gets contiguous images and weights, by name and as an object, and from a file; not ours and torchvision's."""
    data = ImageData("shapes", images={"count": 60, "image_size": 16})
    for net in ("my_own_nets.Convolutions", build("my_own_nets.Convolutions", 16)):
        model = ImageClassifier(net)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", precision=precision, **quiet)
        trainer.fit(model, data)
        trainer.test(model, data, verbose=False)
        assert model.net.second.weight.is_contiguous()
    card = ModelCard("my_own_nets.Convolutions", 1.0, [3, 16, 16], list("abcdefghij"), [0.5] * 3, [0.25] * 3)
    with trusting(True):
        net = build_loaded_net(card, model.net.state_dict()).on("cpu")
    uint8 = data.test_images.images[:8].permute(0, 3, 1, 2)
    logits = model.float().eval()((uint8 / 255 - 0.5) / 0.25)
    torch.testing.assert_close(net.logits(uint8), logits.detach(), atol=1e-4, rtol=1e-4)
    registered = ImageClassifier("lenet", num_classes=10).net
    theirs = ImageClassifier(squeezenet1_1(num_classes=10), num_classes=10).net
    assert not registered[3].weight.is_contiguous() and not theirs.features[0].weight.is_contiguous()


@pytest.mark.usefixtures("custom_nets")
def test_what_a_net_returns_is_checked_once_and_without_false_alarms(capsys: pytest.CaptureFixture[str]) -> None:
    for name, line in (("Pair", "returns a tuple: return the logits"), ("Layers", "has no parameters to train")):
        with pytest.raises(UsageError, match=line):
            ImageClassifier(f"my_own_nets.{name}", num_classes=10, input_shape=[3, 16, 16])
    note_once.cache_clear()
    for name in ("Softmax", "Softmax", "Convolutions"):
        ImageClassifier(f"my_own_nets.{name}", num_classes=10, input_shape=[3, 16, 16])
    flat = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    nn.init.constant_(flat[1].bias, 0.5)
    nn.init.zeros_(flat[1].weight[:, :6])
    check_shapes(flat, "my.flat", (3, 2, 2), 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("my_own_nets.Softmax returns probabilities: remove the softmax")


class RandomNet(nn.Linear):
    """A net that uses random numbers even in evaluation mode."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1) + torch.rand(()))


def test_check_shapes_changes_neither_the_net_nor_the_random_state() -> None:
    net, before = nn.Sequential(nn.BatchNorm2d(3), RandomNet(12, 2)), torch.get_rng_state()
    net[0].eval()
    state = copy.deepcopy(net.state_dict())
    check_shapes(net, "random", (3, 2, 2), 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert net.training and not net[0].training
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
