"""Each test of a page runs in an empty working folder, and the modules of the page are unloaded afterwards."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cifar_lit.train


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    # Images for TensorBoard would take half of the time, and no page shows them.
    monkeypatch.setattr(cifar_lit.train, "_draw", lambda *args: None)
    before = set(sys.modules)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread slows nets this small down
    yield tmp_path
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]
