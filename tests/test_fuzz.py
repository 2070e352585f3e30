"""Readers of files that may come from anyone, given bytes that nobody wrote: an answer or one line, and soon.

Bounded to some seconds here; with CIFAR_LIT_FUZZ=20000 each reader is given so many files, new ones each time.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from cifar_lit.cli import flags
from cifar_lit.data.cache import read_index
from cifar_lit.data.decode import decode
from cifar_lit.errors import Failure, UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.model_file import FORMAT, load_model_file
from cifar_lit.runs.run_folder import read_metrics
from cifar_lit.training.checkpoint import describe_net, read_checkpoint

COUNT = int(os.environ.get("CIFAR_LIT_FUZZ", "40"))
fuzzed = settings(
    max_examples=COUNT,
    derandomize=COUNT == 40,
    deadline=2000,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
CARD = {"net": "lenet", "width": 0.5, "input_shape": [1, 16, 16], "classes": ["a", "b"], "mean": [0.5], "std": [0.5]}
NET = build_net("lenet", channels=1, image_size=16, num_classes=2, width=0.5)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def one_line(read: Callable[[], Any]) -> Any:
    """What `read` gives, None where it refuses; fails for any other exception, and for a refusal of several lines."""
    try:
        return read()
    except (Failure, UsageError) as refusal:
        assert "\n" not in str(refusal)
        return None


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with bytes changed, cut out, doubled or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 9))
        match draw(st.sampled_from(["change", "remove", "insert", "double", "cut"])):
            case "change":
                data[place : place + length] = draw(st.binary(min_size=length, max_size=length))
            case "remove":
                del data[place : place + length]
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=9))
            case "double":
                data[place:place] = data[place : place + 100 * length]
            case "cut":
                del data[place:]
    return bytes(data)


def model_file(card: dict[str, Any]) -> bytes:
    return save(NET.state_dict(), {"format": FORMAT, "card": json.dumps(card)})


def checkpoint_file(zipped: bool = True, **values: Any) -> bytes:
    file = io.BytesIO()
    contents = {"state_dict": NET.state_dict(), "epoch": 1, "global_step": 2, "hyper_parameters": {"net": "lenet"}, **values}
    torch.save(contents, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


MODEL, CHECKPOINT = model_file(CARD), checkpoint_file()
HEADER = 8 + struct.unpack("<Q", MODEL[:8])[0]


@given(
    damaged(MODEL)
    | damaged(MODEL[8:HEADER]).map(lambda header: struct.pack("<Q", len(header)) + header + MODEL[HEADER:])
    | st.dictionaries(st.sampled_from([*CARD, "options", "novelty", "more"]), plain, max_size=4).map(
        lambda values: model_file({**CARD, **values})
    )
)
@fuzzed
def test_a_damaged_model_and_one_with_any_card_give_a_net_that_answers_or_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    loaded = one_line(lambda: load_model_file(tmp_path))
    if loaded is not None:
        assert loaded(torch.zeros(1, 1, 16, 16, dtype=torch.uint8)).shape == (1, 2)


def repacked(pickled: bytes) -> bytes:
    """A checkpoint with another pickle, in a whole container."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(CHECKPOINT)) as genuine, zipfile.ZipFile(file, "w") as container:
        for name in genuine.namelist():
            container.writestr(name, pickled if name.endswith("data.pkl") else genuine.read(name))
    return file.getvalue()


PARTS = ["epoch", "global_step", "hyper_parameters", "loops", "cifar_lit", "state_dict"]


@given(
    damaged(CHECKPOINT)
    | damaged(checkpoint_file(zipped=False))
    | damaged(zipfile.ZipFile(io.BytesIO(CHECKPOINT)).read("archive/data.pkl")).map(repacked)
    | st.dictionaries(st.sampled_from(PARTS), plain).map(lambda values: checkpoint_file(**values))
)
@fuzzed
def test_a_damaged_checkpoint_and_one_of_any_values_give_tensors_by_name_or_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    contents = one_line(lambda: read_checkpoint(tmp_path / "last.ckpt"))
    if contents is not None:
        assert all(isinstance(tensor, torch.Tensor) for tensor in contents["state_dict"].values())
        assert len(describe_net(contents.get("hyper_parameters", {}))) < 300


as_json = plain.map(lambda value: json.dumps(value).encode())
CONFIG = b"trainer: {max_epochs: 3, callbacks: [&a {class_path: os.system}, *a]}\nmodel:\n  lr: 1\n"
INDEX = json.dumps({"format": 1, "shape": [1, 2, 2, 3], "files": [["a.png", 3, 4]], "bad": {}, "data": "images.u8"}).encode()


@given(
    as_json
    | st.binary()
    | st.text().map(lambda text: text.encode(errors="surrogatepass"))
    | st.integers(1, 3000).map(lambda depth: b"[" * depth)
    | damaged(CONFIG)
    | damaged(INDEX)
)
@fuzzed
def test_any_configuration_metrics_and_index_of_a_cache_are_read_or_answered_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "images.u8").write_bytes(bytes(12))
    for name in ("own.yaml", "metrics.json", "index.json"):
        (tmp_path / name).write_bytes(content)
    one_line(lambda: plain_values(tmp_path / "own.yaml"))
    assert isinstance(read_metrics(tmp_path), dict)
    read_index(tmp_path)


@given(
    st.lists(
        st.sampled_from(["--resume", "--lr", "--config", "-c", "--trust", "--devices=2", "--", "-", "-1", "="])
        | st.text(max_size=6)
    )
)
@example(["--config", "\n"])
@example(["--config", "~0"])
@fuzzed
def test_any_words_are_sorted_or_answered(words: list[str]) -> None:
    one_line(lambda: flags.parse("train", words))


def image_file(kind: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((16, 16)).convert("RGB").save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
@given(data=st.data())
@fuzzed
def test_a_damaged_image_gives_pixels_or_one_line(kind: str, data: st.DataObject) -> None:
    content = data.draw(damaged(image_file(kind)))
    pixels = one_line(lambda: decode(io.BytesIO(content), (8, 8), 3))
    assert pixels is None or pixels.shape == (8, 8, 3)
