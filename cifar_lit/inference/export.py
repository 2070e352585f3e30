"""A trained net as a file for other programs: written, run again from the file, and kept only if it answers alike."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cifar_lit.errors import Failure, UsageError, nearest
from cifar_lit.files import atomic_write
from cifar_lit.inference.export_check import Check, check, latencies, medians, refuse_disagreement
from cifar_lit.inference.export_formats import FORMATS, check_packages, onnx_model, quantised, runner_of
from cifar_lit.runs.model_file import LoadedNet

TIMED_BATCHES = (1, 64)
QUANTIZE = ("int8",)


class Sample(NamedTuple):
    """Images to check on: uint8 (N, C, H, W), at least one, with labels int64 (N,) where these are known."""

    images: Tensor
    labels: Tensor | None


class Exported(NamedTuple):
    """A file that was kept.

    size: its bytes. check: how it answered. seconds: for each of the timed batches the medians of the net and of the file.
    """

    path: Path
    size: int
    check: Check
    seconds: dict[int, tuple[float, float]]


def check_request(to: str, quantize: str | None) -> None:
    """Raises UsageError for a format or a quantisation that does not exist, Failure where its packages are missing."""
    if to not in FORMATS:
        raise UsageError(f"--to knows no {to!r}.{nearest(to, FORMATS)} There are {', '.join(FORMATS)}.")
    if quantize is not None and quantize not in QUANTIZE:
        raise UsageError(f"--quantize knows {', '.join(QUANTIZE)} only, not {quantize!r}")
    if quantize is not None and to != "onnx":
        raise UsageError(f"--quantize {quantize} is made and run by onnxruntime: use it with --to onnx")
    check_packages(to, FORMATS[to].packages)


def default_path(model: Path, to: str, quantize: str | None) -> Path:
    """Where the file goes if nothing is said: beside `model`, the model.safetensors that it is made from.

    Raises UsageError for safetensors, which would be `model` itself.
    """
    if to == "safetensors":
        raise UsageError(f"{model} is the run's own: name a place for its checked copy with --out FILE")
    return model.with_name(model.stem + (f".{quantize}" if quantize else "") + FORMATS[to].suffix)


def export(net: LoadedNet, to: str, path: Path, sample: Sample, calibration: Tensor | None = None) -> Exported:
    """Writes a net to `path` in one of `FORMATS`, runs the file on the sample, and keeps it only if it answers alike.

    net: on the CPU, in evaluation mode. calibration: training images, uint8 (N, C, H, W), for int8 ONNX; None for float.
    A file that was at `path` before stays as it was unless the new one is kept. Raises Failure when the net cannot be
    written, the file answers otherwise, or the disk does not take it.
    """
    kind, plain = FORMATS[to], runner_of(net)
    try:
        with atomic_write(path) as partial:
            if calibration is None:
                kind.write(net, partial)
            else:
                partial.write_bytes(quantised(onnx_model(net), calibration).SerializeToString())
            file = kind.open(partial)
            found = check(plain, file, sample.images, sample.labels)
            refuse_disagreement(found, int8=calibration is not None)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}. Choose another place with --out.") from error
    seconds = {}
    for batch in TIMED_BATCHES:
        before, after = medians(latencies([plain, file], sample.images[torch.arange(batch) % len(sample.images)]))
        seconds[batch] = before, after
    return Exported(path, path.stat().st_size, found, seconds)
