"""`export --to hub` writes a repository that the hub, this program and timm can read, whatever a run contains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from contract.command_line import assert_refused, metrics_of, run_command
from markdown_it import MarkdownIt
from PIL import Image

from cifar_lit import load
from cifar_lit.extras.hub.folder import FILES, model_card, without_places
from cifar_lit.models.registry import build_net
from cifar_lit.runs.model_file import ModelCard, save_weights

hub = pytest.importorskip("huggingface_hub", reason="pip install -e '.[hub]'")
EVIL = "a|b `c` <img src=x> [d](javascript:e) **f** & www.g.h http://i.j @k $l$ :m: ~~n~~\n---\n# o"


@pytest.fixture(autouse=True)
def here(working_folder: Path) -> None:
    """Run each test in its own working folder."""


def write_run(net: str, channels: int = 3, resize: str = "crop", **options: Any) -> Path:
    """Write a run folder with random weights and the results of a test."""
    run, classes = Path("run-1"), ["cat", "dog", "eel"]
    run.mkdir()
    card = ModelCard(net, 1.0, [channels, 32, 32], classes, [0.5] * channels, [0.2] * channels, options)
    card = replace(card, resize=resize)
    torch.manual_seed(0)
    save_weights(run / "model.safetensors", build_net(net, **card.net_settings).state_dict(), card)
    test = {"accuracy": 0.75, "loss": 0.5, "images": 8, "per_class": dict.fromkeys(classes, 0.75)}
    (run / "metrics.json").write_text(json.dumps({"recipe": "own", "dataset": "folder", "test": test}))
    return run


def rendered(text: str) -> str:
    """Return Markdown as HTML by the rules of the hub: tables, deletions, and addresses become links."""
    page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return page.render(text.partition("\n---\n")[2])


def test_the_folder_has_the_weights_and_a_card_that_the_hub_can_read(run_dir: Path) -> None:
    answer = run_command("export", run_dir, "--to", "hub", "out", "--license", "cc-by-4.0")
    assert answer.code == 0 and "  hf upload USER/NAME out" in answer.lines, answer.err
    assert {path.name for path in Path("out").iterdir()} == {*FILES}
    assert Path("out/model.safetensors").read_bytes() == (run_dir / "model.safetensors").read_bytes()
    metrics, card = metrics_of(run_dir), hub.ModelCard.load("out/README.md")
    (result,) = card.data.eval_results
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "cc-by-4.0", "cifar-lit", "image-classification"
    )  # fmt: skip
    assert result.metric_value == round(metrics["test"]["accuracy"], 6) and result.dataset_type == "shapes"
    low, high = metrics["test"]["interval"]
    assert f"| {100 * low:.2f} % to {100 * high:.2f} % |" in card.text
    for name, accuracy in metrics["test"]["per_class"].items():
        assert f"| {name} | {100 * accuracy:.2f} % |" in card.text
    data = metrics["data"]
    assert f"{data['train']} training, {data['val']} validation and {data['test']} test images of shapes." in card.text
    assert metrics["data"]["split"] in card.text and f"| {metrics['train_seconds']:,.1f} s |" in card.text
    assert f"expected calibration error is {metrics['test']['calibration']['error']}" in card.text
    thresholds = load(run_dir).card.reject
    assert thresholds and f"exceed {thresholds[0]} and {thresholds[1]}." in card.text
    shown = json.loads(Path("out/config.json").read_text())
    assert (shown["classes"], shown["net"], shown["coverage"]) == (list(load("out").classes), "lenet", None)
    assert load("out").card.coverage == load(run_dir).card.coverage is not None


def test_the_command_of_the_card_repeats_the_training(run_dir: Path) -> None:
    assert run_command("export", run_dir, "--to=hub", "out").code == 0
    assert "cifar-lit train --config config.yaml\n" in Path("out/README.md").read_text()
    answer = run_command("train", "--config", "out/config.yaml", "--logs", "again")
    assert answer.code == 0, answer.err
    (again,) = Path("again").iterdir()
    assert (again / "model.safetensors").read_bytes() == (run_dir / "model.safetensors").read_bytes()


def test_no_place_of_the_owners_machine_is_published() -> None:
    settings = {
        "recipe": "own", "logs": "secret", "seed_everything": 3, "ckpt_path": "secret/last.ckpt",
        "data": {"dataset": "folder", "root": "secret/photos", "cache_dir": "secret", "labels": "fine"},
        "finetune": {"weights": "/home/secret/weights.pt"},
        "trainer": {"callbacks": [{"init_args": {"dirpath": "secret", "path": ["~/secret", "C:\\secret", "a"]}}]},
        "model": {"lr": 0.1, "note": "https://secret:password@host"},
    }  # fmt: skip
    assert without_places(settings) == {
        "recipe": "own", "seed_everything": 3, "data": {"dataset": "folder", "labels": "fine"},
        "finetune": {"weights": None}, "trainer": {"callbacks": [{"init_args": {"path": [None, None, "a"]}}]},
        "model": {"lr": 0.1, "note": None},
    }  # fmt: skip


def test_text_of_a_run_means_nothing_in_the_card() -> None:
    card = ModelCard("lenet", 1.0, [3, 16, 16], ["a"], [0.5] * 3, [0.2] * 3)
    test = {"accuracy": 0.5, "loss": 1.0, "images": 2, "per_class": {EVIL: 0.5}}
    data = {"train": 900, "val": 100, "test": 50, "images": EVIL, "labels": EVIL, "split": EVIL}
    text = model_card(card, {"recipe": EVIL, "dataset": EVIL, "net": EVIL, "test": test, "data": data}, None, EVIL)
    page, plain = rendered(text), rendered(model_card(card, {"dataset": "x", "test": test}, None, "x"))
    shown = EVIL.replace("\n", "\\n").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert page.count(f"<td>{shown}</td>") == 4  # class, recipe, net and data
    assert f"<h1>{shown} on {shown}</h1>" in page
    for tag in ("<img", "<a ", "<em", "<strong", "<s>", "<code", "<h1", "<h2", "<hr"):
        assert page.count(tag) == plain.count(tag), tag
    assert "900 training, 100 validation and 50 test images of" in text
    front, _, body = text.partition("\n---\n")
    assert [mark for mark in ("www.g", "http:", " @k", " $l", ":m:") if mark in body] == []  # GitHub knows these too
    assert yaml.safe_load(front.removeprefix("---\n"))["license"] == EVIL


def test_an_existing_file_is_kept(run_dir: Path) -> None:
    Path("out").mkdir()
    Path("out/README.md").symlink_to("elsewhere")
    assert_refused(run_command("export", run_dir, "--to", "hub", "out"), 2, "out/README.md exists: name another folder")
    assert [path.name for path in Path("out").iterdir()] == ["README.md"] and not Path("elsewhere").exists()


def test_a_run_without_a_test_has_no_card(run_dir: Path) -> None:
    bare = Path("bare")
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((run_dir / "model.safetensors").read_bytes())
    (bare / "metrics.json").write_text(json.dumps({**metrics_of(run_dir), "test": None}))
    assert_refused(run_command("export", bare, "--to", "hub", "out"), 2, "bare has no test results for a model card")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("net", "channels", "options"),
    [
        ("timm/mobilenetv3_small_050", 3, {}),
        ("timm/mobilenetv3_small_050", 1, {"side": 48}),
        ("timm/vit_tiny_patch16_224.augreg_in21k", 4, {}),  # its image size is fixed
    ],
)
def test_timm_builds_the_same_net_from_the_folder(net: str, channels: int, options: dict[str, int]) -> None:
    timm = pytest.importorskip("timm", reason="pip install -e '.[finetune]'")
    run = write_run(net, channels, **options)
    answer = run_command("export", run, "--to", "hub", "out")
    assert answer.code == 0, answer.err
    loaded, ours = timm.create_model("local-dir:out", pretrained=True).eval(), load("out")
    data = timm.data.resolve_model_data_config(loaded)
    side = options.get("side", 32)
    assert [*data["input_size"]] == [channels, side, side]
    assert (*data["mean"], *data["std"]) == (*[0.5] * channels, *[0.2] * channels)
    pixels = torch.randint(0, 256, (2, channels, 32, 32), dtype=torch.uint8)
    images = torch.nn.functional.interpolate((pixels / 255 - 0.5) / 0.2, (side, side), mode="bilinear")
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), ours(pixels), atol=1e-5, rtol=1e-4)
    assert hub.ModelCard.load("out/README.md").data.library_name == "timm"


@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_timm_prepares_a_picture_like_the_test_of_the_net(resize: str) -> None:
    timm = pytest.importorskip("timm", reason="pip install -e '.[finetune]'")
    run_command("export", write_run("timm/mobilenetv3_small_050", resize=resize), "--to", "hub", "out")
    config, _, _ = timm.models._hub.load_model_config_from_path("out")
    transform = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=config))
    colours = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).resize((96, 64), Image.Resampling.BICUBIC)
    ours = (load("out").prepare(picture)[0] / 255 - 0.5) / 0.2
    assert float((transform(picture) - ours).abs().mean()) < 0.02  # rounding; values are in -2.5 … 2.5


def test_a_folder_from_which_timm_would_build_another_net_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm", reason="pip install -e '.[finetune]'")
    run, create = write_run("timm/mobilenetv3_small_050"), timm.create_model

    def without_weights(name: str, **settings: object) -> torch.nn.Module:
        return create(name, **{**settings, "pretrained": False})

    monkeypatch.setattr(timm, "create_model", without_weights)
    assert_refused(run_command("export", run, "--to", "hub", "out"), 1, "timm loads another net from these files")
    assert not Path("out").exists()
