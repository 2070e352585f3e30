"""The formats of `cifar-lit export`: how each is written, and how what was written is run again.

In ONNX and torch-export the whole way from pixels to probabilities is in the graph: `images`, uint8 (batch, C, H, W) with any
batch, of values 0 … 255 as decoders give them, to `probabilities`, float32 (batch, classes).
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cifar_lit.errors import Failure
from cifar_lit.runs import model_file as weights
from cifar_lit.runs.model_file import LoadedNet, save_weights

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto
    from torch.export import ExportedProgram


# ---- 8-bit ONNX: weights and the activations between them as int8, their ranges taken from training images.

LAYERS = ("Conv", "Gemm", "MatMul")
CALIBRATION_IMAGES = 512
BATCH = 64
END_SHARE = 0.05  # of all weights: the most that a layer at either end may hold to be left in float


def quantised(model: ModelProto, images: Tensor) -> ModelProto:
    """The model with quantise and dequantise operators around its layers (QDQ), its metadata kept.

    images: uint8 (N, C, H, W) for training; the least and greatest value of each activation over them are its range, as
    percentiles and entropy gained nothing on CIFAR-10 (JPEG). Weights have a scale for each channel. Activations are signed,
    which no processor's 8-bit products overflow on. The first and the last layer stay in float where they hold few weights:
    there rounding costs most, of pixels and of logits, and saves least.

    Raises Failure when nothing is left to quantise, or onnxruntime cannot.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with TemporaryDirectory() as folder:
        plain, prepared, ready = (str(Path(folder) / f"{name}.onnx") for name in ("plain", "prepared", "ready"))
        Path(plain).write_bytes(model.SerializeToString())
        try:
            with silenced():
                # folds what can be folded into the layers; shapes are known from the exporter
                quant_pre_process(plain, prepared, skip_symbolic_shape=True)
                layers, kept = _layers(onnx.load(prepared))
                if layers:
                    quantize_static(
                        prepared, ready, _Batches(images), quant_format=QuantFormat.QDQ, per_channel=True,
                        activation_type=QuantType.QInt8, weight_type=QuantType.QInt8,
                        op_types_to_quantize=list(LAYERS), nodes_to_exclude=kept,
                    )  # fmt: skip
                    found: ModelProto = onnx.load(ready)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Failure(f"onnxruntime cannot quantise this net ({reason}): leave --quantize out") from error
    if not layers:
        raise Failure("this net has no layer that int8 would pay for: leave --quantize out")
    del found.metadata_props[:]
    found.metadata_props.extend(model.metadata_props)
    found.metadata_props.add(key="quantized", value=f"int8 weights and activations, calibrated on {len(images)} training images")
    found.producer_name = model.producer_name
    return found


def _layers(model: ModelProto) -> tuple[list[str], list[str]]:
    """The names of the layers that are quantised, and of those that are kept in float."""
    sizes = {tensor.name: _count(tensor.dims) for tensor in model.graph.initializer}
    layers = [node for node in model.graph.node if node.op_type in LAYERS]
    total = sum(_weights(node, sizes) for node in layers)
    kept = [node.name for node in {node.name: node for node in (*layers[:1], *layers[-1:])}.values()
            if _weights(node, sizes) <= END_SHARE * total]  # fmt: skip
    return [node.name for node in layers if node.name not in kept], kept


