"""Files that want to run code or to take memory, each read as a user would: refused in one line, soon, and nothing runs.

All of them with -m stress; of each kind some in any other run.
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
from contract.command_line import draw_folder
from security.hostile_files import ARCHIVES, BESIDE, CONFIGS, IMAGES, READ
from security.hostile_models import CHECKPOINTS, MODELS, Maker
from security.sandbox import SMALL, Answer, read_apart

from cifar_lit.cli import main
from cifar_lit.cli.errors import explain_error
from cifar_lit.inference.load import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and programs are watched as Linux shows them")

# of each kind where the file lies beside the copy of a genuine run, and one of how many is read in the short form
KINDS: dict[str, tuple[dict[str, Maker], str, int]] = {
    "model": (MODELS, "run/model.safetensors", 3),
    "checkpoint": (CHECKPOINTS, "run/checkpoints/best.ckpt", 6),
    "configuration": (CONFIGS, "own.yaml", 6),
    "archive": (ARCHIVES, "cifar-10-python.tar.gz", 6),
    "image": (IMAGES, "images/a/0.png", 4),
}
FIT = ["fit", "--recipe", "small.yaml", "--logs", "runs"]


def read(folder: Path, genuine: Path, kind: str, maker: Maker | None) -> Answer:
    """Reads a file of the maker, or the genuine one, as a user would who has it."""
    shutil.copytree(genuine, folder / "run")
    for name, text in {"small.yaml": SMALL, **BESIDE}.items():
        (folder / name).write_text(text)
    path = folder / KINDS[kind][1]
    path.parent.mkdir(parents=True, exist_ok=True)
    if maker:
        maker(path)
    if kind == "model":
        return read_apart(folder, lambda: load_model(path))
    argv = ["test", "--ckpt_path", "run/checkpoints/best.ckpt", "--logs", "runs"]
    if kind == "configuration" and os.path.lexists(path):  # else it is the one beside the checkpoint
        argv = [*FIT, "--config", path.name]
    if kind == "archive":  # and nowhere to download it from
        own = (f"--data.{name}=null" for name in ("image_size", "num_classes"))
        argv = [*FIT, "--dataset", "cifar10", "--data-dir", ".", "--data.url", "none", *own]
    if kind == "image":
        draw_folder(folder / "images", {"b": 4})
        argv = [*FIT, "--dataset", "folder", "--data-dir", "images", "--data.num_classes=null", "--data.val_size=1"]
    return read_apart(folder, lambda: main(argv))


def load_model(path: Path) -> int:
    """Reads a model as the commands do that use one; the exit code."""
    try:
        load(path)
    except Exception as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0


def test_every_hostile_file_is_refused_in_one_line_soon_in_little_memory_and_nothing_runs(
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


@pytest.mark.parametrize("kind", ["checkpoint", "model"])
def test_what_is_refused_is_made_of_what_would_be_taken(kind: str, genuine: Path, tmp_path: Path) -> None:
    """The genuine file in the place of the hostile one gives no complaint: what is refused is the harm."""
    answer = read(tmp_path / "sandbox", genuine, kind, None)
    assert (answer.code, answer.lines, answer.ran) == (0, [], [])


def test_code_that_runs_is_noticed(tmp_path: Path) -> None:
    answer = read_apart(tmp_path, lambda: os.system("mkdir ran") or print("cifar-lit: no", file=sys.stderr) or 1)
    assert answer.ran == ["os.system", "a trace was left"]
    assert not answer.refused
