"""The torchvision data sets, from archives like the real ones: downloaded, unpacked whole, mended, read."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from local_mirrors import Mirror, serving
from torchvision import datasets

from cifar_lit.data import archives
from cifar_lit.data.archives import cifar10, cifar100, fashion_mnist, idx_intact, unpack
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import Failure

PER_FILE = 4
FIRST_PIXEL = [3, 4, 5]  # of the first CIFAR image: red, green, blue
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
PACKED = "train-images-idx3-ubyte.gz"


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@dataclass
class Served:
    """A data set's archives on a mirror, the folder to put them into, and its reader."""

    mirror: Mirror
    root: Path
    read: Callable[..., ImageSet]

    def load(self, train: bool = True) -> ImageSet:
        one_file = self.read is not fashion_mnist
        return self.read(self.root, train, [self.mirror.url + (next(iter(self.mirror.files)) if one_file else "")])


def cifar_batch(labels_key: str, classes: int) -> bytes:
    data = np.zeros((PER_FILE, 3, 32, 32), np.uint8)
    data[0, :, 0, 0] = FIRST_PIXEL
    return pickle.dumps({"data": data.reshape(PER_FILE, -1), labels_key: [index % classes for index in range(PER_FILE)]})


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def small_cifar(monkeypatch: pytest.MonkeyPatch, reader: type, labels_key: str, classes: list[str]) -> dict[str, bytes]:
    batch = cifar_batch(labels_key, len(classes))
    meta = pickle.dumps({reader.meta["key"]: classes})
    contents = {name: batch for name, _ in reader.train_list + reader.test_list} | {reader.meta["filename"]: meta}
    archive = tar_of({f"{reader.base_folder}/{name}": content for name, content in contents.items()})
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(reader, part, [[name, md5(batch)] for name, _ in getattr(reader, part)])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5(meta)})
    monkeypatch.setattr(reader, "tgz_md5", md5(archive))
    return {reader.filename: archive}


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Mirror(small_cifar(monkeypatch, datasets.CIFAR10, "labels", ["plane", "car", "bird", "cat"]))) as mirror:
        yield Served(mirror, tmp_path / "data", cifar10)


@pytest.fixture
def fashion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    files = {}
    for name, _ in datasets.FashionMNIST.resources:
        count = 6 if name.startswith("train") else 3
        sizes = (count, 28, 28) if "idx3" in name else (count,)
        content = np.arange(np.prod(sizes), dtype=np.int64) % 10
        header = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
        files[name] = gzip.compress(header + content.astype(np.uint8).tobytes())
    monkeypatch.setattr(datasets.FashionMNIST, "resources", [(name, md5(packed)) for name, packed in files.items()])
    with serving(Mirror(files)) as mirror:
        yield Served(mirror, tmp_path / "data", fashion_mnist)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


# ---- CIFAR


def test_cifar10_is_downloaded_unpacked_and_read_as_uint8_height_width_channels(cifar: Served) -> None:
    train, test = cifar.load(True), cifar.load(False)
    assert train.images.shape == (5 * PER_FILE, 32, 32, 3) and test.images.shape == (PER_FILE, 32, 32, 3)
    assert train.images.dtype == torch.uint8 and train.images.is_contiguous()
    assert train.images[0, 0, 0].tolist() == FIRST_PIXEL and train.images[0].sum() == sum(FIRST_PIXEL)
    assert test.labels.tolist() == [0, 1, 2, 3] and test.labels.dtype == torch.int64
    assert train.classes == ("plane", "car", "bird", "cat")
    assert len(cifar.mirror.requests) == 1 and names_in(cifar.root) == {FOLDER, ARCHIVE}


def test_cifar100_has_its_fine_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(*small_cifar(monkeypatch, datasets.CIFAR100, "fine_labels", ["apple", "fish"]).values())
    train = cifar100(tmp_path, True, [str(tmp_path / "a.tar.gz")])
    assert train.images.shape == (PER_FILE, 32, 32, 3)
    assert train.labels.tolist() == [0, 1, 0, 1] and train.classes == ("apple", "fish")


