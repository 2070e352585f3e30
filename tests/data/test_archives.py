from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_server import Mirror, serving
from torchvision import datasets

from cifar_lit.data import archives
from cifar_lit.data.archives import cifar10, cifar100, fashion_mnist
from cifar_lit.errors import Failure

PER_FILE = 4
FIRST_PIXEL = 3  # of the first CIFAR image: red, green, blue = 3, 4, 5


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@dataclass
class Fake:
    """A served archive, or four, built like the real ones."""

    mirror: Mirror
    root: Path

    @property
    def url(self) -> str:
        return self.mirror.url + next(iter(self.mirror.files))


def cifar_batch(labels_key: str, classes: int) -> bytes:
    data = np.zeros((PER_FILE, 3, 32, 32), np.uint8)
    data[0, :, 0, 0] = (FIRST_PIXEL, FIRST_PIXEL + 1, FIRST_PIXEL + 2)
    labels = [index % classes for index in range(PER_FILE)]
    return pickle.dumps({"data": data.reshape(PER_FILE, -1), labels_key: labels})


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def fake_cifar(monkeypatch: pytest.MonkeyPatch, reader: type, labels_key: str, classes: list[str]) -> dict[str, bytes]:
    batch = cifar_batch(labels_key, len(classes))
    meta = pickle.dumps({reader.meta["key"]: classes})
    names = [name for name, _ in reader.train_list + reader.test_list]
    archive = tar_of(
        {f"{reader.base_folder}/{name}": batch for name in names} | {f"{reader.base_folder}/{reader.meta['filename']}": meta}
    )
    monkeypatch.setattr(reader, "train_list", [[name, md5(batch)] for name, _ in reader.train_list])
    monkeypatch.setattr(reader, "test_list", [[name, md5(batch)] for name, _ in reader.test_list])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5(meta)})
    monkeypatch.setattr(reader, "tgz_md5", md5(archive))
    return {reader.filename: archive}


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Mirror(fake_cifar(monkeypatch, datasets.CIFAR10, "labels", ["plane", "car", "bird", "cat"]))) as mirror:
        yield Fake(mirror, tmp_path / "data")


@pytest.fixture
def fashion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
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
        yield Fake(mirror, tmp_path / "data")


def contents(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.suffix != ".lock"}


def test_cifar10_is_downloaded_unpacked_and_read_as_uint8_height_width_channels(cifar: Fake) -> None:
    train, test = (cifar10(cifar.root, train, [cifar.url]) for train in (True, False))
    assert train.images.shape == (5 * PER_FILE, 32, 32, 3) and test.images.shape == (PER_FILE, 32, 32, 3)
    assert train.images.dtype == torch.uint8 and train.images.is_contiguous()
    assert train.images[0, 0, 0].tolist() == [FIRST_PIXEL, FIRST_PIXEL + 1, FIRST_PIXEL + 2]
    assert train.images[0].sum() == 3 * FIRST_PIXEL + 3
    assert test.labels.tolist() == [0, 1, 2, 3] and test.labels.dtype == torch.int64
    assert train.classes == ("plane", "car", "bird", "cat")
    assert len(cifar.mirror.asked) == 1
    assert contents(cifar.root) == {"cifar-10-batches-py", "cifar-10-python.tar.gz"}


def test_cifar100_has_its_fine_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Mirror(fake_cifar(monkeypatch, datasets.CIFAR100, "fine_labels", ["apple", "fish"]))) as mirror:
        train = cifar100(tmp_path, True, [mirror.url + "cifar-100-python.tar.gz"])
    assert train.images.shape == (PER_FILE, 32, 32, 3)
    assert train.labels.tolist() == [0, 1, 0, 1]
    assert train.classes == ("apple", "fish")


