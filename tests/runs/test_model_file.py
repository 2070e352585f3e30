"""`model.safetensors`: content, reproducible bytes, and invalid files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import cifar_lit
from cifar_lit.errors import Failure, UsageError
from cifar_lit.models.registry import NETS, build_net
from cifar_lit.plugins import all_imports_allowed
from cifar_lit.runs.model_file import (
    FORMAT,
    MAX_HEADER,
    ModelCard,
    check_card,
    checksum,
    load_model_file,
    read_card,
    save_weights,
)

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


def rewrite_header(path: Path, changes: dict[str, dict[str, Any]]) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    text = json.dumps({name: {**value, **changes.get(name, {})} for name, value in header.items()}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


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


def check_refused(path: Path, reason: str) -> None:
    with pytest.raises(Failure, match=reason) as failed:
        load_model_file(path)
    assert "\n" not in str(failed.value)


def test_a_truncated_model_or_one_with_a_false_header_size_is_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b"")
    check_refused(path, r"cannot be read \(the file is empty\)")
    for length in (5, 100, len(content) // 2, len(content) - 20):
        path.write_bytes(content[:length])
        check_refused(path, "is damaged")
    for size in (len(content) - 7, len(content) + (1 << 40), MAX_HEADER + 1):
        path.write_bytes(size.to_bytes(8, "little") + content[8:])
        if size == MAX_HEADER + 1:
            os.truncate(path, 2 * MAX_HEADER)
        check_refused(path, rf"\(its header claims {size:,} bytes\)")


def test_an_error_about_a_checkpoint_names_the_run_to_use_instead(path: Path) -> None:
    checkpoint = path.parent / "checkpoints" / "best.ckpt"
    checkpoint.parent.mkdir()
    torch.save({}, checkpoint)
    with pytest.raises(UsageError, match=f"best.ckpt is a checkpoint: name {path.parent} instead"):
        load_model_file(checkpoint)
    path.unlink()
    with pytest.raises(UsageError, match=r"best\.ckpt is a checkpoint: name the folder of a finished run instead"):
        load_model_file(checkpoint)
    with pytest.raises(UsageError, match=r"is not a model\.safetensors: name a run folder, or its model\.safetensors"):
        load_model_file(checkpoint.rename(path))


SWAPPED = json.dumps(asdict(replace(CARD, classes=["dog", "cat", "œuf"])))
UNCHECKED = {"sha256": "0" * 64}


@pytest.mark.parametrize("change", [-1, -1000, -20_000, {"card": SWAPPED}, UNCHECKED])
def test_a_flipped_bit_or_a_changed_card_or_checksum_is_refused(path: Path, change: Any) -> None:
    if isinstance(change, dict):
        rewrite_header(path, {"__metadata__": change})
    else:
        content = bytearray(path.read_bytes())
        content[change] ^= 1
        path.write_bytes(content)
    check_refused(path, r"is damaged or invalid \(its checksum differs: the file was changed\): copy or")


def test_a_file_of_an_earlier_version_has_no_levels_and_no_prediction_sets(path: Path) -> None:
    text = json.dumps({name: value for name, value in CARD_VALUES.items() if name not in ("levels", "coverage")})
    rewrite_header(path, {"__metadata__": {"card": text, "sha256": checksum(text, load_file(path))}})
    assert load_model_file(path).card == read_card(path) == CARD


@pytest.mark.parametrize(
    "values",
    [
        {"net": "x" * 301}, {"net": "a\x1b[2J"}, {"width": 0}, {"width": 1001}, {"width": 10**400}, {"mean": [0.5]},
        {"input_shape": [65, 20, 24]}, {"input_shape": [3, 20, 2049]}, {"input_shape": [3, 20]}, {"classes": []},
        {"classes": ["a"] * 100_001}, {"mean": ["0"] * 3}, {"std": [0.1, 0.1, 0]}, {"options": {"a": [[[[1]]]]}},
        {"options": {"a": [0] * 1001}}, {"mean": [0.5, 0.5, float("nan")]}, {"classes": ["a\tb"]},
        {"reject": "x"}, {"reject": [1.0, float("inf")]}, {"reject": [1.0]}, {"reject": [1.0, 2.0]}, {"temperature": 0},
        {"temperature": 21}, {"temperature": "1"}, {"temperature": -1.0},
        {"resize": "stretch"}, {"resize": ["crop"]},
        {"coverage": [0.5]}, {"coverage": {"lac": [[0.5]] * 3}}, {"coverage": {"lac": [0.5] * 3, "aps": [0.5] * 3}},
        {"coverage": {"lac": [["x"]] * 3, "aps": [[0.5]] * 3}}, {"coverage": {"lac": [[0.5]] * 3, "aps": [[0.5]] * 2}},
        {"coverage": {"lac": [[float("nan")]] * 3, "aps": [[0.5]] * 3}},
    ],
)  # fmt: skip
def test_a_card_with_a_value_out_of_range_is_refused_before_training_and_on_loading(
    path: Path, values: dict[str, Any]
) -> None:
    (name,) = values
    rewrite_header(path, {"__metadata__": {"card": json.dumps({**CARD_VALUES, **values})}})
    check_refused(
        path, rf"is damaged or invalid \(its {name} (cannot be|has 1 values for 3 channels|has 2 lists for 3 c)"
    )
    with pytest.raises(UsageError, match=rf"could not be loaded again \(its {name} "):
        check_card(replace(CARD, **values))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"options": {"when": date(2026, 1, 1)}}, "date is not JSON"),
        ({"classes": [f"{n:0>290}" for n in range(20_000)]}, "too long"),
    ],
)
def test_a_net_whose_card_cannot_be_written_is_not_trained(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_card(replace(CARD, **values))
    check_card(replace(CARD, classes=[f"class {number}" for number in range(100_000)]))


def test_tensors_that_are_not_finite_or_do_not_fit_the_net_are_refused(path: Path) -> None:
    weights = net_of(CARD).state_dict()
    for tensors in ({**weights, "other": torch.zeros(1)}, net_of(replace(CARD, width=2.0)).state_dict()):
        save_weights(path, tensors, CARD)
        check_refused(path, "its weights do not fit its net lenet")
    for value in (torch.nan, torch.inf):
        next(iter(weights.values())).view(-1)[0] = value
        save_weights(path, weights, CARD)
        check_refused(path, "its weights are not finite numbers: the training diverged")


@pytest.mark.parametrize(
    ("net", "line"),
    [("timm/resnet18", "needs timm, which is not installed"), ("absent.Net", "there is no module 'absent'")],
)
def test_a_missing_package_is_not_reported_as_a_damaged_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, net: str, line: str
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    save_weights(path, {}, replace(CARD, net=net))
    with all_imports_allowed(True), pytest.raises(UsageError, match=line):
        load_model_file(path)


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        (None, "holds no 'cifar-lit 1' model"),
        ({"format": "pt"}, "holds no 'cifar-lit 1' model"),
        ({"format": FORMAT}, "does not say how to build"),
        ({"format": FORMAT, "card": "{"}, "does not say how to build"),
        ({"format": FORMAT, "card": '{"net": "lenet"}'}, "does not say how to build"),
        ({"format": FORMAT, "card": json.dumps({**CARD_VALUES, "depth": 3})}, "does not say how to build"),
        ({"format": FORMAT, "card": json.dumps(CARD_VALUES)}, "do not fit its net lenet"),
    ],
)
def test_a_file_of_another_program_is_refused(tmp_path: Path, metadata: dict[str, str] | None, line: str) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign", metadata=metadata)
    check_refused(tmp_path / "foreign", line)
