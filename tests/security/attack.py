"""An attack as data: the files that an attacker prepares and the command that the user then types."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from security.sandbox import Answer, read_in_fork

from cifar_lit.cli import main

# The user's own files, beside the runs.
OUTSIDE = {"Documents/letter.txt": "dear friend", "notes.txt": "mine", ".ssh/config": "Host *"}
# For a refusal; accepted input has no limit. A busy machine takes twice as long as a quiet one.
MAX_CPU_SECONDS, MAX_MEGABYTES = 3.0, 100.0


@dataclass(frozen=True)
class Attack:
    """One attack.

    Args:
        prepare: writes the attacker's files into the folder it is given. `run` in it is a copy of a genuine run,
            `outside` holds the user's own files, and `small.yaml` is a recipe.
        type: the arguments of `cifar-lit`, typed in that folder, or a function that returns the exit code.
        refused: whether the command must fail with one line. Otherwise it may continue, and must do no harm.
        says: text that the output must contain, such as the remedy.
    """

    prepare: Callable[[Path], object]
    type: Sequence[str] | Callable[[], int]
    refused: bool = True
    says: str = ""

    def carry_out(self, genuine: Path, folder: Path) -> tuple[Answer, list[str]]:
        """Return the program's answer and a list of all harm done."""
        shutil.copytree(genuine, folder / "run")
        shutil.copy(genuine.parent.parent / "small.yaml", folder)
        for name, text in OUTSIDE.items():
            (folder / "outside" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "outside" / name).write_text(text)
        self.prepare(folder)
        line = self.type
        answer = read_in_fork(folder, line if callable(line) else lambda: main(list(line)))
        return answer, [*self._harm(answer), *changes(folder / "outside")]

    def _harm(self, answer: Answer) -> list[str]:
        harm = [f"it ran {', '.join(answer.ran)}"] if answer.ran else []
        if answer.code is None or any("Traceback" in line for line in answer.lines):
            harm.append(f"it crashed: {answer.lines[-1:]}")
        if any(not letter.isprintable() and letter not in "\n\r\t" for letter in answer.out + "".join(answer.lines)):
            harm.append("it printed control characters")
        if self.says not in answer.out + "\n".join(answer.lines):
            harm.append(f"it does not say {self.says!r}: {answer.lines}")
        if self.refused:
            if not answer.refused:
                harm.append(f"it was not refused in one line: {answer.code} {answer.lines[:3]}")
            if answer.cpu_seconds > MAX_CPU_SECONDS or answer.megabytes > MAX_MEGABYTES:
                harm.append(f"it took {answer.cpu_seconds} s and {answer.megabytes} MB")
        return harm


def changes(folder: Path) -> list[str]:
    """Return the differences between the folder of the user's own files and `OUTSIDE`."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    added = [name for name in files if name not in OUTSIDE]
    expected = {name: text.encode() for name, text in OUTSIDE.items()}
    changed = [name for name, data in expected.items() if name not in files or files[name].read_bytes() != data]
    return [*(f"{name} was deleted or changed" for name in changed), *(f"{name} was created" for name in added)]


def harmless(prepare: Callable[[Path], object], line: Sequence[str] | Callable[[], int], says: str = "") -> Attack:
    """Return an attack that is not refused and must do no harm."""
    return Attack(prepare, line, refused=False, says=says)
