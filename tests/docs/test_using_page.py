"""docs/use-a-trained-net.md: its program prepares a picture for an exported file as in the test of the net."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.command_line import run_command
from doc_pages import DOCS, blocks, sections
from PIL import Image

import cifar_lit
from cifar_lit.inference.model_file import ModelCard, save_weights
from cifar_lit.models.registry import build_net


def marked(page: str, heading: str) -> str:
    """Return the statements of a section that use the run and the file of this test."""
    text = dict(sections(DOCS / page))[heading]
    (block,) = [block for block in blocks(text) if block.kind == "trained"]
    return block.text


def test_an_exported_file_is_used_with_the_steps_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'cifar-lit[export]'")
    run = Path("lightning_logs/folder-1")
    run.mkdir(parents=True)
    card = ModelCard("lenet", 1.0, [3, 24, 40], ["cat", "dog"], [0.5] * 3, [0.25] * 3)
    card = replace(card, coverage={"lac": [[0.5] * 9] * 2})
    torch.manual_seed(0)
    save_weights(run / "model.safetensors", build_net("lenet", **card.net_settings).state_dict(), card)
    noise = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save("cat.jpg")
    answer = run_command("export", run, "--to", "onnx")
    assert answer.code == 0, answer.err
    names: dict[str, object] = {}
    exec(compile(marked("use-a-trained-net.md", "Export"), "page", "exec"), names)
    net = cifar_lit.load(run)
    assert np.array_equal(names["images"], net.prepare("cat.jpg"))
    assert capsys.readouterr().out.split() == [net.predict("cat.jpg")[0].label]
    exec(compile(marked("probabilities.md", "Prediction sets"), "page", "exec"), {})
    assert capsys.readouterr().out == f"('{net.predict('cat.jpg')[0].label}',)\n"
