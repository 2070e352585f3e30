"""Pretrained weights: containers and prefixes of other programs, other classes, channels and sizes, invalid files."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_runs import same, weights
from torch import nn

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.training.pretrained_weights import load_pretrained


def shapenet(**settings: Any) -> nn.Module:
    return build_net("shapenet", **{"channels": 3, "image_size": 16, "num_classes": 10, **settings})


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return a file of weights of a net for ten classes of colour images."""
    save_file(shapenet().state_dict(), tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


def test_pretrained_weights_are_loaded_except_a_head_for_other_classes(file: str, tmp_path: Path) -> None:
    pretrained, fresh = shapenet(), shapenet(num_classes=4)
    load_pretrained(pretrained, "shapenet", file)
    head = weights(fresh[-1])
    load_pretrained(fresh, "shapenet", file)
    assert same(weights(fresh[:-1]), weights(pretrained[:-1])) and same(weights(fresh[-1]), head)


def test_rows_of_the_head_are_kept_for_classes_of_the_same_name(file: str) -> None:
    pretrained, fresh = shapenet(), shapenet()
    load_pretrained(pretrained, "shapenet", file)
    initial = weights(fresh[-1])
    load_pretrained(fresh, "shapenet", file, "abcdefghij", "jbxadefghi")
    for name, loaded in weights(pretrained[-1]).items():
        expected = loaded[[9, 1, 0, 0, 3, 4, 5, 6, 7, 8]]
        expected[2] = initial[name][2]  # x is new
        assert torch.equal(weights(fresh[-1])[name], expected)


@pytest.mark.parametrize(
    ("containers", "prefix"),
    [
        ([], "_orig_mod."),
        (["model", "state_dict"], "module._orig_mod."),
        (["model_state_dict"], ""),
    ],
)
def test_weights_are_found_in_containers_and_under_prefixes(containers: list[str], prefix: str, tmp_path: Path) -> None:
    first, other = shapenet(), shapenet()
    contents: dict[str, Any] = {f"old.{name}": torch.zeros(3) for name in list(first.state_dict())[:2]}
    contents |= {f"{prefix}{name}": value for name, value in first.state_dict().items()}
    contents["queue"] = torch.zeros(3)
    for name in reversed(containers):
        average = {f"{prefix}{key}": torch.zeros_like(value) for key, value in first.state_dict().items()}
        contents = {"epoch": 3, "args": Namespace(lr=0.1, layers=[1, {"a": None}]), "ema": average, name: contents}
    torch.save(contents, tmp_path / "a.pth")
    load_pretrained(other, "shapenet", str(tmp_path / "a.pth"))
    assert same(weights(other), weights(first))


def test_a_namespace_of_other_objects_is_not_loaded(tmp_path: Path) -> None:
    torch.save({"state_dict": shapenet().state_dict(), "args": Namespace(path=Path("a"))}, tmp_path / "a.pth")
    with pytest.raises(
        Failure, match=r"would execute code\. Use .* as torch\.save\(net\.state_dict\(\), FILE\) writes"
    ):
        load_pretrained(shapenet(), "shapenet", str(tmp_path / "a.pth"))


def test_first_layers_for_another_image_size_are_named_with_the_remedy(tmp_path: Path) -> None:
    small, large = (build_net("resnet18", channels=3, image_size=side, num_classes=2) for side in (32, 128))
    torch.save(small.state_dict(), tmp_path / "a.pth")
    with pytest.raises(UsageError, match=r"resnet18 has other first layers for images of at most 64 pixels; timm/resn"):
        load_pretrained(large, "resnet18", str(tmp_path / "a.pth"))


def test_grey_images_give_the_logits_of_the_same_images_in_colour(file: str) -> None:
    colour, grey, images = shapenet(), shapenet(channels=1), torch.rand(2, 1, 16, 16)
    load_pretrained(colour, "shapenet", file)
    load_pretrained(grey, "shapenet", file)
    with torch.no_grad():
        torch.testing.assert_close(grey.eval()(images), colour.eval()(images.expand(-1, 3, -1, -1)))


def test_invalid_weights_are_refused(file: str, tmp_path: Path) -> None:
    damaged, code, notes = tmp_path / "cut.safetensors", tmp_path / "code.pth", tmp_path / "notes.pth"
    damaged.write_bytes(Path(file).read_bytes()[:-9])
    code.write_bytes(pickle.dumps(print))
    torch.save({"notes": "none"}, notes)
    for path, error, line in (
        ("absent.pth", UsageError, "there are no weights absent.pth"),
        (str(damaged), Failure, "is damaged"),
        (str(code), Failure, "would execute code|damaged"),
        (str(notes), Failure, "holds no weights"),
    ):
        with pytest.raises(error, match=line):
            load_pretrained(shapenet(), "shapenet", path)
    with pytest.raises(UsageError, match=r"does not hold weights of shapenet: .* name their net with --net"):
        load_pretrained(shapenet(width=2.0), "shapenet", file)
    with pytest.raises(Failure, match="the weights of shapenet cannot be loaded"):
        load_pretrained(shapenet(), "shapenet", "imagenet")
