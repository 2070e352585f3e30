"""Data sets by name: archives like the real ones, and user-defined sources."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from local_mirrors import Mirror, serving
from torchvision import datasets

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.data import download
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings, Images, Loading
from cifar_lit.data.shapes import shapes
from cifar_lit.data.sources import SOURCES, Source, find_source, load_images

PER_FILE = 4
FIRST_PIXEL = [3, 4, 5]  # RGB, in the first CIFAR image
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def small_cifar(monkeypatch: pytest.MonkeyPatch, reader: type, labels_key: str, classes: list[str]) -> dict[str, bytes]:
    """Return a CIFAR archive with PER_FILE images per file, and patch the checksums of torchvision's `reader`."""
    data = np.zeros((PER_FILE, 3, 32, 32), np.uint8)
    data[0, :, 0, 0] = FIRST_PIXEL
    batch = {"data": data.reshape(PER_FILE, -1), labels_key: [i % len(classes) for i in range(PER_FILE)]}
    names = [name for name, _ in reader.train_list + reader.test_list]
    contents = {**dict.fromkeys(names, batch), reader.meta["filename"]: {reader.meta["key"]: classes}}
    files = {name: pickle.dumps(content) for name, content in contents.items()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{reader.base_folder}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(reader, part, [[name, md5(files[name])] for name, _ in getattr(reader, part)])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5(files[reader.meta["filename"]])})
    monkeypatch.setattr(reader, "tgz_md5", md5(packed.getvalue()))
    return {reader.filename: packed.getvalue()}


@dataclass
class Served:
    """The archives of a data set on a mirror, and their target folder."""

    dataset: str
    mirror: Mirror
    root: Path

    def load(self, train: bool = True) -> ImageSet:
        url = self.mirror.url + (ARCHIVE if self.dataset == "cifar10" else "")
        return load_images(self.dataset, DataSettings(root=str(self.root), loading=Loading(url=url)), train)


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    files = small_cifar(monkeypatch, datasets.CIFAR10, "labels", ["plane", "car", "bird", "cat"])
    with serving(Mirror(files)) as mirror:
        yield Served("cifar10", mirror, tmp_path / "data")


@pytest.fixture
def fashion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    files = {}
    for name, _ in datasets.FashionMNIST.resources:
        count = 6 if name.startswith("train") else 3
        sizes = (count, 28, 28) if "idx3" in name else (count,)
        header = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
        files[name] = gzip.compress(header + bytes(number % 10 for number in range(np.prod(sizes))))
    monkeypatch.setattr(datasets.FashionMNIST, "resources", [(name, md5(packed)) for name, packed in files.items()])
    with serving(Mirror(files)) as mirror:
        yield Served("fashion_mnist", mirror, tmp_path / "data")


