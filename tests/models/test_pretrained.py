"""timm's nets by name, and how pretraining prepared images."""

from __future__ import annotations

import pytest
import torch

from cifar_lit.errors import Failure, UsageError
from cifar_lit.models.pretrained import preprocessing
from cifar_lit.models.registry import build_net, net_spec
from cifar_lit.models.state import with_versions
from cifar_lit.training.finetune import PACKAGED_NET, load_pretrained

pytest.importorskip("timm")


def test_timms_nets_are_built_for_any_classes_channels_and_sizes() -> None:
    for channels, size in ((3, (32, 48)), (1, (64, 64))):
        net = build_net("timm/resnet10t", channels=channels, image_size=size, num_classes=7)
        assert net(torch.zeros(2, channels, *size)).shape == (2, 7)
    assert net_spec("timm/resnet10t").any_size and not net_spec("timm/vit_tiny_patch16_224").any_size
    vit = build_net("timm/vit_tiny_patch16_224", channels=3, image_size=32, num_classes=3)
    assert vit(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_small_images_are_scaled_within_the_net() -> None:
    torch.manual_seed(0)
    images, seen = torch.rand(2, 3, 16, 24), []
    net = build_net("timm/resnet10t", channels=3, image_size=(16, 24), num_classes=2, options={"side": 64}).eval()
    net.conv1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))  # type: ignore[union-attr]
    net(images)
    assert seen == [(2, 3, 64, 96)]
    with pytest.raises(UsageError, match=r"model\.net_options\.side must be 16 … 2048 pixels, not 8"):
        build_net("timm/resnet10t", channels=3, image_size=16, num_classes=2, options={"side": 8})


def test_unknown_names_and_sizes_are_answered_with_the_nearest_right_one() -> None:
    for name, line in (
        ("timm/resnet_10t", "timm has no net named 'resnet_10t'. Did you mean timm/resnet10t?"),
        ("timm/resnet18.nobody", "timm has no weights named 'resnet18.nobody': there are resnet18.a1_in1k"),
    ):
        with pytest.raises(UsageError) as error:
            build_net(name, channels=3, image_size=32, num_classes=2)
        assert str(error.value).startswith(line)
    with pytest.raises(UsageError, match="leave width at 1"):
        build_net("timm/resnet10t", channels=3, image_size=32, num_classes=2, width=2.0)
    with pytest.raises(UsageError, match=r"has no .sides.\. Did you mean side"):
        build_net("timm/resnet10t", channels=3, image_size=32, num_classes=2, options={"sides": 64})
    with pytest.raises(UsageError, match="timm/inception_v3 cannot take 32×32 images: try 299"):
        build_net("timm/inception_v3", channels=3, image_size=32, num_classes=2)


def test_preprocessing_is_that_of_the_pretraining() -> None:
    imagenet = [0.485, 0.456, 0.406]
    for name, mean, size in (
        (PACKAGED_NET, [0.5] * 3, (256, 256)),
        ("timm/resnet18.a1_in1k", imagenet, (224, 224)),  # of 236, and multiples of 32 are taken
        ("resnet18", imagenet, (256, 256)),
        ("timm/vit_tiny_patch16_224", [0.5] * 3, (224, 224)),
        ("vit_b_16", imagenet, (224, 224)),
        ("googlenet", [0.5] * 3, (256, 256)),  # from TensorFlow
    ):
        known = preprocessing(name)
        assert known is not None and known.image_size == size and known.mean == pytest.approx(mean, abs=0.02)
    assert preprocessing("shapenet") is None and preprocessing("my_nets.Net") is None


def test_nets_that_ask_for_the_version_of_a_state_take_tensors_from_a_file() -> None:
    net = build_net("mnasnet0_5", channels=3, image_size=32, num_classes=3)
    other = build_net("mnasnet0_5", channels=3, image_size=32, num_classes=3)
    other.load_state_dict(with_versions(other, {name: tensor.clone() for name, tensor in net.state_dict().items()}))
    assert torch.equal(other.state_dict()["classifier.1.weight"], net.state_dict()["classifier.1.weight"])
    with pytest.raises(ValueError):  # which is why
        other.load_state_dict(dict(net.state_dict()))


def test_the_packaged_weights_need_no_network_and_know_their_classes() -> None:
    net = build_net(PACKAGED_NET, channels=3, image_size=64, num_classes=1000)
    before = net.get_parameter("conv_stem.weight").clone()
    load_pretrained(net, PACKAGED_NET, "imagenet")
    assert not torch.equal(before, net.get_parameter("conv_stem.weight"))
    # a yellow disc on blue is taken for something round or yellow by a net that has learned, for anything by one that has not
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, 224), torch.linspace(-1, 1, 224), indexing="ij")
    disc = (xs**2 + ys**2 < 0.4).float()
    image = torch.stack((disc, disc * 0.9, 1 - disc))[None]
    with torch.no_grad():
        assert float(net.eval()((image - 0.5) / 0.5).softmax(1).max()) > 0.05


def test_weights_that_no_network_brings_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    net = build_net("timm/resnet10t", channels=3, image_size=32, num_classes=2)
    with pytest.raises(
        Failure, match=r"weights of timm/resnet10t cannot be loaded .*--model\.weights FILE, or use timm/tf_eff"
    ):
        load_pretrained(net, "timm/resnet10t", "imagenet")
