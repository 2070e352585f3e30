"""How unusual and damaged image files are handled; run as a script to renew results/odd-files.md and its JSON file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from odd_files import OddFile, odd_files, picture
from small_nets import write_net

from cifar_lit.data.decode import decode
from cifar_lit.data.folder import folder
from cifar_lit.data.formats import IMAGES
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.inference.classify import ImageFile, classify_files
from cifar_lit.inference.load import load

RESULTS = Path(__file__).parent.parent.parent / "results"
COMMANDS = ("classify", "folder")
READ, LEFT_OUT, UNSEEN = "read", "skipped", "ignored"  # a folder ignores files without an image suffix

INTRODUCTION = """\
# Unusual and damaged image files

How cifar-lit handles each kind of image file: the outcome or error of `classify`, and of a data set of
folders with `--data.skip_bad true`. Without `skip_bad`, a file that is "skipped" here stops the run
with its name. Files without an image suffix are ignored. `tests/inference/odd_files.py` creates the files, and
`python tests/inference/test_odd_files.py` writes this page.
"""


def outcomes(odd: list[OddFile], run: Path, work_dir: Path) -> list[dict[str, str]]:
    """Return for each file its name, what it is, and for each of `COMMANDS` the outcome or the reason of a refusal."""
    paths = [work_dir / "train" / f"{number:03}" / file.name for number, file in enumerate(odd)]
    for path, file in zip(paths, odd, strict=True):  # one class per file, with a readable neighbour
        for class_dir in (path.parent, work_dir / "test" / path.parent.name):
            class_dir.mkdir(parents=True)
            picture().save(class_dir / "beside.png")
        path.write_bytes(file.data)
    rows = [row for chunk, _ in classify_files(load(run), [ImageFile(str(path)) for path in paths]) for row in chunk]
    cache = str(work_dir / "cache")
    images = folder(SourceSettings(root=str(work_dir), image_size=32, skip_bad=True, cache_dir=cache), train=True)
    counts = images.labels.bincount(minlength=len(paths)).tolist()
    return [
        {
            "name": ascii(file.name)[1:-1],
            "what": file.what,
            "classify": row.error or READ,
            "folder": UNSEEN if not file.name.lower().endswith(IMAGES) else READ if count == 2 else LEFT_OUT,
        }
        for file, row, count in zip(odd, rows, counts, strict=True)
    ]


def page(files: list[dict[str, str]]) -> str:
    """Return the outcomes as Markdown."""
    rows = [(f"`{file['name']}`", file["what"], file["classify"], file["folder"]) for file in files]
    rows[:0] = [("file", "what it is", *(f"`{command}`" for command in COMMANDS)), ("---",) * 4]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{INTRODUCTION}\n{table}\n"


def test_unusual_files_are_decoded_or_refused_as_in_the_table(run: Path, tmp_path: Path) -> None:
    odd = odd_files()
    files = outcomes(odd, run, tmp_path / "set")
    committed = json.loads((RESULTS / "cpu" / "odd-files.json").read_text())["files"]
    for number, (made, file, before) in enumerate(zip(odd, files, committed, strict=True)):
        readable = not isinstance(made.expected, str)
        assert (file["classify"] == READ) == readable, file
        assert file["folder"] in (UNSEEN, READ if readable else LEFT_OUT), file
        for key in ("name", "what", "folder"):  # the wording of a reason depends on Pillow's version
            assert file[key] == before[key]
        if isinstance(made.expected, str):
            assert "\n" not in file["classify"], file
        else:
            pixels = decode(tmp_path / "set" / "train" / f"{number:03}" / made.name, (32, 32)).astype(int)
            means = [pixels[y : y + 4, x : x + 4].mean((0, 1)) for y, x in ((6, 6), (6, 22), (22, 6), (22, 22))]
            assert np.abs(np.array(means) - np.array(made.expected)).max() < 25, file
    assert (RESULTS / "odd-files.md").read_text() == page(committed)


if __name__ == "__main__":
    from cifar_lit.cli.seeds_file import environment

    with tempfile.TemporaryDirectory() as temporary:
        run = write_net(Path(temporary) / "net", "lenet")
        files = outcomes(odd_files(), run, Path(temporary) / "set")
    read = sum(file["classify"] == READ for file in files)
    headline = {"kinds of files that classify reads": read, "kinds that it refuses with the reason": len(files) - read}
    figures = {"bench": "odd-files", "settings": {}, "environment": environment(), "headline": headline, "unit": {}}
    (RESULTS / "cpu" / "odd-files.json").write_text(json.dumps({**figures, "files": files}, indent=2) + "\n")
    (RESULTS / "odd-files.md").write_text(page(files))
