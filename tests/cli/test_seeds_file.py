"""The machine that `train --seeds --json FILE` records."""

from __future__ import annotations

from pathlib import Path

import pytest

from cifar_lit.base.hardware import Machine
from cifar_lit.cli import seeds_file


def test_a_cpu_without_a_product_number_is_recorded_with_family_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    core = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
    info.write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}")
    monkeypatch.setattr(seeds_file, "Path", lambda path: info)
    monkeypatch.setattr(seeds_file, "detect_machine", lambda: Machine("AMD EPYC", 2, True))
    assert seeds_file.environment()["cpu"] == "AMD EPYC (family 26, model 2)"
    assert seeds_file.exact_cpu("AMD EPYC 9755 128-Core Processor") == "AMD EPYC 9755 128-Core Processor"
