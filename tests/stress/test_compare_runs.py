"""The comparison of runs that the stress tests use."""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from stress.compare_runs import differences

from cifar_lit.training.checkpoint import AtomicCheckpointIO


def make_run(folder: Path, weight: float = 1.0) -> Path:
    checkpoint = {"state_dict": {"weight": torch.tensor([weight])}, "global_step": 3}
    for name in ("last.ckpt", "best.ckpt"):
        AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "checkpoints" / name)
    card = {"card": json.dumps({"net": "lenet", "std": [weight]}), "format": "1"}
    save_file({"weight": torch.tensor([weight])}, folder / "model.safetensors", metadata=card)
    (folder / "metrics.csv").write_text("step\n3\n")
    (folder / "metrics.json").write_text(json.dumps({"test": {"accuracy": weight}, "train_seconds": random.random()}))
    return folder


def test_every_difference_between_two_runs_is_listed(tmp_path: Path) -> None:
    expected = make_run(tmp_path / "expected")
    assert differences(make_run(tmp_path / "same"), expected) == []
    model = [".model.safetensors.metadata.card.std.0", ".model.safetensors.weight"]
    places = [".best.ckpt.state_dict.weight", ".last.ckpt.state_dict.weight", ".metrics.json.test.accuracy", *model]
    assert differences(make_run(tmp_path / "other", 1.0000001), expected) == places
    assert differences(tmp_path / "other", expected, tolerance=1e-6) == []
    assert differences(make_run(tmp_path / "far", 1.0001), expected, tolerance=1e-6) == places
    left = make_run(tmp_path / "left")
    (left / "metrics.csv").write_text("step\n3\n3\n")
    for name in (".lock", "metrics.json.part"):
        (left / name).touch()
    assert differences(left, expected) == [".metrics.json.part", ".metrics.csv.rows"]
