"""Data sets whose download fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .command_line import NO_SHAPES, SMALL, run_command

ARCHIVES = {"cifar10": "cifar-10", "cifar100": "cifar-100-python.tar.gz", "fashion_mnist": "train-images-idx3-ubyte.gz"}


@pytest.mark.parametrize(("dataset", "archive"), ARCHIVES.items())
def test_without_network_the_error_names_each_sources_reason_and_where_to_put_the_archive(
    dataset: str, archive: str
) -> None:
    answer = run_command(*SMALL, "--dataset", dataset, *NO_SHAPES)
    line = answer.error_lines[-1]
    assert answer.code == 1
    assert "Traceback" not in answer.err
    for part in (archive, "refused", "data", "md5", "--data.url", "--recipe quickstart", "no download"):
        assert part in line, part
    hosts = re.findall(r"[\w-]+(?:\.[\w-]+)+: \S", line)
    assert len({host.split(":")[0] for host in hosts}) >= 2, line
    assert not Path("lightning_logs").exists()