def test_concurrent_loads_download_cifar10_once(cifar: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        train, _, test, _ = pool.map(cifar.load, [True, True, False, False])
    assert train.images.shape == (5 * PER_FILE, 32, 32, 3) and test.images.shape == (PER_FILE, 32, 32, 3)
    assert train.images.dtype == torch.uint8 and train.images.is_contiguous()
    assert train.images[0, 0, 0].tolist() == FIRST_PIXEL and train.images[0].sum() == sum(FIRST_PIXEL)
    assert test.labels.tolist() == [0, 1, 2, 3] and train.classes == ("plane", "car", "bird", "cat")
    assert len(cifar.mirror.requests) == 1
    assert {path.name for path in cifar.root.iterdir() if path.suffix != ".lock"} == {FOLDER, ARCHIVE}


def test_cifar100_has_its_fine_labels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed = small_cifar(monkeypatch, datasets.CIFAR100, "fine_labels", ["apple", "pear", "trout"])
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(*packed.values())
    images = load_images("cifar100", DataSettings(root=str(tmp_path)), train=True)
    assert (images.labels.tolist(), images.classes) == ([0, 1, 2, 0], ("apple", "pear", "trout"))


def test_without_a_url_the_default_mirrors_are_tried(cifar: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reader in (("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)):
        assert reader.url in [url.format(name=name, archive=reader.filename) for url in download.CIFAR_MIRRORS]
    monkeypatch.setattr(download, "CIFAR_MIRRORS", (cifar.mirror.url + "gone", cifar.mirror.url + "{archive}"))
    assert len(load_images("cifar10", DataSettings(root=str(cifar.root)), train=False)) == PER_FILE
    assert [path for path, _ in cifar.mirror.requests] == ["gone", ARCHIVE]


@pytest.mark.parametrize("form", ["archive", "folder"])
def test_files_placed_by_hand_are_used_as_they_are(cifar: Served, form: str) -> None:
    cifar.root.mkdir()
    (cifar.root / ARCHIVE).write_bytes(cifar.mirror.files[ARCHIVE])
    if form == "folder":  # unpacked as by torchvision, without the archive
        with tarfile.open(cifar.root / ARCHIVE) as tar:
            tar.extractall(cifar.root, filter="data")
        (cifar.root / ARCHIVE).unlink()
    assert len(cifar.load()) == 5 * PER_FILE and cifar.mirror.requests == []
    assert form == "archive" or [path.name for path in cifar.root.iterdir()] == [FOLDER]


@pytest.mark.parametrize("victim", ["data_batch_3", "batches.meta"])
def test_a_damaged_folder_is_repaired_and_foreign_files_are_kept(cifar: Served, victim: str) -> None:
    cifar.load()
    folder = cifar.root / FOLDER
    os.truncate(folder / victim, 20)
    (folder / "test_batch").unlink()
    (folder / "notes.txt").write_text("mine")
    assert len(cifar.load()) == 5 * PER_FILE
    assert (folder / "notes.txt").read_text() == "mine" and len(cifar.mirror.requests) == 1


def test_fashion_mnist_uses_torchvisions_folder_and_has_one_channel(fashion: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        train, test = pool.map(fashion.load, [True, False])
    assert train.images.shape == (6, 28, 28, 1) and test.images.shape == (3, 28, 28, 1)
    assert train.images.is_contiguous() and train.images[0, 0, :12, 0].tolist() == [*range(10), 0, 1]
    assert train.labels.tolist() == [*range(6)] and train.classes[0] == "T-shirt/top" and len(train.classes) == 10
    raw = fashion.root / "FashionMNIST" / "raw"
    assert {path.name for path in raw.iterdir()} == set(fashion.mirror.files) and len(fashion.mirror.requests) == 4
    other = DataSettings(
        root=str(fashion.root.parent / "other"), loading=Loading(url=str(raw))
    )  # a folder is a valid source
    assert torch.equal(load_images("fashion_mnist", other, train=True).images, train.images)
    (packed := raw / "train-images-idx3-ubyte.gz").write_bytes(packed.read_bytes()[:-1])
    with pytest.raises(Failure, match=f"{packed.name} is damaged or another file: its md5"):
        fashion.load()


@pytest.mark.parametrize(("typed", "nearest"), [("cifar-10", "cifar10"), ("Shapes", "shapes")])
def test_an_unknown_data_set_is_answered_with_the_nearest_name(typed: str, nearest: str) -> None:
    text = rf"no data set is called '{typed}'. Did you mean {nearest}\? There are cifar10, "
    with pytest.raises(UsageError, match=text):
        load_images(typed, DataSettings(), train=True)


@pytest.mark.parametrize("name", ["cifar", "fashion"])
def test_at_hand_means_that_loading_writes_nothing(name: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(name)
    source, settings = find_source(served.dataset), DataSettings(root=str(served.root))
    assert not source.at_hand(settings)
    served.load()
    assert source.at_hand(settings)
    next((served.root / (FOLDER if name == "cifar" else "FashionMNIST/raw")).iterdir()).unlink()
    assert not source.at_hand(settings)


@pytest.mark.parametrize("part", [".", "train"])
def test_a_folder_of_images_is_refused_as_the_root_of_another_data_set(tmp_path: Path, part: str) -> None:
    (tmp_path / part / "cat").mkdir(parents=True)
    settings = DataSettings(root=str(tmp_path), images=Images(count=20, image_size=8))
    with pytest.raises(UsageError, match="shapes are drawn"):
        load_images("shapes", settings, train=True)
    (tmp_path / part / "cat" / "1.JPG").touch()
    text = "holds folders of images, but the data set is cifar10: add --dataset folder"
    with pytest.raises(UsageError, match=text):
        load_images("cifar10", settings, train=True)


def test_settings_that_the_data_set_does_not_use_are_refused(cifar: Served) -> None:
    for images in (Images(image_size=64), Images(channels=1), Images(num_classes=100)):
        with pytest.raises(
            UsageError, match=r"data\.images\.\w+ is for .*shapes, and cifar10 does not use it: leave it"
        ):
            load_images("cifar10", DataSettings(images=images), train=True)
    with pytest.raises(UsageError, match=r"data\.images\.channels must be 1 or 3, not 2"):
        Images(channels=2)


def test_a_users_data_set_is_a_registry_entry_or_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DataSettings(images=Images(count=12))
    own = Source(lambda settings, train: shapes(train, count=settings.images.count, image_size=9))
    monkeypatch.setitem(SOURCES, "mine", own)
    given = replace(settings, images=Images(count=12, image_size=9))  # a function may use all
    assert load_images("mine", given, train=True).images.shape == (12, 9, 9, 3)
    (tmp_path / "my_own_data.py").write_text(
        "from cifar_lit.data.shapes import shapes\n"
        "from cifar_lit.data.sources import Source\n"
        "def load(settings, train):\n"
        "    return shapes(train, count=settings.images.count, image_size=9)\n"
        "remote = Source(load, at_hand=lambda settings: False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load_images("my_own_data.load", settings, train=True)) == 12
    assert find_source("my_own_data.load").at_hand(settings) and not find_source("my_own_data.remote").at_hand(settings)
    assert len(load_images(own, settings, train=True)) == len(load_images(own.load, settings, train=True)) == 12


@pytest.mark.parametrize(
    ("images", "labels", "fault"),
    [
        (torch.zeros(2, 4, 4, 3), [0, 1], "images must be uint8"),
        (torch.zeros(2, 4, 4, 4, dtype=torch.uint8), [0, 1], "1 or 3 channels"),
        (torch.zeros(3, 4, 4, 3, dtype=torch.uint8), [0, 1], "3 images have 2 labels"),
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), [0, 2], "labels must be in 0 … 1"),
        (torch.zeros(1, 4, 4, 3, dtype=torch.uint8), [[1.0, 0.0]], r"rename the class 'b\|c'"),
    ],
)
def test_images_and_labels_of_a_users_data_set_have_to_fit(images: torch.Tensor, labels: list[int], fault: str) -> None:
    with pytest.raises((ValueError, UsageError), match=fault):
        ImageSet(images, torch.tensor(labels), ("a", "b|c"))
