"""LiteRT and Core ML files. Their packages are not among those of the other tests."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cifar_lit.extras.mobile.formats import MOBILE, Named
from cifar_lit.inference import export as module
from cifar_lit.inference.export import Options, Probabilities, export
from cifar_lit.runs.card import Coverage
from cifar_lit.runs.model_file import LoadedNet, load_model_file
from cifar_lit.runs.run_data import RunImages

IMAGES = torch.randint(0, 256, (9, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
SAMPLE = RunImages(IMAGES, None, "noise")
OPTIONS = Options(reject=0.05, coverage=Coverage(0.7, "aps"))


@pytest.fixture(autouse=True)
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMATS", {**module.FORMATS, **MOBILE})


@pytest.fixture
def net(run: Path) -> LoadedNet:
    """Return a net whose threshold for unknown images lies among the scores of the images."""
    loaded = load_model_file(run)
    with torch.no_grad():
        score = float(-loaded(IMAGES).logsumexp(1).median())
    scores = {kind: [[number / 100 for number in range(100)]] * 4 for kind in ("lac", "aps")}
    card = replace(loaded.card, temperature=0.5, reject=[score, score], coverage=scores)
    return LoadedNet(loaded.net, card).eval()


def test_the_net_to_convert_normalises_and_names_its_outputs(net: LoadedNet) -> None:
    card = replace(net.card, mean=[0.2, 0.4, 0.7], std=[0.1, 0.3, 0.25])
    predict = Probabilities(LoadedNet(net.net, card).eval(), OPTIONS)
    with torch.no_grad():
        outputs = Named(LoadedNet(net.net, card).eval(), OPTIONS)(IMAGES)
        probabilities, unknown, sets = predict(IMAGES)
    torch.testing.assert_close(outputs["probabilities"], probabilities)
    assert [*outputs] == ["probabilities", "unknown", "prediction_set"]
    assert torch.equal(outputs["unknown"], unknown) and torch.equal(outputs["prediction_set"], sets)
    assert probabilities.std() > 0.01


def test_a_litert_file_predicts_the_same_as_its_net(
    net: LoadedNet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("litert_torch", reason="pip install -e '.[litert]'")
    from ai_edge_litert.interpreter import Interpreter

    path = tmp_path / "net.tflite"
    capfd.readouterr()  # messages of imports
    result, _ = export(net, "litert", path, SAMPLE, OPTIONS)
    assert capfd.readouterr() == ("", "")
    assert result is not None and (result.agreeing, result.difference < 1e-5) == (9, True)
    run = Interpreter(str(path)).get_signature_runner()
    with torch.no_grad():
        _, unknown, sets = Probabilities(net, OPTIONS)(IMAGES)
    outputs = [run(images=image.numpy()) for image in IMAGES.split(1)]
    assert [bool(each["unknown"]) for each in outputs] == unknown.tolist()
    assert [each["prediction_set"][0].tolist() for each in outputs] == sets.tolist()
    assert unknown.unique().tolist() == sets.unique().tolist() == [False, True]
    with zipfile.ZipFile(path) as archive:
        assert archive.read("labels.txt").decode().split("\n") == list(net.classes)
        assert json.loads(archive.read("metadata.json")) == module.metadata(net, OPTIONS)


def test_a_core_ml_file_has_the_structure_of_its_net(net: LoadedNet, tmp_path: Path) -> None:
    models = pytest.importorskip("coremltools", reason="pip install -e '.[coreml]'").models
    assert export(net, "coreml", tmp_path / "net.zip", SAMPLE, OPTIONS) == (None, {})
    with zipfile.ZipFile(tmp_path / "net.zip") as archive:
        archive.extractall(tmp_path)
    spec = models.MLModel(str(tmp_path / "model.mlpackage"), skip_model_load=True).get_spec()
    (image,), outputs = spec.description.input, spec.description.output
    assert (image.name, image.type.imageType.height, image.type.imageType.width) == ("images", 32, 32)
    assert {output.name: tuple(output.type.multiArrayType.shape) for output in outputs} == {
        "probabilities": (1, 4),
        "unknown": (1,),
        "prediction_set": (1, 4),
    }
    metadata = dict(spec.description.metadata.userDefined)
    assert json.loads(metadata["classes"]) == list(net.classes) and metadata["reject"] == "0.05"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize(("to", "package"), [("litert", "litert_torch"), ("coreml", "coremltools")])
def test_a_full_disk_raises_an_os_error_without_aborting_the_process(to: str, package: str, net: LoadedNet) -> None:
    pytest.importorskip(package, reason=f"pip install -e '.[{to}]'")
    with pytest.raises(OSError, match="No space left on device"):
        MOBILE[to].write(net, Path("/dev/full"), Options())