def _weights(node: NodeProto, sizes: dict[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in node.input)


def _count(shape: Any) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


class _Batches:
    """Calibration images as onnxruntime asks for them; it takes any object with `get_next`."""

    def __init__(self, images: Tensor) -> None:
        self._batches: Iterator[Tensor] = iter(images.split(BATCH))

    def get_next(self) -> dict[str, Any] | None:
        """The next batch by input name, None after the last."""
        batch = next(self._batches, None)
        return None if batch is None else {"images": batch.contiguous().numpy()}


FORMAT = "cifar-lit export 1"
METADATA_FILE = "metadata.json"  # in a torch-export archive
OPSET = 20  # the first with Gelu as one operator, which onnxruntime computes from 1.17 on
LARGEST_ONNX = 2**31 - 2**20  # bytes: one protobuf message ends at 2 GiB

Runner = Callable[[Tensor], Tensor]  # from uint8 images (B, C, H, W) to float32 probabilities (B, classes), both on the CPU


class Format(NamedTuple):
    """One format. suffix: of its files. packages: what it needs beside torch. write: a net to a file. open: a file to run."""

    suffix: str
    packages: tuple[str, ...]
    write: Callable[[LoadedNet, Path], None]
    open: Callable[[Path], Runner]


class Probabilities(nn.Module):
    """A loaded net with the softmax that makes its logits float32 probabilities (B, classes)."""

    def __init__(self, net: LoadedNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Of uint8 images (B, C, H, W)."""
        logits: Tensor = self.net(images)
        return logits.float().softmax(1)


def runner_of(net: LoadedNet) -> Runner:
    """The net itself, as PyTorch computes it."""
    module = Probabilities(net).eval()

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = module(images)
        return found

    return run


def metadata(net: LoadedNet) -> dict[str, str]:
    """What a user of an exported file must know, as texts: lists and numbers are JSON."""
    card = net.card
    channels, height, width = card.input_shape
    colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    return {
        "format": FORMAT,
        "net": card.net,
        "classes": json.dumps(card.classes, ensure_ascii=False),
        "image_size": json.dumps([height, width]),
        "channels": str(channels),
        "input": f"images: uint8 (batch, {channels}, {height}, {width}), {colours}, 0 to 255, not normalised",
        "output": f"probabilities: float32 (batch, {len(card.classes)}), in the order of classes",
        "card": json.dumps(asdict(card), ensure_ascii=False),
    }


def check_packages(name: str, packages: tuple[str, ...]) -> None:
    """Raises Failure with the remedy when one of a format's packages is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise Failure(f'--to {name} needs {" and ".join(missing)}, not installed here: pip install "cifar-lit[export]"')


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps what exporters print, log and warn from the console; what they raise goes through."""
    disabled = logging.root.manager.disable
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(disabled)


# ---- torch-export


def traced(net: LoadedNet) -> ExportedProgram:
    """The graph of a net, from uint8 images of any batch to probabilities; raises Failure for a net that cannot be traced."""
    from torch.export import Dim, export

    example = torch.zeros(2, *net.card.input_shape, dtype=torch.uint8)  # a batch of 1 would be taken for a constant
    try:
        with silenced(), torch.no_grad():
            return export(Probabilities(net).eval(), (example,), dynamic_shapes={"images": {0: Dim("batch", min=1)}})
    except Exception as error:  # of many kinds, all internal to torch
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Failure(f"torch cannot trace the net {net.card.net}: {reason[0]}; --to safetensors keeps its weights") from error


def write_torch_export(net: LoadedNet, path: Path) -> None:
    """Writes what `torch.export.load` reads, with `metadata.json` among its extra files."""
    program = traced(net)
    with silenced(), path.open("wb") as file:
        torch.export.save(program, file, extra_files={METADATA_FILE: json.dumps(metadata(net), ensure_ascii=False, indent=2)})


def open_torch_export(path: Path) -> Runner:
    """Runs a file of `torch.export`."""
    with silenced(), path.open("rb") as file:
        module = torch.export.load(file).module()

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = module(images)
        return found

    return run


# ---- ONNX


def onnx_model(net: LoadedNet) -> ModelProto:
    """A net as an ONNX model with its metadata; raises Failure for one that ONNX cannot express or hold."""
    weight = sum(tensor.nbytes for tensor in net.state_dict().values())
    if weight > LARGEST_ONNX:
        raise Failure(f"the net takes {weight / 2**30:.1f} GiB, and one ONNX file holds less than 2: use --to torch-export")
    program = traced(net)
    try:
        with silenced():
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                input_names=["images"],
                output_names=["probabilities"],
                verbose=False,
            )
    except Exception as error:
        raise Failure(f"torch cannot write the net {net.card.net} as ONNX: use --to torch-export") from error
    assert exported is not None
    model: ModelProto = exported.model_proto
    _tidy(model)
    model.producer_name = "cifar-lit"
    for name, value in metadata(net).items():
        model.metadata_props.add(key=name, value=value)
    return model


def _tidy(model: ModelProto) -> None:
    """Names the free dimension, and drops the exporter's notes, among them paths of this machine's source files."""
    free = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == free:
                dimension.dim_param = "batch"
    for part in (*model.graph.node, *model.graph.initializer, *model.functions, model.graph, model):
        del part.metadata_props[:]
        part.doc_string = ""


def write_onnx(net: LoadedNet, path: Path) -> None:
    """Writes one ONNX file, the weights inside."""
    path.write_bytes(onnx_model(net).SerializeToString())


def open_onnx(path: Path) -> Runner:
    """Runs an ONNX file by onnxruntime on the CPU, on as many threads as torch uses."""
    import onnxruntime

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["probabilities"], {"images": images.contiguous().numpy()})[0])


# ---- safetensors


def write_safetensors(net: LoadedNet, path: Path) -> None:
    """Writes the weights with their card, as in a run's own model.safetensors: what `cifar_lit.load` takes."""
    save_weights(path, net.net.state_dict(), net.card)


FORMATS: dict[str, Format] = {
    "onnx": Format(".onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx, open_onnx),
    "torch-export": Format(".pt2", (), write_torch_export, open_torch_export),
    "safetensors": Format(".safetensors", (), write_safetensors, lambda path: runner_of(weights.load_model_file(path))),
}
