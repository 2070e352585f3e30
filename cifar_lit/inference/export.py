"""A trained net as a file for other programs: written, run again from the file, and kept only if it answers alike.

In ONNX and torch-export the whole way from pixels to probabilities is in the graph: `images`, uint8 (batch, C, H, W) with any
batch, of values 0 … 255 as decoders give them, to `probabilities`, float32 (batch, classes).
"""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from timeit import timeit
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cifar_lit.data.decode import RESIZES
from cifar_lit.errors import Failure, UsageError, first_line, nearest
from cifar_lit.files import writing
from cifar_lit.inference.load import batch_size_of
from cifar_lit.runs.model_file import LoadedNet, load_model_file, save_weights
from cifar_lit.runs.run_data import RunImages

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch.export import ExportedProgram

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FORMAT = "cifar-lit export 1"
METADATA_FILE = "metadata.json"  # in a torch-export archive
OPSET = 20  # the first with Gelu as one operator, which onnxruntime computes from 1.17 on
CHECKED_BATCHES = (1, 7)  # besides those that `classify` computes at once
MAX_DIFFERENCE = 1e-4  # of a probability, in float32: a hundred times what rounding in another order makes of deep nets
MIN_AGREEMENT = 0.95  # of the decisions, in int8
MAX_ACCURACY_LOSS = 0.02  # in int8
TIMED_BATCHES = (1, 64)
TIMED_RUNS, TIMED_SECONDS = 10, 1.0  # of which the fastest counts; after so many seconds there are no further ones

Runner = Callable[
    [Tensor], Tensor
]  # from uint8 images (B, C, H, W) to float32 probabilities (B, classes), both on the CPU


def check_request(to: str, quantize: str | None) -> None:
    """Raises UsageError for a format or a quantisation that does not exist, Failure where its packages are missing."""
    if to not in SUFFIXES:
        raise UsageError(f"--to knows no {to!r}.{nearest(to, SUFFIXES)} There are {', '.join(SUFFIXES)}.")
    if quantize not in (None, "int8"):
        raise UsageError(f"--quantize knows int8 only, not {quantize!r}")
    if quantize is not None and to != "onnx":
        raise UsageError(f"--quantize {quantize} is made and run by onnxruntime: use it with --to onnx")
    if to == "onnx" and (missing := [package for package in PACKAGES if find_spec(package) is None]):
        raise Failure(f'--to onnx needs {" and ".join(missing)}, not installed here: pip install "cifar-lit[export]"')


def default_path(model: Path, to: str, quantize: str | None) -> Path:
    """Where the file goes if nothing is said: beside the model.safetensors that it is made from."""
    if to == "safetensors":
        raise UsageError(f"{model} is the run's own: name a place for its checked copy with --out FILE")
    return model.with_name(model.stem + (f".{quantize}" if quantize else "") + SUFFIXES[to])


class Check(NamedTuple):
    """A file beside its net over the same images."""

    images: int  # how many
    difference: float  # the largest of any probability; infinite where shapes differ or something is no number
    agreeing: int  # images on which both decide alike
    accuracy: tuple[float, float] | None  # fraction right, of the net and of the file; None where no labels are known


def export(
    net: LoadedNet, to: str, path: Path, sample: RunImages, calibration: Tensor | None = None
) -> tuple[Check, dict[int, list[float]]]:
    """Writes a net to a file, runs the file on the sample, and keeps it only if it answers alike; else `path` stays as it was.

    Args:
        net: on the CPU, in evaluation mode.
        to: a key of `SUFFIXES`.
        sample: what it is checked on, at least one image.
        calibration: training images, uint8 (N, C, H, W), for int8 ONNX; None for float.

    Returns:
        The check, and for each of `TIMED_BATCHES` the seconds that the net and the file take.

    Raises:
        Failure: the net cannot be written, the file answers otherwise, or the disk does not take it.
    """
    with writing(path, "Choose another place with --out.") as part:
        write(net, to, part, calibration)
        runners = runner_of(net), open_file(part, to)
        result = check(*runners, sample.images, sample.labels)
        refuse_disagreement(result, int8=calibration is not None)
    seconds = {}
    for batch in TIMED_BATCHES:
        images = sample.images[torch.arange(batch) % len(sample.images)]
        seconds[batch] = [fastest(partial(run, images)) for run in runners]
    return result, seconds


def fastest(call: Callable[[], object]) -> float:
    """The seconds of the fastest of some calls."""
    times: list[float] = []
    while len(times) < TIMED_RUNS and sum(times) < TIMED_SECONDS:
        times.append(timeit(call, number=1))
    return min(times)


