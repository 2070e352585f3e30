from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from odd_files import ODD_FILES, OddFile, write_odd_files
from odd_table import READ, RESULTS, WHERE, outcomes, page

from cifar_lit.data.decode import SUFFIXES, DecodeError, decode
from cifar_lit.data.folder import folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The odd files by name."""
    paths = write_odd_files(tmp_path_factory.mktemp("odd"))
    return {odd.name: path for odd, path in zip(ODD_FILES, paths, strict=True)}


@pytest.mark.parametrize("odd", ODD_FILES, ids=lambda odd: ascii(odd.name))
def test_an_odd_file_shows_its_picture_or_is_refused_with_the_reason(odd: OddFile, files: dict[str, Path]) -> None:
    if odd.reason is not None:
        with pytest.raises(DecodeError) as caught:
            decode(files[odd.name], (32, 32))
        assert odd.reason in caught.value.reason
        assert "\n" not in caught.value.reason
        return
    pixels = decode(files[odd.name], (32, 32)).astype(int)
    assert pixels.shape == (32, 32, 3)
    if odd.quarters is not None:
        seen = [pixels[y : y + 4, x : x + 4].mean((0, 1)) for y, x in ((6, 6), (6, 22), (22, 6), (22, 22))]
        assert np.abs(np.array(seen) - np.array(odd.quarters)).max() < 25


def test_there_are_more_than_forty_kinds_with_names_of_their_own() -> None:
    assert len({odd.name for odd in ODD_FILES}) == len(ODD_FILES) > 40


def test_a_data_set_of_odd_files_has_the_readable_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "test"):
        write_odd_files(tmp_path / "set" / part / "odd")
        (tmp_path / "set" / part / "plain").mkdir()
        (tmp_path / "set" / part / "plain" / "a.png").write_bytes(
            next(odd for odd in ODD_FILES if odd.name == "plain.png").make()
        )
    images = folder(tmp_path / "set", train=True, image_size=32, skip_bad=True, cache_dir=tmp_path / "cache")
    readable = sorted(odd.name for odd in ODD_FILES if odd.readable and odd.name.lower().endswith(SUFFIXES))
    assert len(images) == len(readable) + 1
    for image, name in zip(images.images, readable, strict=False):
        assert np.array_equal(image.numpy(), decode(tmp_path / "set" / "train" / "odd" / name, (32, 32))), name
    assert "are damaged and left out" in capsys.readouterr().err


def test_the_committed_table_says_what_becomes_of_them(tmp_path: Path) -> None:
    found = outcomes(tmp_path)
    committed = json.loads((RESULTS / "cpu" / "odd-files.json").read_text())["files"]
    assert [(file["name"], file["what"]) for file in committed] == [(file["name"], file["what"]) for file in found]
    for now, before in zip(found, committed, strict=True):  # the wording of a reason may be another Pillow's
        assert [now[place] == READ for place in WHERE] == [before[place] == READ for place in WHERE], now["name"]
    assert (RESULTS / "odd-files.md").read_text() == page(committed)
