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

from cifar_lit.cli import flags
from cifar_lit.data.cache import read_index
from cifar_lit.data.decode import decode
from cifar_lit.errors import Failure, UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.runs import model_file as weights
from cifar_lit.runs.config_file import plain_values
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
CARD = {
    "net": "lenet",
    "width": 0.5,
    "input_shape": [1, 16, 16],
    "classes": ["a", "b"],
    "mean": [0.5],
    "std": [0.5],
    "options": {},
}

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


def net() -> torch.nn.Module:
    return build_net("lenet", channels=1, image_size=16, num_classes=2, width=0.5)


def model_file() -> bytes:
    from safetensors.torch import save

    return save(dict(net().state_dict()), {"format": weights.FORMAT, "card": json.dumps(CARD)})


def checkpoint_file(zipped: bool = True) -> bytes:
    file = io.BytesIO()
    contents = {"state_dict": net().state_dict(), "epoch": 1, "global_step": 2, "hyper_parameters": {"net": "lenet"}}
    torch.save(contents, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def image_file(kind: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((16, 16)).convert("RGB").save(file, kind)
    return file.getvalue()


@given(damaged(model_file()))
@fuzzed
def test_a_damaged_model_gives_a_net_or_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    found = one_line(lambda: weights.load_model_file(tmp_path))
    if found is not None:
        assert found(torch.zeros(1, 1, 16, 16, dtype=torch.uint8)).isfinite().all()


HEADER = struct.unpack("<Q", model_file()[:8])[0]


@given(st.dictionaries(st.sampled_from([*CARD, "options", "novelty", "more"]), plain, max_size=4))
@fuzzed
def test_a_card_of_any_values_gives_a_net_that_answers_or_one_line(tmp_path: Path, values: dict[str, Any]) -> None:
    from safetensors.torch import save

    content = save(dict(net().state_dict()), {"format": weights.FORMAT, "card": json.dumps({**CARD, **values})})
    (tmp_path / "model.safetensors").write_bytes(content)
    found = one_line(lambda: weights.load_model_file(tmp_path))
    if found is not None:
        assert found(torch.zeros(1, 1, 16, 16, dtype=torch.uint8)).shape == (1, 2)


@given(damaged(model_file()[8 : 8 + HEADER]))
@fuzzed
def test_a_damaged_header_with_its_true_length_gives_a_net_or_one_line(tmp_path: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header + model_file()[8 + HEADER :]
    (tmp_path / "model.safetensors").write_bytes(content)
    one_line(lambda: weights.load_model_file(tmp_path))


@pytest.mark.parametrize("zipped", [True, False])
@given(data=st.data())
@fuzzed
def test_a_damaged_checkpoint_gives_tensors_by_name_or_one_line(tmp_path: Path, zipped: bool, data: st.DataObject) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(data.draw(damaged(checkpoint_file(zipped))))
    found = one_line(lambda: read_checkpoint(path))
    if found is not None:
        assert all(isinstance(tensor, torch.Tensor) for tensor in found["state_dict"].values())


def pickle_of(container: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(container)) as parts:
        return parts.read("archive/data.pkl")


@given(damaged(pickle_of(checkpoint_file())))
@fuzzed
def test_a_damaged_pickle_in_a_whole_container_gives_one_line_or_values(tmp_path: Path, pickled: bytes) -> None:
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(io.BytesIO(checkpoint_file())) as genuine, zipfile.ZipFile(path, "w") as container:
        for name in genuine.namelist():
            container.writestr(name, pickled if name.endswith("data.pkl") else genuine.read(name))
    one_line(lambda: read_checkpoint(path))


@given(st.dictionaries(st.sampled_from(["epoch", "global_step", "hyper_parameters", "loops", "cifar_lit", "state_dict"]), plain))
@fuzzed
def test_a_checkpoint_of_any_values_is_described_or_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    torch.save({"state_dict": net().state_dict(), **values}, tmp_path / "last.ckpt")
    found = one_line(lambda: read_checkpoint(tmp_path / "last.ckpt"))
    if found is not None:
        assert len(describe_net(found.get("hyper_parameters", {}))) < 300


@given(
    plain
    | st.text()
    | st.binary()
    | damaged(b"trainer: {max_epochs: 3, callbacks: [&a {class_path: os.system}, *a]}\nmodel:\n  lr: 1\n")
)
@fuzzed
def test_any_configuration_is_text_of_plain_values_or_one_line(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "own.yaml"
    encoded = (
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode(errors="surrogatepass")
    )
    path.write_bytes(encoded)
    one_line(lambda: plain_values(path))


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


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
@given(data=st.data())
@fuzzed
def test_a_damaged_image_gives_pixels_or_one_line(kind: str, data: st.DataObject) -> None:
    content = data.draw(damaged(image_file(kind)))
    found = one_line(lambda: decode(io.BytesIO(content), (8, 8), 3))
    assert found is None or found.shape == (8, 8, 3)


INDEX = json.dumps({"shape": [1, 2, 2, 3], "files": [["a.png", 3, 4]], "bad": {}, "data": "images.u8"}).encode()


@given(st.binary() | damaged(INDEX) | plain.map(lambda value: json.dumps(value).encode()))
@fuzzed
def test_any_index_of_a_cache_is_one_or_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "images.u8").write_bytes(bytes(12))
    (tmp_path / "index.json").write_bytes(content)
    read_index(tmp_path)


@given(st.binary() | plain.map(lambda value: json.dumps(value).encode()) | st.integers(1, 60_000).map(lambda n: b"[" * n))
@fuzzed
def test_any_metrics_are_read_or_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.json").write_bytes(content)
    assert isinstance(read_metrics(tmp_path), dict)