def test_without_a_url_the_known_mirrors_are_asked_and_each_names_the_archive_that_torchvision_reads(
    cifar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in (datasets.CIFAR10, datasets.CIFAR100):
        urls = archives.CIFAR_MIRRORS[reader.filename]
        assert reader.url in urls and all(reader.filename in url and url.startswith("https://") for url in urls)
    monkeypatch.setitem(archives.CIFAR_MIRRORS, ARCHIVE, (cifar.mirror.url + "gone", cifar.mirror.url + ARCHIVE))
    assert len(cifar10(cifar.root, False)) == PER_FILE
    assert [path for path, _ in cifar.mirror.requests] == ["gone", ARCHIVE]


@pytest.mark.parametrize("form", ["archive", "folder"])
def test_what_was_put_there_by_hand_is_used_as_it_is(cifar: Served, form: str) -> None:
    cifar.root.mkdir()
    (cifar.root / ARCHIVE).write_bytes(cifar.mirror.files[ARCHIVE])
    if form == "folder":  # torchvision's, without the archive
        with tarfile.open(cifar.root / ARCHIVE) as tar:
            tar.extractall(cifar.root, filter="data")
        (cifar.root / ARCHIVE).unlink()
    assert len(cifar.load()) == 5 * PER_FILE and cifar.mirror.requests == []
    if form == "folder":
        assert [path.name for path in cifar.root.iterdir()] == [FOLDER]


@pytest.mark.parametrize("victim", ["data_batch_3", "batches.meta"])
def test_a_damaged_folder_is_mended_from_its_archive_and_foreign_files_stay(cifar: Served, victim: str) -> None:
    cifar.load()
    folder = cifar.root / FOLDER
    (folder / victim).write_bytes(b"damaged")
    (folder / "test_batch").unlink()
    (folder / "notes.txt").write_text("mine")
    assert len(cifar.load()) == 5 * PER_FILE
    assert (folder / "notes.txt").read_text() == "mine" and len(cifar.mirror.requests) == 1


@pytest.mark.parametrize("name", ["cifar", "fashion"])
def test_an_interrupted_unpacking_is_finished_by_the_next_start(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: Served = request.getfixturevalue(name)

    def half_a_member(tar: tarfile.TarFile, path: Path, filter: str) -> None:
        tar.extract(member := tar.getmembers()[0], path, filter=filter)
        os.truncate(path / member.name, member.size // 2)
        raise KeyboardInterrupt

    def half_a_file(source: io.BufferedIOBase, file: io.BufferedIOBase) -> None:
        file.write(source.read(20))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tarfile.TarFile, "extractall", half_a_member)
        patch.setattr(shutil, "copyfileobj", half_a_file)
        served.load()
    assert len(served.load()) == (5 * PER_FILE if name == "cifar" else 6)
    assert len(served.mirror.requests) == len(served.mirror.files)


def test_a_wait_for_another_process_is_announced(cifar: Served, capsys: pytest.CaptureFixture[str]) -> None:
    cifar.root.mkdir()
    with ThreadPoolExecutor() as pool:
        with FileLock(f"{cifar.root / FOLDER}.lock"):
            second = pool.submit(cifar.load)
            output = ""
            while "waiting for another process" not in output and not second.done():
                time.sleep(0.01)
                output += capsys.readouterr().err
            assert str(cifar.root / FOLDER) in output and cifar.mirror.requests == []
        assert len(second.result(10)) == 5 * PER_FILE


def test_a_disk_that_fills_while_unpacking_says_what_is_needed(cifar: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(Failure, match=r"disk is full: .*data needs [\d,]{6,} bytes more"):
        cifar.load()


def test_an_archive_of_other_files_is_refused_instead_of_unpacked_again_and_again(
    cifar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    cifar.mirror.files[ARCHIVE] = other = tar_of({f"{FOLDER}/readme.html": b"nothing"})
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5(other))
    with pytest.raises(Failure, match="damaged right after unpacking"):
        cifar.load()


@pytest.mark.parametrize("name", ["cifar", "fashion"])
def test_readers_that_start_at_once_download_and_unpack_one_time(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: Served = request.getfixturevalue(name)
    unpacked: list[object] = []

    def slowly(unpack: Callable[..., Any]) -> Callable[..., Any]:
        def unpack_slowly(*args: Any, **kwargs: Any) -> Any:
            unpacked.append(args[0])
            time.sleep(0.05)  # long enough for the others to come to the same point
            return unpack(*args, **kwargs)

        return unpack_slowly

    monkeypatch.setattr(tarfile.TarFile, "extractall", slowly(tarfile.TarFile.extractall))
    if name == "fashion":
        monkeypatch.setattr(shutil, "copyfileobj", slowly(shutil.copyfileobj))
    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda _: len(served.load(False)), range(4)))
    assert sizes == [PER_FILE if name == "cifar" else 3] * 4
    assert len(unpacked) == len(served.mirror.requests) == len(served.mirror.files)


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../ran", tarfile.REGTYPE, ""),
        ("/tmp/cifar-lit-ran", tarfile.REGTYPE, ""),
        ("data/link", tarfile.SYMTYPE, "/etc"),
        ("data/link", tarfile.LNKTYPE, "../../etc/passwd"),
        ("data/null", tarfile.CHRTYPE, ""),
        ("data/pipe", tarfile.FIFOTYPE, ""),
    ],
)
def test_unpacking_stays_in_its_folder_whatever_the_archive_says(tmp_path: Path, name: str, kind: bytes, link: str) -> None:
    """An archive's md5 is checked before; this is what would happen if a wrong one had the right md5."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.addfile(member)
    (tmp_path / "target").mkdir()
    (tmp_path / "data.tar").rename(tmp_path / "target/data.tar")
    before = set(tmp_path.rglob("*"))
    with suppress(Failure):
        unpack(tmp_path / "target/data.tar")
    new = set(tmp_path.rglob("*")) - before  # of an absolute path, the same below the target
    assert all(path.is_relative_to(tmp_path / "target/tmp") and not path.is_symlink() for path in new)
    assert bool(new) == name.startswith("/") and not Path("/tmp/cifar-lit-ran").exists()


def test_an_archive_that_unpacks_to_too_much_is_left_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED", 1000)
    (tmp_path / "data.tar").write_bytes(tar_of({"data/a": bytes(1001)}))
    with pytest.raises(Failure, match="it claims 1,001 bytes"):
        unpack(tmp_path / "data.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["data.tar"]


# ---- Fashion-MNIST


def test_fashion_mnist_lies_in_torchvisions_folder_and_reads_as_one_channel(fashion: Served) -> None:
    train, test = fashion.load(True), fashion.load(False)
    assert train.images.shape == (6, 28, 28, 1) and test.images.shape == (3, 28, 28, 1)
    assert train.images.dtype == torch.uint8 and train.images.is_contiguous()
    assert train.images[0, 0, :12, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5] and train.labels.dtype == torch.int64
    assert train.classes[0] == "T-shirt/top" and len(train.classes) == 10
    names = set(fashion.mirror.files)
    assert names_in(fashion.root / "FashionMNIST" / "raw") == names | {name.removesuffix(".gz") for name in names}
    assert len(fashion.mirror.requests) == 4


@pytest.mark.parametrize("damage", ["cut short", "one bit", "no packed file left"])
def test_a_damaged_fashion_file_is_unpacked_again(fashion: Served, damage: str) -> None:
    fashion.load()
    packed = fashion.root / "FashionMNIST" / "raw" / PACKED
    plain = packed.with_suffix("")
    whole = plain.read_bytes()
    plain.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage == "one bit" else whole[:-1])
    if damage == "no packed file left":
        packed.unlink()
    fashion.load()
    assert plain.read_bytes() == whole
    assert len(fashion.mirror.requests) == (5 if damage == "no packed file left" else 4)


def test_unpacked_fashion_files_need_no_packed_ones_and_packed_ones_come_from_a_plain_folder_too(fashion: Served) -> None:
    copies = fashion.root.parent / "copies"
    copies.mkdir()
    for name, content in fashion.mirror.files.items():
        (copies / name).write_bytes(content)
    assert len(fashion_mnist(fashion.root.parent / "other", True, [str(copies)])) == 6
    raw = fashion.root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in fashion.mirror.files.items():
        (raw / name.removesuffix(".gz")).write_bytes(gzip.decompress(content))
    assert len(fashion.load(False)) == 3
    assert fashion.mirror.requests == [] and len(list(fashion.root.rglob("*"))) == 6


def test_an_idx_file_that_claims_more_than_it_holds_is_not_read(tmp_path: Path) -> None:
    plain = tmp_path / "images"
    plain.write_bytes(bytes([0, 0, 8, 3]) + 3 * (2**31).to_bytes(4, "big"))
    assert not idx_intact(tmp_path / "images.gz")
    os.truncate(plain, 4 << 30)
    assert not idx_intact(tmp_path / "images.gz")
    plain.write_bytes(bytes([0, 0, 14, 1, 0, 0, 0, 8]) + bytes(8))  # one float64, described as eight bytes
    assert not idx_intact(tmp_path / "images.gz")
