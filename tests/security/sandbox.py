"""Where a hostile file is made: a copy of a genuine run, and a trace that no file may leave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """folder: empty but for `run`, the copy of a genuine run."""

    folder: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def checkpoint(self) -> Path:
        """Its best checkpoint."""
        return self.run / "checkpoints" / "best.ckpt"

    @property
    def model(self) -> Path:
        """Its weights."""
        return self.run / "model.safetensors"

    @property
    def trace(self) -> Path:
        """What code that runs out of a file makes."""
        return self.folder / "ran"
