import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import cifar_lit
from cifar_lit.errors import Failure, UsageError
from cifar_lit.models.registry import NETS, build_net
from cifar_lit.runs.model_file import FORMAT, ModelCard, load_model_file, save_weights

CARD = ModelCard("lenet", 1.0, [3, 20, 24], ["cat", "dog", "œuf"], [0.4, 0.5, 0.6], [0.2, 0.25, 0.3])


def written(folder: Path, card: ModelCard = CARD) -> tuple[Path, torch.nn.Module]:
    """A model file of a fresh net, and that net."""
    channels, height, width = card.input_shape
    torch.manual_seed(0)
    net = build_net(
        card.net,
        channels=channels,
        image_size=(height, width),
        num_classes=len(card.classes),
        width=card.width,
        options=card.options,
    )
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)  # as if the norms had seen images
    save_weights(folder / "model.safetensors", net.state_dict(), card)
    return folder / "model.safetensors", net.eval()


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("channels", "width"), [(3, 1.0), (1, 0.5)])
def test_a_loaded_net_gives_the_logits_of_the_saved_one_on_plain_images(
    tmp_path: Path, name: str, channels: int, width: float
) -> None:
    card = ModelCard(name, width, [channels, 20, 24], list("abcd"), [0.4] * channels, [0.25] * channels)
    path, net = written(tmp_path, card)
    loaded = load_model_file(path)
    images = torch.randint(0, 256, (5, channels, 20, 24), dtype=torch.uint8)
    assert torch.equal(loaded(images), net((images.float() / 255 - 0.4) / 0.25))
    assert torch.equal(loaded.net(torch.ones(1, channels, 20, 24)), net(torch.ones(1, channels, 20, 24)))
    assert not loaded.training
    assert loaded.card == card
    assert loaded.classes == ("a", "b", "c", "d")


def test_weights_in_channels_last_memory_are_saved_like_others(tmp_path: Path) -> None:
    path, net = written(tmp_path)
    before = load_model_file(path).state_dict()
    save_weights(path, net.to(memory_format=torch.channels_last).state_dict(), CARD)
    after = load_model_file(path).state_dict()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name])
        assert tensor.is_contiguous()


def test_the_metadata_hold_all_that_a_use_of_the_weights_needs(tmp_path: Path) -> None:
    path, net = written(tmp_path)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        assert set(opened.keys()) == set(net.state_dict())
    assert metadata["format"] == FORMAT
    assert json.loads(metadata["card"]) == {
        "net": "lenet",
        "width": 1.0,
        "input_shape": [3, 20, 24],
        "classes": ["cat", "dog", "œuf"],
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.25, 0.3],
        "options": {},
        "novelty": {},
    }


def test_a_nets_options_are_saved_with_its_weights(tmp_path: Path) -> None:
    options = {"widths": [8, 12], "depth": [1, 2], "residual": True, "patch": 3, "activation": "silu", "logit_scale": 0.125}
    card = replace(CARD, net="whitened", options=options)
    path, net = written(tmp_path, card)
    loaded = load_model_file(path)
    assert loaded.card == card
    assert len(list(loaded.net.parameters())) == len(list(net.parameters()))
    images = torch.rand(2, 3, 20, 24)
    assert torch.equal(loaded.net(images), net(images))


def test_a_file_of_before_nets_had_options_still_loads(tmp_path: Path) -> None:
    path, net = written(tmp_path)
    card = asdict(CARD)
    del card["options"]
    save_file(net.state_dict(), path, metadata={"format": FORMAT, "card": json.dumps(card)})
    assert load_model_file(path).card == CARD


def test_a_run_folder_stands_for_its_model(tmp_path: Path) -> None:
    written(tmp_path)
    assert cifar_lit.load(tmp_path).card == CARD
    assert cifar_lit.load(str(tmp_path)).card == CARD


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (1, 3, 20, 24)),
        (torch.uint8, (3, 20, 24)),
        (torch.uint8, (1, 20, 24, 3)),
        (torch.uint8, (1, 1, 20, 24)),
    ],
)
def test_images_of_another_kind_are_refused(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    loaded = load_model_file(written(tmp_path)[0])
    images = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"images must be uint8 of \(batch, 3 × 20 × 24\), not torch"):
        loaded(images)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no .*model\.safetensors"):
        load_model_file(tmp_path)
    with pytest.raises(UsageError, match=r"there is no .*typo"):
        load_model_file(tmp_path / "typo")


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_model_that_is_cut_short_is_refused(tmp_path: Path, kept: float) -> None:
    path, _ = written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(Failure, match="is damaged") as failed:
        load_model_file(path)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("place", [-1, -1000, -20_000])
def test_a_model_with_one_flipped_bit_among_its_weights_is_refused(tmp_path: Path, place: int) -> None:
    path, _ = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(Failure, match=r"is damaged or false \(it is not as it was written: its checksum differs\): copy or"):
        load_model_file(path)


def test_a_model_of_before_there_were_checksums_still_loads(tmp_path: Path) -> None:
    path, net = written(tmp_path)
    save_file(net.state_dict(), path, metadata={"format": FORMAT, "card": json.dumps(asdict(CARD))})
    assert load_model_file(path).card == CARD


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[3] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(Failure, match="is damaged"):
        load_model_file(path)


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        (None, "holds no 'cifar-lit 1' model"),
        ({"format": "pt"}, "holds no 'cifar-lit 1' model"),
        ({"format": FORMAT}, "does not say how to build"),
        ({"format": FORMAT, "card": "{"}, "does not say how to build"),
        ({"format": FORMAT, "card": '{"net": "lenet"}'}, "does not say how to build"),
        ({"format": FORMAT, "card": json.dumps(asdict(CARD))}, "are not those of the net lenet"),
    ],
)
def test_a_file_of_another_program_is_refused(tmp_path: Path, metadata: Mapping[str, str] | None, line: str) -> None:
    file = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(2)}, file, metadata=dict(metadata) if metadata else None)
    with pytest.raises(Failure, match=line) as failed:
        load_model_file(file)
    assert "\n" not in str(failed.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_full_disk_leaves_the_old_model_and_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, net = written(tmp_path)
    before = path.read_bytes()

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        with Path("/dev/full").open("wb") as device:
            device.write(b"x" * 100_000)

    monkeypatch.setattr("cifar_lit.runs.model_file.save_file", full)
    with pytest.raises(Failure, match=r"cannot write .*No space left on device.*Free some space"):
        save_weights(path, net.state_dict(), CARD)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_is_used_without_lightning_torchmetrics_or_the_command_line(tmp_path: Path) -> None:
    written(tmp_path)
    code = (
        "import sys, torch, cifar_lit\n"
        f"net = cifar_lit.load({str(tmp_path)!r})\n"
        "print(tuple(net(torch.zeros(2, 3, 20, 24, dtype=torch.uint8)).shape))\n"
        "heavy = ('lightning', 'pytorch_lightning', 'torchmetrics', 'torchvision', 'jsonargparse', 'tensorboard', 'rich')\n"
        "print(sorted(set(heavy) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "(2, 3)\n[]\n", done.stderr
