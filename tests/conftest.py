"""Fixtures for all folders; with this file here, tests import `browser`, `stress.…` and `security.…` by their names."""

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from browser import browser, open_page
from contract.command_line import RECIPE, SMALL, Training, run_command

__all__ = ["browser", "open_page"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress-json", metavar="DIR", help="write what the stress tests count to files there")


@pytest.fixture(scope="session")
def long_form(pytestconfig: pytest.Config) -> bool:
    """Whether stress tests are to take long: with -m stress. Plain pytest runs each in a short form."""
    return "stress" in pytestconfig.option.markexpr.split()


@pytest.fixture
def write_counts(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """write_counts(counts): into the folder of --stress-json, if there is one, in a file of the test's name."""
    folder = request.config.getoption("--stress-json")

    def write(counts: dict[str, Any]) -> None:
        if folder:
            from cifar_lit.bench.report import environment, write_figures

            name = Path(request.node.path).stem.removeprefix("test_")
            write_figures(
                Path(folder) / f"stress-{name}.json", {"bench": f"stress {name}", **counts, "environment": environment()}
            )

    return write


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training by the recipe small.yaml, in one process on the CPU."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "small.yaml").write_text(RECIPE)
    with chdir(folder):
        answer = run_command(*SMALL)
    assert answer.code == 0, answer.err
    return Training(folder / "lightning_logs/small-1", answer)


@pytest.fixture(scope="session")
def run_dir(training: Training) -> Path:
    """The run folder of the training; to be left as it is."""
    return training.run_dir
