"""Export a trained net for other programs. The file is run and compared with the net, and kept only if they agree.

In ONNX and torch-export, the graph includes normalisation and softmax: from `images`, uint8 (batch, C, H, W) in 0 … 255
with any batch size, to `probabilities`, float32 (batch, classes).
"""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cifar_lit.base.errors import Failure, check_choice, check_packages, first_line
from cifar_lit.base.files import writing
from cifar_lit.inference.model_file import LoadedNet

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch.export import ExportedProgram

FORMAT = "cifar-lit export 1"
METADATA_FILE = "metadata.json"  # in a torch-export archive
OPSET = 20  # the first opset with a Gelu operator; supported by onnxruntime 1.17 and later
IR_VERSION = 9  # the file format that belongs to this opset; onnxruntime 1.17 reads no later one
CHECKED_IMAGES = 64
CHECKED_BATCHES = (1, 7, CHECKED_IMAGES)
MAX_DIFFERENCE = 1e-4  # between probabilities in float32; rounding errors of deep nets are 100 times smaller

# From uint8 images (B, C, H, W) to float32 probabilities (B, classes), both on the CPU.
Runner = Callable[[Tensor], Tensor]


def check_format(to: str) -> None:
    """Raise UsageError for an unknown format, Failure if packages are missing."""
    check_choice("--to", to, FORMATS)
    if to == "onnx":
        check_packages("--to onnx", ("onnx", "onnxscript", "onnxruntime"), "export")


def export(net: LoadedNet, to: str, path: Path) -> float:
    """Write a net to a file and compare the file with the net. If they disagree, leave `path` unchanged.

    Args:
        net: on the CPU, in evaluation mode.
        to: a key of `FORMATS`.

    Returns:
        The largest difference of a probability.

    Raises:
        Failure: the net cannot be exported, net and file disagree, or the file cannot be written.
    """
    with writing(path, "Choose another place with --out.") as part:
        FORMATS[to].write(net, part)
        return check(runner_of(net), FORMATS[to].open(part), drawn_images(net.card.input_shape))


# ---- Comparison of an exported file with its net.


def drawn_images(shape: Sequence[int]) -> Tensor:
    """Return noise of any brightness and contrast, uint8 (CHECKED_IMAGES, C, H, W), always the same."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(CHECKED_IMAGES, *shape, generator=generator)
    brightness = torch.rand(CHECKED_IMAGES, 1, 1, 1, generator=generator)
    contrast = torch.rand(CHECKED_IMAGES, 1, 1, 1, generator=generator)
    return (255 * torch.lerp(brightness, noise, contrast)).byte()


def check(net: Runner, file: Runner, images: Tensor) -> float:
    """Compare net and file on uint8 images (N, C, H, W) in batches of several sizes.

    Returns:
        The largest difference of a probability.

    Raises:
        Failure: it exceeds `MAX_DIFFERENCE`, or a value is not finite.
    """
    expected = net(images)
    difference = 0.0
    for size in CHECKED_BATCHES:
        differences = (file(images[:size]) - expected[:size]).abs().nan_to_num(nan=math.inf)
        difference = max(difference, float(differences.max()))
    if difference > MAX_DIFFERENCE:
        raise Failure(
            f"the file differs from the net: a probability differs by {difference:.2g}, more than {MAX_DIFFERENCE:g}, "
            "so it was not kept: use another --to, or another version of torch or onnxruntime"
        )
    return difference


# ---- Writing and running each format.


class Probabilities(nn.Module):
    """A loaded net that returns float32 probabilities (B, classes) for uint8 images (B, C, H, W)."""

    def __init__(self, net: LoadedNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Return the probabilities of images."""
        return self.net.probabilities(self.net(images))


def runner_of(net: LoadedNet) -> Runner:
    """Return the net itself as a runner."""
    return torch.no_grad()(Probabilities(net).eval())