# ---- Whether an exported file answers as the net that it was made from.


def check(net: Runner, file: Runner, images: Tensor, labels: Tensor | None) -> Check:
    """Runs both over uint8 images (N, C, H, W), the file's first in batches of 1 and of 7, which must come out as all others.

    labels: int64 (N,), or None. Fewer images than a batch are repeated to fill it.
    """
    most = max(8, batch_size_of(images))
    expected, answers = (torch.cat([run(batch) for batch in images.split(most)]) for run in (net, file))
    pairs = [(answers, expected)]
    for batch in (*CHECKED_BATCHES, most):
        places = torch.arange(batch) % len(images)
        pairs.append((file(images[places]), expected[places]))
    valid = all(first.shape == second.shape and bool(first.isfinite().all()) for first, second in pairs)
    difference = max(float((first - second).abs().max()) for first, second in pairs) if valid else math.inf
    before, after = expected.argmax(1), answers.argmax(1)
    accuracy = None
    if labels is not None:
        accuracy = int((before == labels).sum()) / len(labels), int((after == labels).sum()) / len(labels)
    return Check(len(images), difference, int((before == after).sum()), accuracy)


def refuse_disagreement(result: Check, int8: bool) -> None:
    """Raises Failure where a file does not answer as its net within the limits above; in float these leave only rounding."""
    if not int8 and not result.difference <= MAX_DIFFERENCE:
        raise Failure(
            f"the file does not answer as the net: a probability differs by {result.difference:.2g}, more than "
            f"{MAX_DIFFERENCE:g}, so it was not kept; another --to, or another version of torch or onnxruntime may do"
        )
    agreement = result.agreeing / result.images
    loss = result.accuracy[0] - result.accuracy[1] if result.accuracy else 0.0
    if int8 and (result.difference == math.inf or agreement < MIN_AGREEMENT or loss > MAX_ACCURACY_LOSS):
        raise Failure(
            f"int8 changes too much of this net: {agreement:.1%} of the decisions agree (at least {MIN_AGREEMENT:.0%} must), "
            f"{100 * loss:.1f} points of accuracy are lost (at most {100 * MAX_ACCURACY_LOSS:.0f} may), so the file was "
            "not kept: leave --quantize out"
        )


# ---- How each format is written, and how what was written is run again.


