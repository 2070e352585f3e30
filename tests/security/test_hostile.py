"""Files that try to run code or exhaust memory: each is refused with one line in time, and nothing is executed.

-m stress reads all of them, other runs a sample of each kind.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.command_line import draw_folder
from security.hostile_files import ARCHIVES, BESIDE, CONFIGS, IMAGES, READ
from security.hostile_models import CHECKPOINTS, MODELS, Maker
from security.sandbox import SMALL, Answer, read_in_fork

from cifar_lit.cli import main
from cifar_lit.cli.errors import explain_error
from cifar_lit.errors import Failure
from cifar_lit.inference.load import load
from cifar_lit.training.checkpoint import read_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory and programs in Linux's /proc")

# Files of each kind, their path beside the copy of a genuine run, and the step with which the short form samples them.
KINDS: dict[str, tuple[dict[str, Maker], str, int]] = {
    "model": (MODELS, "run/model.safetensors", 6),
    "checkpoint": (CHECKPOINTS, "run/checkpoints/best.ckpt", 10),
    "configuration": (CONFIGS, "own.yaml", 10),
    "archive": (ARCHIVES, "cifar-10-python.tar.gz", 6),
    "image": (IMAGES, "images/a/0.png", 8),
}
FIT = ["fit", "--recipe", "small.yaml", "--logs", "runs"]


def read(folder: Path, genuine: Path, kind: str, maker: Maker | None) -> Answer:
    """Read the maker's file, or the genuine one, as a user would."""
    shutil.copytree(genuine, folder / "run")
    for name, text in {"small.yaml": SMALL, **BESIDE}.items():
        (folder / name).write_text(text)
    path = folder / KINDS[kind][1]
    path.parent.mkdir(parents=True, exist_ok=True)
    if maker:
        maker(path)
    if kind == "model":
        return read_in_fork(folder, lambda: load_model(path))
    argv = ["test", "--ckpt_path", "run/checkpoints/best.ckpt", "--logs", "runs"]
    if kind == "configuration" and os.path.lexists(path):  # else the maker changed the run's config.yaml
        argv = [*FIT, "--config", path.name]
    if kind == "archive":  # without a source to download it from
        own = (f"--data.{name}=null" for name in ("image_size", "num_classes"))
        argv = [*FIT, "--dataset", "cifar10", "--data-dir", ".", "--data.url", "none", *own]
    if kind == "image":
        draw_folder(folder / "images", {"b": 4})
        argv = [*FIT, "--dataset", "folder", "--data-dir", "images", "--data.num_classes=null", "--data.val_size=1"]
    return read_in_fork(folder, lambda: main(argv))


def load_model(path: Path) -> int:
    """Load a model as the commands do and return the exit code."""
    try:
        load(path)
    except Exception as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0


def test_every_hostile_file_is_refused_with_one_line_within_the_limits_and_nothing_is_executed(
    genuine: Path, long_form: bool, write_counts: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    answers: dict[str, Answer] = {}
    for kind, (makers, _, step) in KINDS.items():
        for name in list(makers)[:: 1 if long_form else step]:
            folder = tmp_path / str(len(answers))
            answers[f"{kind}: {name}"] = read(folder, genuine, kind, makers[name])
            shutil.rmtree(folder)
    wrong = {
        name: one
        for name, one in answers.items()
        if not (one.harmless and one.code == 0 if name.partition(": ")[2] in READ else one.refused)
    }
    headline = {"hostile files": len(answers), "refused, or read without harm": len(answers) - len(wrong)}
    rows = {name: asdict(one) for name, one in answers.items()}
    write_counts({"answers": rows, "headline": headline, "unit": dict.fromkeys(headline, "files")})
    assert wrong == {}


REASONS = {
    "a bytearray of 2 GB in the pickle of a zip": "would execute code",
    "the same in the last pickle of the old format": "would execute code",
    "a call of a storage's type for 2 GB": "would execute code",
    "a tuple that becomes a torch.Size 5000 times": "more than 1,000,000 copied values",
    "a dict that is copied into 5000 others": "more than 1,000,000 copied values",
    "20,000 views of one storage": "more than 30,000 calls",
    "8 million empty dicts": "more than 500,000 opcodes",
    "a key of 60 nested tuples with two equal items": "keys of an unsupported kind",
    "100,000 keys of equal hash": "keys of an unsupported kind",
    "a storage in the old format that claims 4 GB": "numbers in tensors",
    "weights on the meta device": "a tensor of an unsupported kind",
}


@pytest.mark.parametrize("name", REASONS)
def test_what_a_pickle_demands_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, path)
    CHECKPOINTS[name](path)
    with pytest.raises(Failure, match=REASONS[name]):
        read_checkpoint(path)


@pytest.mark.parametrize("kind", ["checkpoint", "model"])
def test_the_genuine_file_is_accepted_in_place_of_a_hostile_one(kind: str, genuine: Path, tmp_path: Path) -> None:
    answer = read(tmp_path / "sandbox", genuine, kind, None)
    assert (answer.code, answer.lines, answer.ran) == (0, [], [])


def test_the_sandbox_detects_executed_code(tmp_path: Path) -> None:
    answer = read_in_fork(tmp_path, lambda: os.system("mkdir ran") or print("cifar-lit: no", file=sys.stderr) or 1)
    assert answer.ran == ["os.system", "a trace was left"]
    assert not answer.refused
