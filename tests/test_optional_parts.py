"""The package trains without any of its optional parts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from contract.command_line import run_process
from test_house import PACKAGE

from cifar_lit.cli.main import OWN
from cifar_lit.features import FEATURES as FEATURE_NAMES

EXTRAS = [PACKAGE / "extras" / name for name in ("hub.py", "label", "serve")]
FEATURES = [path for path in sorted((PACKAGE / "features").iterdir()) if path.stem in FEATURE_NAMES]

# In a fork for each folder, trains with the package in it, then runs further lines, and writes the exit codes. The
# forks share the libraries, which take longer to import than the training.
PROGRAM = """
import contextlib, json, os, sys
import lightning.pytorch.cli, tensorboard, torchvision
train = "fit --recipe quickstart --net lenet --accelerator cpu --data.count 60 --data.val_size 20 --epochs 1"
for folder, *lines in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        with open("out.txt", "w") as out, open("err.txt", "w") as err:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                import cifar_lit
                from cifar_lit.cli import main
                codes = [main(line.split()) for line in (train, *lines)]
        with open("codes.json", "w") as file:
            json.dump([cifar_lit.__file__, codes], file)
        os._exit(0)
    os.wait()
"""


def package_without(part: Path, folder: Path) -> None:
    """Copy the package to `folder` without a file or folder."""
    copy = folder / "cifar_lit"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    deleted = copy / part.relative_to(PACKAGE)
    if deleted.is_dir():
        shutil.rmtree(deleted)
    else:
        deleted.unlink()


def further_lines(part: Path) -> list[str]:
    """Return the command lines that a package without this part refuses."""
    if part.parent.name == "features":
        return [f"fit --recipe quickstart --{part.stem} true"]
    module = ".".join(part.relative_to(PACKAGE.parent).with_suffix("").parts)
    return [name for name, target in OWN.items() if target.startswith((f"{module}.", f"{module}:"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Train without each part. Return the folders with the copy of the package, exit codes and output, by part."""
    folders = {part: tmp_path_factory.mktemp(part.stem) for part in (*EXTRAS, *FEATURES)}
    jobs = []
    for part, folder in folders.items():
        package_without(part, folder)
        jobs.append([str(folder), *further_lines(part)])
    answer = run_process([sys.executable, "-c", PROGRAM, json.dumps(jobs)], tmp_path_factory.mktemp("server"))
    assert answer.code == 0, answer.err
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("part", (*EXTRAS, *FEATURES), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_training_succeeds_without_an_optional_part_whose_commands_and_flags_are_then_unknown(
    part: Path, trained: dict[Path, Path]
) -> None:
    folder, lines = trained[part], further_lines(part)
    errors = (folder / "err.txt").read_text()
    file, codes = json.loads((folder / "codes.json").read_text())
    assert Path(file).parent == folder / "cifar_lit"
    assert codes == [0, *[2 if part in FEATURES else 1] * len(lines)], errors
    refusals = [line for line in errors.splitlines() if line.startswith("cifar-lit: ")]
    if part in FEATURES:
        assert f"there is no flag --{part.stem}." in refusals[0]
    else:
        assert len(refusals) == len(lines)
        assert all("cifar-lit: cifar_lit.extras." in refusal for refusal in refusals)
