"""Finished runs on disk, so that a measurement of many runs goes on where a kill left it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import cifar_lit
from cifar_lit.bench.report import write_figures
from cifar_lit.cli.flags import recipe_path
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import display_path

CODE = ("data", "models", "training")  # the rooms that a result depends on


def fingerprint(
    recipe: str, flags: Sequence[str], configs: Sequence[str], curve: int | None, environment: Mapping[str, Any]
) -> dict[str, str]:
    """What runs must have in common to count as one measurement: a digest for each kind of thing.

    recipe: a name or path. flags: further words for training. configs: paths of YAML files. curve: steps
    between tests on the way, None for none. environment: of `report`.
    """
    package = Path(cifar_lit.__file__).parent
    sources = sorted(path for room in CODE for path in (package / room).rglob("*.py"))
    return {
        "recipe": _digest(recipe_path(recipe).read_text()),
        "flags": _digest(*flags),
        "configurations": _digest(*(Path(path).expanduser().read_text() for path in configs)),
        "curve": _digest(str(curve)),
        "versions": _digest(*(f"{name} {version}" for name, version in environment["versions"].items())),
        "code": _digest(*(path.read_text() for path in sources)),
        "machine": _digest(*(str(environment[name]) for name in ("cpu", "threads", "gpu"))),
    }


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


class Records:
    """The finished runs of some recipes, by recipe and seed: in `runs`, and as a line each in the file `partial`.

    `sources` are the files that held some at the start.

    file: where the figures go at the end, None if nowhere; those that it holds already count. folder: of the lines
    where there is no file. settings: the fingerprint of each recipe.
    Raises UsageError when the files hold runs of something else, Failure when another process is at it.
    """

    def __init__(self, file: Path | None, folder: Path, settings: Mapping[str, Mapping[str, str]]) -> None:
        self.settings = settings
        self.file = file
        name = f"bench-recipe-{_digest(json.dumps(settings))}.partial.jsonl"
        self.partial = file.with_name(file.name + ".partial.jsonl") if file else folder / name
        self._lock = FileLock(self.partial.with_name(self.partial.name + ".lock"))
        self.sources: list[Path] = []
        self.runs: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in settings}
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Failure(
                f"another process is writing {display_path(self.partial)}: wait until it ends, or name another --json"
            ) from None
        except OSError as error:
            raise Failure(
                f"cannot write {display_path(self.partial)}: {error.strerror}. Name another file with --json."
            ) from None
        try:
            self._read()
        except BaseException:
            self.release()
            raise

    def _read(self) -> None:
        if self.file and self.file.exists():
            self.sources.append(self.file)
            for name, entry in _figures_in(self.file).items():
                for run in entry["runs"]:
                    self._take(self.file, name, entry["settings"], run)
        if not self.partial.exists():
            return
        self.sources.append(self.partial)
        lines = self.partial.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        for line in whole:
            row = json.loads(line)
            self._take(self.partial, row["recipe"], row["settings"], row["run"])
        if len(whole) < len(lines):  # killed while it wrote the last line: that run is made again
            write_text(self.partial, "".join(whole))

    def _take(self, file: Path, name: str, settings: Mapping[str, str], run: dict[str, Any]) -> None:
        way_out = f"name another --json, or delete {display_path(file)}"
        if name not in self.settings:
            raise UsageError(f"{display_path(file)} holds runs of {name}, which is not measured now: {way_out}")
        own = self.settings[name]
        differing = [part for part in own if settings.get(part) != own[part]]
        if differing:
            raise UsageError(f"{display_path(file)} holds runs of {name} with other {' and '.join(differing)}: {way_out}")
        self.runs[name][run["seed"]] = run

    def add(self, name: str, run: dict[str, Any]) -> None:
        """Keeps a finished run, on disk before this returns."""
        self.runs[name][run["seed"]] = run
        line = json.dumps({"recipe": name, "settings": self.settings[name], "run": run}, ensure_ascii=False)
        with self.partial.open("a") as lines:
            lines.write(line + "\n")
            lines.flush()
            os.fsync(lines.fileno())

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Writes the figures, if they go anywhere; the lines are needed no longer."""
        if self.file:
            write_figures(self.file, dict(figures))
        self.partial.unlink(missing_ok=True)

    def release(self) -> None:
        """Lets other processes go on with the files."""
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)


def _figures_in(file: Path) -> dict[str, Any]:
    """The recipes' entries in a file of figures; raises UsageError when it is something else."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("bench") != "recipe":
        raise UsageError(f"{display_path(file)} is there already and holds no figures of `bench recipe`: name another --json")
    recipes: dict[str, Any] = found["recipes"]
    return recipes