def test_without_a_url_the_known_mirrors_are_asked(cifar: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(archives.CIFAR_MIRRORS, "cifar-10-python.tar.gz", (cifar.mirror.url + "gone", cifar.url))
    assert len(cifar10(cifar.root, False)) == PER_FILE
    assert [path for path, _ in cifar.mirror.asked] == ["gone", "cifar-10-python.tar.gz"]


def test_every_known_mirror_of_a_cifar_names_the_archive_that_torchvision_reads() -> None:
    for reader in (datasets.CIFAR10, datasets.CIFAR100):
        urls = archives.CIFAR_MIRRORS[reader.filename]
        assert reader.url in urls
        assert all(reader.filename in url and url.startswith("https://") for url in urls)


def test_an_archive_put_there_by_hand_is_used_as_it_is(cifar: Fake) -> None:
    cifar.root.mkdir()
    (cifar.root / "cifar-10-python.tar.gz").write_bytes(cifar.mirror.files["cifar-10-python.tar.gz"])
    assert len(cifar10(cifar.root, True, [cifar.url])) == 5 * PER_FILE
    assert cifar.mirror.asked == []


def test_torchvisions_folder_is_used_without_its_archive_and_nothing_is_written(cifar: Fake) -> None:
    cifar.root.mkdir()
    packed = io.BytesIO(cifar.mirror.files["cifar-10-python.tar.gz"])
    with tarfile.open(fileobj=packed) as tar:
        tar.extractall(cifar.root, filter="data")
    assert len(cifar10(cifar.root, True, [cifar.url])) == 5 * PER_FILE
    assert cifar.mirror.asked == []
    assert [path.name for path in cifar.root.iterdir()] == ["cifar-10-batches-py"]


@pytest.mark.parametrize("victim", ["data_batch_3", "batches.meta"])
def test_a_damaged_folder_is_mended_from_its_archive_and_foreign_files_stay(cifar: Fake, victim: str) -> None:
    cifar10(cifar.root, True, [cifar.url])
    folder = cifar.root / "cifar-10-batches-py"
    (folder / victim).write_bytes(b"damaged")
    (folder / "test_batch").unlink()
    (folder / "notes.txt").write_text("mine")
    assert len(cifar10(cifar.root, True, [cifar.url])) == 5 * PER_FILE
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(cifar.mirror.asked) == 1


def test_a_damaged_archive_is_named_and_not_overwritten(cifar: Fake) -> None:
    cifar.root.mkdir()
    archive = cifar.root / "cifar-10-python.tar.gz"
    archive.write_bytes(cifar.mirror.files[archive.name][:-9])
    with pytest.raises(Failure, match=f"{archive} is damaged"):
        cifar10(cifar.root, True, [cifar.url])
    assert len(archive.read_bytes()) == len(cifar.mirror.files[archive.name]) - 9
    assert cifar.mirror.asked == []


def test_an_interrupted_unpacking_leaves_nothing_half_and_the_next_start_finishes_it(
    cifar: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(tar: tarfile.TarFile, path: Path, filter: str) -> None:
        tar.extract(tar.getmembers()[0], path, filter=filter)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tarfile.TarFile, "extractall", interrupted)
        cifar10(cifar.root, True, [cifar.url])
    assert contents(cifar.root) == {"cifar-10-python.tar.gz"}
    killed = cifar.root / ".cifar-10-batches-py.unpacking" / "cifar-10-batches-py"
    killed.mkdir(parents=True)  # as a killed process leaves it
    (killed / "half").write_bytes(b"")
    assert len(cifar10(cifar.root, True, [cifar.url])) == 5 * PER_FILE
    assert contents(cifar.root) == {"cifar-10-batches-py", "cifar-10-python.tar.gz"}
    assert not (cifar.root / "cifar-10-batches-py" / "half").exists()
    assert len(cifar.mirror.asked) == 1


def test_a_disk_that_fills_while_unpacking_tells_what_is_needed(cifar: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(Failure, match=r"disk is full: .*data needs [\d,]{6,} bytes more"):
        cifar10(cifar.root, True, [cifar.url])


def test_an_archive_of_other_files_is_told_instead_of_unpacked_again_and_again(
    cifar: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tar_of({"cifar-10-batches-py/readme.html": b"nothing"})
    cifar.mirror.files["cifar-10-python.tar.gz"] = other
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5(other))
    with pytest.raises(Failure, match="damaged right after unpacking"):
        cifar10(cifar.root, True, [cifar.url])


@pytest.mark.parametrize("name", ["cifar", "fashion"])
def test_readers_that_start_at_once_download_and_unpack_one_time(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Fake = request.getfixturevalue(name)
    unpacked: list[object] = []

    def slowly(unpack: Callable[..., Any]) -> Callable[..., Any]:
        def unpack_slowly(*args: Any, **kwargs: Any) -> Any:
            unpacked.append(args[0])
            time.sleep(0.05)  # long enough for the others to come to the same point
            return unpack(*args, **kwargs)

        return unpack_slowly

    monkeypatch.setattr(tarfile.TarFile, "extractall", slowly(tarfile.TarFile.extractall))
    monkeypatch.setattr(shutil, "copyfileobj", slowly(shutil.copyfileobj) if name == "fashion" else shutil.copyfileobj)
    read, url = (cifar10, fake.url) if name == "cifar" else (fashion_mnist, fake.mirror.url)
    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda _: len(read(fake.root, False, [url])), range(4)))
    assert sizes == [PER_FILE if name == "cifar" else 3] * 4
    assert len(unpacked) == len(fake.mirror.asked) == len(fake.mirror.files)


def test_fashion_mnist_lies_in_torchvisions_folder_and_reads_as_one_channel(fashion: Fake) -> None:
    train, test = (fashion_mnist(fashion.root, train, [fashion.mirror.url]) for train in (True, False))
    assert train.images.shape == (6, 28, 28, 1) and test.images.shape == (3, 28, 28, 1)
    assert train.images.dtype == torch.uint8 and train.images.is_contiguous()
    assert train.images[0, 0, :12, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5] and train.labels.dtype == torch.int64
    assert train.classes[0] == "T-shirt/top" and len(train.classes) == 10
    names = set(fashion.mirror.files)
    assert contents(fashion.root / "FashionMNIST" / "raw") == names | {name.removesuffix(".gz") for name in names}
    assert len(fashion.mirror.asked) == 4


def test_fashion_mnist_comes_from_a_plain_folder_too(fashion: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    for name, content in fashion.mirror.files.items():
        (folder / name).write_bytes(content)
    assert len(fashion_mnist(fashion.root, True, [str(folder)])) == 6


@pytest.mark.parametrize("damage", ["cut short", "one bit", "no packed file left"])
def test_a_damaged_fashion_file_is_unpacked_again(fashion: Fake, damage: str) -> None:
    fashion_mnist(fashion.root, True, [fashion.mirror.url])
    packed = fashion.root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte.gz"
    plain = packed.with_suffix("")
    whole = plain.read_bytes()
    plain.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage == "one bit" else whole[:-1])
    if damage == "no packed file left":
        packed.unlink()
    fashion_mnist(fashion.root, True, [fashion.mirror.url])
    assert plain.read_bytes() == whole
    assert len(fashion.mirror.asked) == (5 if damage == "no packed file left" else 4)


def test_unpacked_fashion_files_need_no_packed_ones_and_nothing_is_written(fashion: Fake) -> None:
    raw = fashion.root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in fashion.mirror.files.items():
        (raw / name.removesuffix(".gz")).write_bytes(gzip.decompress(content))
    assert len(fashion_mnist(fashion.root, False, [fashion.mirror.url])) == 3
    assert fashion.mirror.asked == [] and len(list(fashion.root.rglob("*"))) == 6


def test_an_interrupted_fashion_unpacking_leaves_no_half_file(fashion: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: io.BufferedIOBase, file: io.BufferedIOBase) -> None:
        file.write(source.read(20))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfileobj", interrupted)
        fashion_mnist(fashion.root, True, [fashion.mirror.url])
    assert contents(fashion.root / "FashionMNIST" / "raw") == {"train-images-idx3-ubyte.gz"}
    assert len(fashion_mnist(fashion.root, True, [fashion.mirror.url])) == 6
