"""An attack as data: what a stranger prepares, and the line that a user then types who trusts none of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from security.sandbox import Answer, read_apart

from cifar_lit.cli import main

OUTSIDE = {
    "Documents/letter.txt": "dear friend",
    "notes.txt": "mine",
    ".ssh/config": "Host *",
}  # of the user's, beside the runs
MAX_CPU_SECONDS, MAX_MEGABYTES = 1.0, 100.0  # until something is refused; what is taken and done may cost what it costs


@dataclass(frozen=True)
class Attack:
    """One attack.

    Args:
        prepare: puts what comes from outside into the folder it is given, in which `run` is a copy of a genuine run, `outside`
            has the user's own files, and `small.yaml` is a recipe.
        type: the line after `cifar-lit`, typed in that folder; or a function that returns the exit code.
        refused: whether it must be refused in one line; else it may go on, and must do no harm.
        says: what the answer must hold, such as the remedy.
    """

    prepare: Callable[[Path], object]
    type: Sequence[str] | Callable[[], int]
    refused: bool = True
    says: str = ""

    def carry_out(self, genuine: Path, folder: Path) -> tuple[Answer, list[str]]:
        """What the program answered, and all the harm that was done."""
        shutil.copytree(genuine, folder / "run")
        shutil.copy(genuine.parent.parent / "small.yaml", folder)
        for name, text in OUTSIDE.items():
            (folder / "outside" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "outside" / name).write_text(text)
        self.prepare(folder)
        line = self.type
        answer = read_apart(folder, line if callable(line) else lambda: main(list(line)))
        return answer, [*self._harm(answer), *changes(folder / "outside")]

    def _harm(self, answer: Answer) -> list[str]:
        harm = [f"it ran {', '.join(answer.ran)}"] if answer.ran else []
        if answer.code is None or any("Traceback" in line for line in answer.lines):
            harm.append(f"it broke down: {answer.lines[-1:]}")
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
    """What is not as `OUTSIDE` says in the folder of the user's own files."""
    files = (
        {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
        if folder.exists()
        else {}
    )
    gone = [
        f"{name} was deleted or changed"
        for name, text in OUTSIDE.items()
        if name not in files or files[name].read_bytes() != text.encode()
    ]
    return gone + [f"{name} was made" for name in files if name not in OUTSIDE]


def harmless(prepare: Callable[[Path], object], line: Sequence[str] | Callable[[], int], says: str = "") -> Attack:
    """An attack that is not refused, but does no harm, and is told."""
    return Attack(prepare, line, refused=False, says=says)