class Probabilities(nn.Module):
    """A loaded net whose answers are float32 probabilities (B, classes)."""

    def __init__(self, net: LoadedNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Of uint8 images (B, C, H, W)."""
        return self.net.probabilities(self.net(images))


def runner_of(net: LoadedNet) -> Runner:
    """The net itself, as PyTorch computes it."""
    return torch.no_grad()(Probabilities(net).eval())


def write(net: LoadedNet, to: str, path: Path, calibration: Tensor | None = None) -> None:
    """Write a net in one of the formats. Raise Failure for a net that the format cannot express."""
    if to == "safetensors":  # as a run's own model.safetensors: what `cifar_lit.load` takes
        save_weights(path, net.net.state_dict(), net.card)
    elif to == "torch-export":
        program, extra = traced(net), {METADATA_FILE: json.dumps(metadata(net), ensure_ascii=False, indent=2)}
        content = io.BytesIO()  # torch aborts the process if a write to a file fails here
        with silenced():
            torch.export.save(program, content, extra_files=extra)
        path.write_bytes(content.getbuffer())
    else:
        model = onnx_model(net)
        path.write_bytes((model if calibration is None else quantised(model, calibration)).SerializeToString())


def open_file(path: Path, to: str) -> Runner:
    """Runs a file that `write` made; ONNX by onnxruntime on the CPU, on as many threads as torch uses."""
    if to == "safetensors":
        return runner_of(load_model_file(path))
    if to == "torch-export":
        with silenced(), path.open("rb") as file:
            return torch.no_grad()(torch.export.load(file).module())
    import onnxruntime

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["probabilities"], {"images": images.contiguous().numpy()})[0])


def metadata(net: LoadedNet) -> dict[str, str]:
    """What a user of an exported file must know, as texts: lists and numbers are JSON."""
    channels, height, width = net.card.input_shape
    colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
    return {
        "format": FORMAT,
        "net": net.card.net,
        "classes": json.dumps(net.card.classes, ensure_ascii=False),
        "image_size": json.dumps([height, width]),
        "channels": str(channels),
        "resize": net.card.resize,
        "preparation": f"upright by EXIF, transparent parts white, {RESIZES[net.card.resize]} (bicubic, antialiased)",
        "input": f"images: uint8 (batch, {channels}, {height}, {width}), {colours}, 0 to 255, not normalised",
        "output": f"probabilities: float32 (batch, {len(net.classes)}), in the order of classes",
        "card": json.dumps(asdict(net.card), ensure_ascii=False),
    }


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps what exporters print, log and warn from the console; what they raise goes through."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def traced(net: LoadedNet) -> ExportedProgram:
    """The graph of a net, from uint8 images of any batch to probabilities; raises Failure for a net that cannot be traced."""
    from torch.export import Dim, export

    example = torch.zeros(2, *net.card.input_shape, dtype=torch.uint8)  # a batch of 1 would be taken for a constant
    try:
        with silenced(), torch.no_grad():
            return export(Probabilities(net).eval(), (example,), dynamic_shapes={"images": {0: Dim("batch", min=1)}})
    except Exception as error:  # of many kinds, all internal to torch
        reason = first_line(error)
        raise Failure(
            f"torch cannot trace the net {net.card.net}: {reason}; --to safetensors keeps its weights"
        ) from error


def onnx_model(net: LoadedNet) -> ModelProto:
    """A net as an ONNX model with its metadata; raises Failure for one that ONNX cannot express, or hold in its 2 GiB."""
    program = traced(net)
    try:
        with silenced():
            exported = torch.onnx.export(
                program, (), dynamo=True, opset_version=OPSET, verbose=False,
                input_names=["images"], output_names=["probabilities"],
            )  # fmt: skip
        assert exported is not None
        model: ModelProto = exported.model_proto
        model.ByteSize()
    except Exception as error:
        raise Failure(f"torch cannot write the net {net.card.net} as ONNX: use --to torch-export") from error
    # The exporter's notes go, among them paths of this machine's source files, and the free dimension gets its name.
    free = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == free:
                dimension.dim_param = "batch"
    for part in (*model.graph.node, *model.graph.initializer, *model.functions, model.graph, model):
        del part.metadata_props[:]
        part.doc_string = ""
    model.producer_name = "cifar-lit"
    for name, text in metadata(net).items():
        model.metadata_props.add(key=name, value=text)
    return model


# ---- 8-bit ONNX: weights and the activations between them as int8, their ranges taken from training images.

LAYERS = ("Conv", "Gemm", "MatMul")
CALIBRATION_IMAGES = 512
CALIBRATION_BATCH = 64
MAX_FLOAT_FRACTION = 0.05  # of all weights: a layer at either end that holds more is not left in float


def quantised(model: ModelProto, images: Tensor) -> ModelProto:
    """The model, in float before, with quantise and dequantise operators around its layers (QDQ), its metadata kept.

    The least and greatest value of each activation over training images, uint8 (N, C, H, W), are its range: percentiles and
    entropy gained nothing on CIFAR-10 (JPEG). Weights have a scale for each channel. Activations are signed, which no processor's
    8-bit products overflow on. The first and the last layer stay in float where they hold few weights: there rounding costs most,
    of pixels and of logits, and saves least.

    Raises Failure where nothing is left to quantise, or onnxruntime cannot.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = ({"images": batch.contiguous().numpy()} for batch in images.split(CALIBRATION_BATCH))
    reader = SimpleNamespace(get_next=lambda: next(batches, None))
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
                        prepared, ready, reader, quant_format=QuantFormat.QDQ, per_channel=True,
                        activation_type=QuantType.QInt8, weight_type=QuantType.QInt8,
                        op_types_to_quantize=list(LAYERS), nodes_to_exclude=kept,
                    )  # fmt: skip
                    result: ModelProto = onnx.load(ready)
        except Exception as error:
            raise Failure(
                f"onnxruntime cannot quantise this net ({first_line(error)}): leave --quantize out"
            ) from error
    if not layers:
        raise Failure("this net has no layer that int8 would pay for: leave --quantize out")
    del result.metadata_props[:]
    result.metadata_props.extend(model.metadata_props)
    result.metadata_props.add(
        key="quantized", value=f"int8 weights and activations, calibrated on {len(images)} training images"
    )
    result.producer_name = model.producer_name
    return result


def _layers(model: ModelProto) -> tuple[list[str], list[str]]:
    """The names of the layers that are quantised, and of those that are kept in float."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    layers = [node for node in model.graph.node if node.op_type in LAYERS]
    weights = {node.name: sum(sizes.get(name, 0) for name in node.input) for node in layers}
    names = list(weights)
    ends = dict.fromkeys((*names[:1], *names[-1:]))
    kept = [name for name in ends if weights[name] <= MAX_FLOAT_FRACTION * sum(weights.values())]
    return [name for name in names if name not in kept], kept
