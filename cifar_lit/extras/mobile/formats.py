"""`cifar-lit mobile RUN`: export to phones, one image at a time: LiteRT (`.tflite`) and Core ML (`.mlpackage`, zipped).

A LiteRT file is run and compared with its net. Core ML runs only on macOS, so its file is checked by its structure:
names, types and shapes of inputs and outputs, and the metadata.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from cifar_lit.cli.export import export
from cifar_lit.data.decode import silent_stderr
from cifar_lit.errors import Failure, first_line
from cifar_lit.inference.export import FORMATS, Format, Options, Probabilities, Runner, metadata, silenced
from cifar_lit.runs.model_file import LoadedNet

DESCRIPTION = (
    "Export the net of a run for phones, as LiteRT or Core ML. Input: one image. Output: probabilities. A LiteRT file "
    "is kept only if it reproduces the net's predictions on test images; of a Core ML file, the structure is checked."
)


def mobile(argv: list[str]) -> None:
    """Export a net, see `cli.export`."""
    FORMATS.update(MOBILE)
    export(argv, "mobile", DESCRIPTION, "litert or coreml")


class Named(nn.Module):
    """A net whose outputs have names."""

    def __init__(self, net: LoadedNet, options: Options) -> None:
        super().__init__()
        self.net, self.predict, self.names = net, Probabilities(net, options), options.outputs

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the outputs for pixels in 0 … 255, of any dtype."""
        outputs = self.predict.outputs(self.net.net((images.float() / 255 - self.net.mean) / self.net.std))
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return dict(zip(self.names, outputs, strict=True))


@silenced()
@silent_stderr()
def write_litert(net: LoadedNet, path: Path, options: Options) -> None:
    """Write a LiteRT file, with the class names and the metadata as its associated files (a zip archive at its end)."""
    import litert_torch

    example = torch.zeros(1, *net.card.input_shape, dtype=torch.uint8)
    try:
        model = litert_torch.convert(Named(net, options).eval(), sample_kwargs={"images": example})
        content = model.model_content()  # its `export` aborts the process if the disk is full
    except Exception as error:  # the converter raises many kinds of errors
        raise Failure(f"litert-torch cannot convert this net ({first_line(error)}): use --to onnx") from error
    path.write_bytes(content)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("labels.txt", "\n".join(net.classes))
        archive.writestr("metadata.json", json.dumps(metadata(net, options), ensure_ascii=False))


@silent_stderr()
def open_litert(path: Path) -> Runner:
    """Return a runner from uint8 images (B, C, H, W) to probabilities (B, classes)."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=torch.get_num_threads())
    interpreter.allocate_tensors()  # logs; otherwise the first run does
    run = interpreter.get_signature_runner()
    return lambda images: torch.cat(
        [torch.from_numpy(run(images=one.numpy())["probabilities"]) for one in images.split(1)]
    )


@silenced()
def write_coreml(net: LoadedNet, path: Path, options: Options) -> None:
    """Write a zipped ML Program with an image as input. It computes in float16. Raise Failure for a wrong structure."""
    import coremltools as ct

    channels, height, width = net.card.input_shape
    if channels not in (1, 3):
        raise Failure(f"Core ML images are grey or RGB, but this net takes {channels} channels: use --to onnx")
    layout = ct.colorlayout.RGB if channels == 3 else ct.colorlayout.GRAYSCALE
    image = ct.ImageType(name="images", shape=(1, channels, height, width), color_layout=layout)
    named = Named(net, options).eval()
    try:
        program = torch.export.export(named, (torch.zeros(image.shape.symbolic_shape),))
        program = program.run_decompositions({})
        for node in program.graph.nodes:  # coremltools needs the stride, which is the kernel size by default
            if node.target == torch.ops.aten.max_pool2d.default and len(node.args) == 2:
                node.args = (*node.args, node.args[1])
        outputs = [ct.TensorType(name=name) for name in named.names]
        model = ct.convert(program, inputs=[image], outputs=outputs, minimum_deployment_target=ct.target.iOS16)
        model.user_defined_metadata.update({**metadata(net, options), "input": "images: an image, not normalised"})
        with TemporaryDirectory() as folder:
            package = Path(folder) / "package" / "model.mlpackage"
            model.save(str(package))
            written = ct.models.MLModel(str(package), skip_model_load=True).get_spec().description
            archive = shutil.make_archive(f"{folder}/archive", "zip", package.parent)
            shutil.copyfile(archive, path)
    except OSError:  # a full disk
        raise
    except Exception as error:
        raise Failure(f"coremltools cannot convert this net ({first_line(error)}): use --to onnx") from error
    (read,) = written.input
    shapes = {output.name: tuple(output.type.multiArrayType.shape) for output in written.output}
    all_shapes = {"probabilities": (1, len(net.classes)), "unknown": (1,), "prediction_set": (1, len(net.classes))}
    expected = {name: all_shapes[name] for name in named.names}
    size = (read.type.imageType.height, read.type.imageType.width)
    if (read.name, size, shapes) != ("images", (height, width), expected):
        raise Failure(f"the Core ML file has inputs or outputs {shapes} instead of {expected}: use --to onnx")


MOBILE = {
    "litert": Format(
        ".tflite",
        write_litert,
        open_litert,
        (
            "  runner = ai_edge_litert.interpreter.Interpreter(FILE).get_signature_runner()",
            "  runner(images=image)  # uint8 (1, C, H, W)",
        ),
        ("litert_torch", "ai_edge_litert"),
        "litert",
    ),
    "coreml": Format(".mlpackage.zip", write_coreml, None, ("  unzip PATH",), ("coremltools",), "coreml"),
}
