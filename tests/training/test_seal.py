import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.cloud_io import _load

from cifar_lit.training.checkpoint import COMMENT, END_SIZE, MARK, AtomicCheckpointIO, Damaged, find_damage, read_checkpoint

CONTENT = {"state_dict": {"weight": torch.arange(3000.0)}, "global_step": 3}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, path)
    return path


@pytest.fixture
def unsealed(tmp_path: Path) -> Path:
    torch.save(CONTENT, tmp_path / "old.ckpt")
    return tmp_path / "old.ckpt"


def test_a_copy_by_itself_verifies(sealed: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(sealed, tmp_path / "elsewhere" / "b.ckpt")
    assert find_damage(Path(copy)) is None
    assert Path(copy).read_bytes()[-COMMENT:].startswith(MARK)


def test_torch_lightning_and_zip_programs_read_it_as_any_other(sealed: Path) -> None:
    read = [torch.load(sealed, weights_only=True), torch.load(sealed, weights_only=True, mmap=True), _load(sealed)]
    for found in read:
        assert torch.equal(found["state_dict"]["weight"], CONTENT["state_dict"]["weight"])  # type: ignore[index]
    with zipfile.ZipFile(sealed) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(MARK)


def test_a_checkpoint_of_before_there_were_checksums_still_loads(unsealed: Path) -> None:
    assert find_damage(unsealed) is None
    assert read_checkpoint(unsealed)["global_step"] == 3
    torch.save(CONTENT, unsealed, _use_new_zipfile_serialization=False)
    assert read_checkpoint(unsealed)["global_step"] == 3


def test_one_that_is_cut_short_is_told_whether_sealed_or_not(sealed: Path, unsealed: Path) -> None:
    for path in (sealed, unsealed):
        content = path.read_bytes()
        for kept in (4, 100, len(content) // 2, len(content) - COMMENT, len(content) - END_SIZE, len(content) - 1):
            path.write_bytes(content[:kept])
            assert find_damage(path) == "its end is missing"


def test_no_flipped_bit_goes_unnoticed(sealed: Path) -> None:
    content = sealed.read_bytes()
    draw = random.Random(1)
    last = range(len(content) - COMMENT - END_SIZE, len(content))  # where the checksum itself is, and how it is found
    places = [*range(8), *draw.sample(range(len(content)), 150), *last]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        sealed.write_bytes(bytes(damaged))
        with pytest.raises(Damaged):
            read_checkpoint(sealed)
    sealed.write_bytes(content)
    read_checkpoint(sealed)


def test_pages_that_were_never_written_are_noticed(sealed: Path) -> None:
    content = bytearray(sealed.read_bytes())
    content[4096:8192] = bytes(4096)
    sealed.write_bytes(bytes(content))
    with pytest.raises(Damaged, match="its checksum does not match"):
        read_checkpoint(sealed)