class Format(NamedTuple):
    """A file format."""

    suffix: str
    write: Callable[[LoadedNet, Path], None]  # raises Failure for a net that the format cannot express
    open: Callable[[Path], Runner]


def write_program(net: LoadedNet, path: Path) -> None:
    """Write an exported program of torch."""
    program = traced(net)
    extra = {METADATA_FILE: json.dumps(metadata(net), ensure_ascii=False, indent=2)}
    content = io.BytesIO()  # torch aborts the process if a write to a file fails here
    with silenced():
        torch.export.save(program, content, extra_files=extra)
    path.write_bytes(content.getbuffer())


def open_program(path: Path) -> Runner:
    """Return a runner of an exported program."""
    with silenced(), path.open("rb") as file:
        module = torch.export.load(file).module()
    return torch.no_grad()(module)


def write_onnx(net: LoadedNet, path: Path) -> None:
    """Write an ONNX file."""
    path.write_bytes(onnx_model(net).SerializeToString())


def open_onnx(path: Path) -> Runner:
    """Return a runner of an ONNX file in onnxruntime on the CPU, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["probabilities"], {"images": images.contiguous().numpy()})[0])


FORMATS = {
    "onnx": Format(".onnx", write_onnx, open_onnx),
    "torch-export": Format(".pt2", write_program, open_program),
}


def metadata(net: LoadedNet) -> dict[str, str]:
    """Return the metadata of an exported file as texts, with lists and numbers as JSON."""
    card = net.card
    channels, height, width = card.input_shape
    colours = "grey" if channels == 1 else "RGB"
    entries = {
        "format": FORMAT,
        "net": card.net,
        "classes": json.dumps(card.classes, ensure_ascii=False),
        "image_size": json.dumps([height, width]),
        "channels": str(channels),
        "resize": card.resize,
        "preparation": card.preparation.describe(),
        "input": f"images: uint8 (batch, {channels}, {height}, {width}), {colours}, 0 to 255, not normalised",
        "output": f"probabilities: float32 (batch, {len(net.classes)}), in the order of classes",
        "card": json.dumps(asdict(replace(card, coverage=None)), ensure_ascii=False),
    }
    if card.thresholds is not None:
        entries["thresholds"] = json.dumps(card.thresholds)
    return entries


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress what exporters print, log and warn."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def traced(net: LoadedNet) -> ExportedProgram:
    """Trace a net with any batch size. Raise Failure if torch cannot."""
    from torch.export import Dim, export

    example = torch.zeros(2, *net.card.input_shape, dtype=torch.uint8)  # torch would treat a batch of 1 as constant
    try:
        with silenced(), torch.no_grad():
            program = Probabilities(net).eval()
            return export(program, (example,), dynamic_shapes={"images": {0: Dim("batch", min=1)}})
    except Exception as error:  # torch raises many kinds of internal errors
        text = f"torch cannot trace the net {net.card.net} ({first_line(error)}): use it in Python, by cifar_lit.load"
        raise Failure(text) from error


def onnx_model(net: LoadedNet) -> ModelProto:
    """Return a net as an ONNX model with metadata."""
    program = traced(net)
    with silenced():
        exported = torch.onnx.export(
            program, (), dynamo=True, opset_version=OPSET, verbose=False,
            input_names=["images"], output_names=["probabilities"],
        )  # fmt: skip
    assert exported is not None
    model: ModelProto = exported.model_proto
    # Remove the exporter's notes, which include paths of source files, and name the free dimension.
    free = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == free:
                dimension.dim_param = "batch"
    for part in (*model.graph.node, *model.graph.initializer, *model.functions, model.graph, model):
        del part.metadata_props[:]
        part.doc_string = ""
    model.ir_version = IR_VERSION  # it lacks only what was removed above, and types that no net here uses
    model.producer_name = "cifar-lit"
    for name, text in metadata(net).items():
        model.metadata_props.add(key=name, value=text)
    return model
