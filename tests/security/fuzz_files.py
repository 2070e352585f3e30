"""Fuzzed readers of models, checkpoints, configurations and images."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from security.fuzzing import Reader, refused_or_read
from security.hostile_files import png
from security.mutations import as_json, changed, damaged, plain, yaml_files, zip_files

from cifar_lit.data.decode import decode
from cifar_lit.models.registry import build_net
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.model_file import CHECKSUM, FORMAT, ModelCard, checksum, load_model_file
from cifar_lit.training.checkpoint import describe_net, read_checkpoint

# ---- models, checkpoints, configurations

NET = build_net("lenet", channels=1, image_size=16, num_classes=2, width=0.5)
CARD = asdict(ModelCard("lenet", 0.5, [1, 16, 16], ["a", "b"], [0.5], [0.5]))


def model_file(card: Any) -> bytes:
    text = json.dumps(card)
    return save(NET.state_dict(), {"format": FORMAT, "card": text, CHECKSUM: checksum(text, NET.state_dict())})


MODEL = model_file(CARD)
HEADER = 8 + struct.unpack("<Q", MODEL[:8])[0]


def with_header(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + MODEL[HEADER:]


def read_model(content: bytes) -> None:
    Path("model.safetensors").write_bytes(content)
    net = refused_or_read(lambda: load_model_file(Path()))
    if net is not None:
        assert net(torch.zeros(1, *net.card.input_shape, dtype=torch.uint8)).shape == (1, len(net.classes))


CONTENTS = {
    "state_dict": dict(NET.state_dict()),
    "epoch": 1,
    "global_step": 2,
    "pytorch-lightning_version": "2.6.6",
    "hyper_parameters": {"net": "lenet", "width": 0.5, "input_shape": [1, 16, 16], "num_classes": 2},
    "loops": {"fit_loop": {"epoch_progress": {"current": {"ready": 1, "completed": 1}}}},
    "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "a/b", "best_k_models": {}, "dirpath": "a"}},
    "optimizer_states": [
        {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    ],
    "cifar_lit": {"seconds": 1.0},
}
ODD_TENSORS = (torch.zeros(0), torch.zeros(3) * 1j, torch.full((2, 2), float("nan")), torch.zeros(1).expand(9, 9))


def checkpoint_file(contents: Any, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(contents, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


CHECKPOINT = checkpoint_file(CONTENTS)


def read_any_checkpoint(content: bytes) -> None:
    Path("last.ckpt").write_bytes(content)
    contents = refused_or_read(lambda: read_checkpoint(Path("last.ckpt")))
    if contents is not None:
        assert all(isinstance(tensor, torch.Tensor) for tensor in contents["state_dict"].values())
        assert len(describe_net(contents.get("hyper_parameters", {}))) < 300


CONFIG: dict[str, Any] = {
    "seed_everything": 3,
    "recipe": "small",
    "trainer": {"max_epochs": 3, "callbacks": [{"class_path": "Timer", "init_args": {"interval": "epoch"}}]},
    "model": {"net": "lenet", "lr": 0.1},
    "data": {"dataset": "shapes", "image_size": 16, "num_classes": 4, "count": 200, "mean": [0.1, 0.2, 0.3]},
}


def read_config(content: bytes) -> None:
    Path("own.yaml").write_bytes(content)
    refused_or_read(lambda: plain_values(Path("own.yaml")))


# ---- images


def image_file(kind: str, side: int = 16, **settings: Any) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert(settings.pop("mode", "RGB")).save(file, kind, **settings)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x0112], EXIF[0x010E] = 6, "a picture"
PICTURES = (
    image_file("PNG"), image_file("PNG", mode="P", exif=EXIF), image_file("JPEG", 40, progressive=True, exif=EXIF),
    image_file("JPEG", mode="CMYK"), image_file("GIF"), image_file("WEBP", lossless=True, mode="RGBA", exif=EXIF),
    image_file("BMP"), image_file("BMP", mode="1"), image_file("TIFF", exif=EXIF), image_file("TIFF", mode="1"),
    image_file("TIFF", compression="tiff_lzw"), image_file("PPM"), image_file("PPM", mode="L"), image_file("AVIF"),
)  # fmt: skip
pictures = st.sampled_from(PICTURES)
sides = st.sampled_from([0, 1, 2, 16, 2**31, 2**32 - 1])
png_headers = st.builds(
    lambda width, height, depth, colour: struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, width % 2),
    *[sides, sides, st.integers(0, 16), st.integers(0, 16)],
)
png_kinds = st.sampled_from([b"tRNS", b"PLTE", b"eXIf", b"iCCP", b"zTXt", b"iTXt", b"fcTL", b"acTL"])
png_chunks = st.lists(st.tuples(png_kinds, st.binary()), max_size=3)
images = (
    st.tuples(pictures, pictures).flatmap(lambda pair: damaged(*pair))
    | st.builds(lambda header, pixels, chunks: png(header, pixels, *chunks), png_headers, st.binary(), png_chunks)
    | st.binary(max_size=100)
)


def read_image(content: bytes) -> None:
    for channels, shape, resize in ((3, (8, 8), "crop"), (1, (8, 5), "letterbox")):
        pixels = refused_or_read(partial(decode, io.BytesIO(content), shape, channels, resize))
        assert pixels is None or pixels.shape == (*shape, channels)


READERS = {
    "a model": Reader(
        damaged(MODEL)
        | damaged(MODEL[8:HEADER]).map(with_header)
        | changed(json.loads(MODEL[8:HEADER])).map(as_json).map(with_header)
        | changed(CARD).map(model_file),
        read_model,
    ),
    "a checkpoint": Reader(
        changed(CONTENTS, plain | st.sampled_from(ODD_TENSORS)).map(checkpoint_file)
        | zip_files(CHECKPOINT)
        | damaged(CHECKPOINT)
        | damaged(checkpoint_file(CONTENTS, zipped=False)),
        read_any_checkpoint,
        found=[
            checkpoint_file({**CONTENTS, "hyper_parameters": {"net": "lenet", "width": torch.zeros(0)}}),
            checkpoint_file({**CONTENTS, "loops": {"fit_loop": {"epoch_progress": torch.zeros(0)}}}),
        ],
    ),
    "a configuration": Reader(
        yaml_files(CONFIG),
        read_config,
        found=[b"!!int a: 3\n", b"count: !!int \n", b"a: 2001-99-99\n", b"a: !!bool x\n"],
    ),
    "an image": Reader(images, read_image),
}
