"""What becomes of odd files; run as a script, it writes results/odd-files.md and results/cpu/odd-files.json."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from odd_files import ODD_FILES, OddFile, write_odd_files
from serving import running
from small_nets import write_net

from cifar_lit.data.decode import SUFFIXES, DecodeError, decode
from cifar_lit.data.folder import folder
from cifar_lit.inference.classify import ImageFile, classify_files
from cifar_lit.inference.load import load

RESULTS = Path(__file__).parent.parent.parent / "results"
COMMANDS = ("classify", "folder", "serve")
READ, LEFT_OUT, UNSEEN = "read", "left out", "not looked at"  # a folder looks at files with the suffix of an image only


def outcomes(work_dir: Path) -> list[dict[str, str]]:
    """For each odd file its name, what it is, and what each of `COMMANDS` makes of it, or the reason why not."""
    paths = write_odd_files(work_dir / "odd")
    run = write_net(work_dir / "net", "lenet")
    rows = [row for chunk, _ in classify_files(load(run), [ImageFile(str(path)) for path in paths]) for row in chunk]
    plain = (work_dir / "odd" / "plain.png").read_bytes()
    for part in ("train", "test"):  # a class for each file, with a readable one beside it
        for number, path in enumerate(paths):
            class_dir = work_dir / "set" / part / f"{number:03}"
            class_dir.mkdir(parents=True)
            (class_dir / "beside.png").write_bytes(plain)
            (class_dir / path.name).write_bytes(path.read_bytes() if part == "train" else b"")
    images = folder(work_dir / "set", train=True, image_size=32, skip_bad=True, cache_dir=work_dir / "cache")
    counts = images.labels.bincount(minlength=len(paths)).tolist()
    with running(run) as service:
        answers = [service.predict(path.read_bytes(), {"Content-Type": "application/octet-stream"}) for path in paths]
    return [
        {
            "name": ascii(odd.name)[1:-1],
            "what": odd.what,
            "classify": row.error or READ,
            "folder": UNSEEN if not odd.name.lower().endswith(SUFFIXES) else READ if count == 2 else LEFT_OUT,
            "serve": READ if answer.status == 200 else f"{answer.status}: {answer.error}",
        }
        for odd, row, count, answer in zip(ODD_FILES, rows, counts, answers, strict=True)
    ]


def page(files: list[dict[str, str]]) -> str:
    """The outcomes as Markdown."""
    rows = [(f"`{file['name']}`", file["what"], *(file[command] for command in COMMANDS)) for file in files]
    rows[:0] = [("file", "what it is", *(f"`{command}`" for command in COMMANDS)), ("---",) * 5]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    intro = "What `tests/inference/odd_files.py` makes; written by `python tests/inference/test_odd_files.py`."
    return f"# Odd files, and what becomes of them\n\n{intro}\n\n{table}\n"


@pytest.mark.parametrize("odd", ODD_FILES, ids=lambda odd: ascii(odd.name))
def test_an_odd_file_shows_its_picture_or_is_refused_with_the_reason(odd: OddFile, tmp_path: Path) -> None:
    (tmp_path / odd.name).write_bytes(odd.make())
    if odd.reason is not None:
        with pytest.raises(DecodeError) as error:
            decode(tmp_path / odd.name, (32, 32))
        assert odd.reason in error.value.reason and "\n" not in error.value.reason
        return
    pixels = decode(tmp_path / odd.name, (32, 32)).astype(int)
    assert pixels.shape == (32, 32, 3)
    if odd.quarters is not None:
        means = [pixels[y : y + 4, x : x + 4].mean((0, 1)) for y, x in ((6, 6), (6, 22), (22, 6), (22, 22))]
        assert np.abs(np.array(means) - np.array(odd.quarters)).max() < 25


def test_classify_folder_and_serve_read_the_readable_ones_as_the_committed_table_says(tmp_path: Path) -> None:
    files = outcomes(tmp_path)
    assert len({file["name"] for file in files}) == 80
    committed = json.loads((RESULTS / "cpu" / "odd-files.json").read_text())["files"]
    for file, before, odd in zip(files, committed, ODD_FILES, strict=True):
        readable = odd.reason is None
        assert [file["classify"] == READ, file["serve"] == READ] == [readable] * 2, file
        assert file["folder"] in (UNSEEN, READ if readable else LEFT_OUT), file
        assert readable or file["serve"][:3] in ("400", "413", "415", "422"), file
        for key in ("name", "what", "folder"):  # the wording of a reason may be another Pillow's
            assert file[key] == before[key]
    assert (RESULTS / "odd-files.md").read_text() == page(committed)


if __name__ == "__main__":
    from cifar_lit.bench.report import environment, write_figures

    with tempfile.TemporaryDirectory() as temporary:
        files = outcomes(Path(temporary))
    read = sum(file["classify"] == READ for file in files)
    headline = {"kinds of files that classify reads": read, "kinds that it refuses with the reason": len(files) - read}
    figures = {"bench": "odd-files", "settings": {}, "environment": environment(), "headline": headline, "unit": {}}
    write_figures(RESULTS / "cpu" / "odd-files.json", {**figures, "files": files})
    (RESULTS / "odd-files.md").write_text(page(files))
