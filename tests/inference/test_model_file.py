"""`model.safetensors`: content, reproducible bytes, and invalid files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import cifar_lit
from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.inference.model_file import (
    FORMAT,
    ModelCard,
    load_model_file,
    read_card,
    save_weights,
)
from cifar_lit.models.registry import NETS, build_net

CARD = ModelCard("lenet", 1.0, [3, 20, 24], ["cat", "dog", "œuf"], [0.4, 0.5, 0.6], [0.2, 0.25, 0.3])
CARD_VALUES = asdict(CARD)


def net_of(card: ModelCard) -> torch.nn.Module:
    torch.manual_seed(0)
    net = build_net(card.net, **card.net_settings)
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)  # running statistics of trained norms
    return net.eval()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_weights(tmp_path / "model.safetensors", net_of(CARD).state_dict(), CARD)
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", NETS)
def test_a_loaded_net_gives_the_logits_of_the_saved_net_on_uint8_images(tmp_path: Path, name: str) -> None:
    options = {"widths": [8, 12], "depth": [1, 2], "residual": True} if name == "whitened" else {}
    for channels, width in ((3, 1.0), (1, 0.5)):
        card = ModelCard(name, width, [channels, 20, 24], list("abcd"), [0.4] * channels, [0.25] * channels, options)
        net = net_of(card).to(memory_format=torch.channels_last)
        save_weights(tmp_path / "model.safetensors", net.state_dict(), card)
        loaded = cifar_lit.load(tmp_path).net if (channels, name) == (3, "lenet") else load_model_file(tmp_path)
        images = torch.randint(0, 256, (5, channels, 20, 24), dtype=torch.uint8)
        torch.testing.assert_close(loaded(images), net((images.float() / 255 - 0.4) / 0.25))
        assert (loaded.training, loaded.card, loaded.classes) == (False, card, ("a", "b", "c", "d"))


def test_the_metadata_hold_everything_needed_to_use_the_weights(path: Path) -> None:
    net = net_of(CARD)
    with safe_open(path, framework="pt") as opened:
        assert set(opened.keys()) == {*net.state_dict()}
        assert opened.metadata()["format"] == FORMAT
        assert json.loads(opened.metadata()["card"]) == CARD_VALUES
    loaded = load_model_file(path)
    assert CARD.net_settings["image_size"] == (20, 24)  # height, width
    for images in (torch.zeros(1, 3, 24, 20).byte(), torch.zeros(3, 20, 24).byte(), torch.zeros(1, 3, 20, 24)):
        with pytest.raises(ValueError, match=r"images must be uint8 of \(batch, 3 × 20 × 24\), not torch"):
            loaded(images)


def test_the_same_values_give_the_same_bytes_and_the_usual_file_mode(path: Path) -> None:
    again, plain = path.with_name("again"), path.with_name("plain")
    plain.touch()
    for _ in range(5):  # safetensors orders the metadata differently each time
        save_weights(again, net_of(CARD).state_dict(), CARD)
        assert again.read_bytes() == path.read_bytes()
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # aligned for memory mapping
    assert again.stat().st_mode == plain.stat().st_mode


# ---- damage


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_a_truncated_model_is_refused(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(Failure, match="is damaged, or not a model"):
        load_model_file(path)


def test_a_flipped_bit_in_the_weights_is_noticed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(Failure, match=r"is damaged, .*\(its checksum differs\): copy or train it again"):
        load_model_file(path)


def test_an_error_about_a_checkpoint_names_the_run_to_use_instead(path: Path) -> None:
    checkpoint = path.parent / "checkpoints" / "best.ckpt"
    checkpoint.parent.mkdir()
    torch.save({}, checkpoint)
    with pytest.raises(UsageError, match=f"best.ckpt is a checkpoint: name the finished run {path.parent} instead"):
        load_model_file(checkpoint)


def test_a_file_of_another_program_is_refused(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="holds no 'cifar-lit 1' model"):
        load_model_file(path)
    assert read_card(path) is None
