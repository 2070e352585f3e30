"""What the stress tests compare runs by."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stress.compare_runs import comparable, differences, unequal

from cifar_lit.training.checkpoint import AtomicCheckpointIO

B = {"path": "here/last.ckpt", "n": torch.tensor([3, 4]), "seconds": 1.0}
VALUE = {"a": [torch.tensor([1.0, -200.0]), 0.5, 7, "x"], "b": B}
HALF = torch.tensor([0.5, 0.5], dtype=torch.float16)


@pytest.mark.parametrize(
    ("place", "value", "exactly", "rounded"),
    [
        ("b", {**B, "path": "there/last.ckpt", "seconds": 2.0}, [], []),
        ("b", {**B, "path": "here/best.ckpt"}, [".b.path"], [".b.path"]),
        ("b", {**B, "n": torch.tensor([3, 5])}, [".b.n"], [".b.n"]),
        ("a", [torch.tensor([1.0 + 5e-6, -200.001]), 0.5 - 5e-6, 7, "x"], [".a.0", ".a.1"], []),
        ("a", [torch.tensor([1.00002, -200.0]), 0.5, 7, "x"], [".a.0"], [".a.0"]),
        ("a", [torch.tensor([1.0, float("nan")]), float("nan"), 7, "x"], [".a.0", ".a.1"], [".a.0", ".a.1"]),
        ("a", [torch.tensor([1.0, -200.0]).double(), 0.5, 7.0, "x"], [".a.0", ".a.2"], [".a.0", ".a.2"]),
        ("a", [torch.tensor([1.0, -200.0]), 0.5, 7], [".a"], [".a"]),
        ("c", None, [".c"], [".c"]),
    ],
)
def test_any_difference_between_two_values_is_known_by_its_place(
    place: str, value: object, exactly: list[str], rounded: list[str]
) -> None:
    first, second = comparable(VALUE), comparable({**VALUE, place: value})
    assert unequal(first, second) == exactly
    assert unequal(first, second, tolerance=1e-5) == rounded


def test_half_precision_is_rounded_to_what_it_can_hold() -> None:
    assert unequal(HALF, torch.nextafter(HALF, HALF + 1), tolerance=1e-5) == []
    assert unequal(HALF, HALF + 0.01, tolerance=1e-5) == [""]


def make_run(folder: Path, weight: float = 1.0) -> Path:
    checkpoint = {"state_dict": {"weight": torch.tensor([weight])}, "global_step": 3}
    for name in ("last.ckpt", "best.ckpt"):
        AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "checkpoints" / name)
    card = {"card": json.dumps({"net": "lenet", "std": [weight]}), "format": "1"}
    save_file({"weight": torch.tensor([weight])}, folder / "model.safetensors", metadata=card)
    (folder / "metrics.csv").write_text("step\n3\n")
    (folder / "metrics.json").write_text(json.dumps({"test": {"accuracy": weight}, "train_seconds": random.random()}))
    return folder


def test_runs_are_the_same_or_it_is_said_in_what_they_differ(tmp_path: Path) -> None:
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
