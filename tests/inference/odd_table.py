"""What becomes of the odd files: `python tests/use/odd_table.py` writes results/cpu/odd-files.json and results/odd-files.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from odd_files import ODD_FILES, write_odd_files
from serving import running
from small_net import write_net

from cifar_lit.bench.report import environment, write_figures
from cifar_lit.data.cache import File, decoded
from cifar_lit.data.decode import SUFFIXES
from cifar_lit.inference.classify import ImageFile, classify_files
from cifar_lit.inference.load import load

sys.path.append(str(Path(__file__).parent.parent.parent / "scripts" / "benchmarks"))
from table import markdown

RESULTS = Path(__file__).parent.parent.parent / "results"
WHERE = ("classify", "folder", "serve")
READ, UNSEEN = "read", "not looked at"


def outcomes(folder: Path) -> list[dict[str, str]]:
    """For each odd file its name, what it is, and what `classify`, the `folder` data set and a service make of it.

    That is `read`, or the reason why it is not; a folder is not looked at for files of other suffixes. A service's reason
    comes with its status.
    """
    paths = write_odd_files(folder / "odd")
    classifier = load(write_net(folder / "net"))
    rows = [row for part, _ in classify_files(classifier, [ImageFile(str(path)) for path in paths]) for row in part]
    seen = [File(path.name, path.stat().st_size, 1) for path in paths if path.name.lower().endswith(SUFFIXES)]
    bad = decoded(folder / "odd", seen, 32, 3, folder / "cache").bad
    names = {file.path for file in seen}
    with running(folder / "net") as service:
        answers = [service.predict(path.read_bytes(), {"Content-Type": "application/octet-stream"}) for path in paths]
    return [
        {
            "name": ascii(odd.name)[1:-1],
            "what": odd.what,
            "classify": row.error or READ,
            "folder": bad.get(odd.name, READ) if odd.name in names else UNSEEN,
            "serve": READ if answer.status == 200 else f"{answer.status}: {answer.error}",
        }
        for odd, row, answer in zip(ODD_FILES, rows, answers, strict=True)
    ]


def figures(found: list[dict[str, str]]) -> dict[str, Any]:
    """The outcomes as a measurement's figures."""
    read = sum(file["classify"] == READ for file in found)
    headline = {"kinds of files that classify reads": read, "kinds that it refuses with the reason": len(found) - read}
    return {"bench": "odd-files", "settings": {}, "environment": environment(), "headline": headline, "unit": {}, "files": found}


def page(found: list[dict[str, str]]) -> str:
    """The outcomes as Markdown."""
    rows = [[f"`{file['name']}`", file["what"], *(file[place] for place in WHERE)] for file in found]
    table = markdown(("file", "what it is", *(f"`{place}`" for place in WHERE)), rows)
    intro = "What `tests/use/odd_files.py` makes; written by `python tests/use/odd_table.py`."
    return f"# Odd files, and what becomes of them\n\n{intro}\n\n{table}\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        result = outcomes(Path(temporary))
    write_figures(RESULTS / "cpu" / "odd-files.json", figures(result))
    (RESULTS / "odd-files.md").write_text(page(result))
    print(f"{len(result)} kinds in results/odd-files.md")
