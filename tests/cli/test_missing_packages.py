"""A command without its packages, as before the virtual environment is activated, says so in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from contract.command_line import SCRIPTS, run_process

SCRIPT = (sys.executable, SCRIPTS / "train.py")


@pytest.mark.parametrize("package", ["torch", "lightning", "numpy", "PIL", "jsonargparse"])
@pytest.mark.parametrize(
    "words", [SCRIPT, (sys.executable, "-m", "cifar_lit", "train", "--recipe", "cpu91")], ids=["a", "b"]
)
def test_a_missing_package_is_named_with_the_remedy(package: str, words: tuple[str, ...], tmp_path: Path) -> None:
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    answer = without(package, missing, words, tmp_path)
    assert (
        answer
        == f"cifar-lit: {package} is not installed for {sys.executable}: activate its virtual environment, "
        + ("or run pip install -e . in the clone of cifar-lit")
    )


def test_a_missing_package_is_named_before_a_wrong_argument(tmp_path: Path) -> None:
    words = (*SCRIPT, "wrong")
    assert "numpy is not installed" in without("numpy", "raise ModuleNotFoundError(name='numpy')", words, tmp_path)


@pytest.mark.parametrize("fault", ["OSError('libcudart.so.12: cannot open')", "ImportError('DLL load failed: 126')"])
def test_a_library_that_does_not_load_is_named_with_the_remedy(fault: str, tmp_path: Path) -> None:
    answer = without("torch", f"raise {fault}", SCRIPT, tmp_path)
    assert answer.startswith("cifar-lit: a library does not load (") and "--force-reinstall torch" in answer


def without(package: str, program: str, words: tuple[object, ...], folder: Path) -> str:
    """Return the message of a command whose package runs this program when it is imported."""
    (folder / f"{package}.py").write_text(program)
    answer = run_process(list(words), folder, PYTHONPATH=f"{folder}:{SCRIPTS.parent}")
    assert answer.code == 1
    (line,) = answer.err.splitlines()
    return line
