"""8-bit ONNX: weights and the activations between them as int8, their ranges taken from training images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cifar_lit.errors import Failure
from cifar_lit.use.export_formats import silenced

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

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
