"""Files that want to run code or to take memory, each read as a user would: refused in one line, soon, and nothing runs.

All of them with -m stress; of each kind some in any other run.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from security.hostile_files import ARCHIVES, CONFIGS, IMAGES, READ, Maker
from security.hostile_models import CHECKPOINTS, MODELS
from security.sandbox import Answer, Sandbox, read_apart
from stress.forked import warm

from cifar_lit.cli import main
from cifar_lit.cli.errors import explain_error
from cifar_lit.inference.load import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and programs are watched as Linux shows them")

KINDS: dict[str, dict[str, Maker]] = {
    "model": MODELS, "checkpoint": CHECKPOINTS, "configuration": CONFIGS, "archive": ARCHIVES, "image": IMAGES,
}  # fmt: skip
SHORT = {"model": 3, "checkpoint": 6, "configuration": 6, "archive": 6, "image": 4}  # one of so many is read in the short form
SMALL = """seed_everything: 3
trainer: {accelerator: cpu, max_epochs: 1, precision: 32-true}
model: {net: lenet, lr: 0.05}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 200, val_size: 40, batch_size: 32}
"""


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a training with its test, beside its recipe small.yaml."""
    warm()  # here and not in each process, so that imports are not counted
    folder = tmp_path_factory.mktemp("genuine")
    (folder / "small.yaml").write_text(SMALL)
    answer = read_apart(folder, lambda: main(["train", "--recipe", str(folder / "small.yaml"), "--logs", str(folder / "runs")]))
    assert answer.code == 0, answer.lines
    return folder / "runs" / "small-1"


@pytest.fixture
def sandboxes(genuine: Path) -> Iterator[Callable[[], Sandbox]]:
    """Makes sandboxes, each with a copy of the genuine run."""
    with tempfile.TemporaryDirectory(prefix="cifar-lit-hostile-") as temporary:

        def make() -> Sandbox:
            sandbox = Sandbox(Path(tempfile.mkdtemp(dir=temporary)))
            shutil.copytree(genuine, sandbox.run)
            (sandbox.folder / "small.yaml").write_text(SMALL)
            return sandbox

        yield make


def read(sandbox: Sandbox, kind: str, path: Path) -> Answer:
    """Reads a file as a user would who has it."""
    if kind == "model":
        return read_apart(sandbox.folder, lambda: load_model(path), sandbox.trace)
    argv = _argv(sandbox, kind, path)
    return read_apart(sandbox.folder, lambda: main(argv), sandbox.trace)


def load_model(path: Path) -> int:
    """Reads a model as the commands do that use one; the exit code."""
    try:
        load(path)
    except Exception as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0


def _argv(sandbox: Sandbox, kind: str, path: Path) -> list[str]:
    logs = ["--logs", str(sandbox.folder / "runs")]
    fit = ["fit", "--recipe", str(sandbox.folder / "small.yaml"), *logs]
    if path == sandbox.checkpoint:
        return ["test", "--ckpt_path", str(path), *logs]
    if kind == "configuration":
        return [*fit, "--config", str(path)]
    if kind == "archive":  # and nowhere to download it from
        nowhere = str(sandbox.folder / "none")
        return [*fit, "--dataset", "cifar10", "--data-dir", str(sandbox.folder), "--data.url", nowhere]
    good = sandbox.folder / "images" / "b"
    good.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (16, 16)).save(good / f"{number}.png")
    images = str(sandbox.folder / "images")
    return [*fit, "--dataset", "folder", "--data-dir", images, "--data.num_classes=null", "--data.val_size=1"]


@pytest.mark.stress
def test_every_hostile_file_is_refused_in_one_line_soon_in_little_memory_and_nothing_runs(
    sandboxes: Callable[[], Sandbox], long_form: bool, write_counts: Callable[[dict[str, Any]], None]
) -> None:
    answers: dict[str, Answer] = {}
    for kind, makers in KINDS.items():
        for name in list(makers)[:: 1 if long_form else SHORT[kind]]:
            sandbox = sandboxes()
            answers[f"{kind}: {name}"] = read(sandbox, kind, makers[name](sandbox))
    harmless = {name for name in answers if name.partition(": ")[2] in READ}
    wrong = {name: one for name, one in answers.items() if name not in harmless and not one.refused}
    wrong |= {name: answers[name] for name in harmless if answers[name].code != 0 or not answers[name].cheap_and_harmless}
    headline = {"hostile files": len(answers), "refused, or read without harm": len(answers) - len(wrong)}
    rows = {name: asdict(one) for name, one in answers.items()}
    write_counts({"answers": rows, "headline": headline, "unit": dict.fromkeys(headline, "files")})
    assert wrong == {}


def test_there_are_at_least_sixty_files_and_twelve_of_each_kind() -> None:
    assert sum(len(files) for files in KINDS.values()) >= 60
    assert min(len(files) for files in KINDS.values()) >= 12


@pytest.mark.parametrize("kind", ["checkpoint", "model"])
def test_what_is_refused_is_made_of_what_would_be_taken(kind: str, sandboxes: Callable[[], Sandbox]) -> None:
    """The genuine file in the place of the hostile one gives no complaint: what is refused is the harm."""
    sandbox = sandboxes()
    answer = read(sandbox, kind, getattr(sandbox, kind))
    assert (answer.code, answer.lines, answer.ran) == (0, [], "")


def test_code_that_runs_is_noticed(tmp_path: Path) -> None:
    answer = read_apart(tmp_path, lambda: __import__("os").system("true") or print("cifar-lit: no", file=sys.stderr) or 1)
    assert answer.ran == "os.system"
    assert not answer.refused
