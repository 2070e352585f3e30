"""From a data set's name to its images, those of one's own file included."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_images import save

from cifar_lit import plugins
from cifar_lit.data.shapes import shapes
from cifar_lit.data.sources import SOURCES, Source, SourceSettings, at_hand, load_images
from cifar_lit.errors import UsageError


@pytest.mark.parametrize(("typed", "meant"), [("cifar_10", "cifar10"), ("Shapes", "shapes")])
def test_an_unknown_data_set_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    for use in (at_hand, lambda name, settings: load_images(name, settings, train=True)):
        with pytest.raises(UsageError, match=rf"no data set is called '{typed}'. Did you mean {meant}\? There are cifar10, "):
            use(typed, SourceSettings())


@pytest.mark.parametrize(
    ("dataset", "file"),
    [
        ("cifar10", "cifar-10-batches-py/x"),
        ("cifar10", "cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python.tar.gz"),
        ("fashion_mnist", "FashionMNIST/raw/x"),
        ("folder", "train/x"),
    ],
)
def test_a_data_set_is_at_hand_where_its_files_are(tmp_path: Path, dataset: str, file: str) -> None:
    settings = SourceSettings(root=str(tmp_path / "here"))
    assert not at_hand(dataset, settings) and not at_hand(dataset, SourceSettings(root=None if dataset == "folder" else "no"))
    save(tmp_path / "here" / file / "0.png")
    assert at_hand(dataset, settings) and at_hand("shapes", SourceSettings())


def test_a_data_set_of_ones_own_is_a_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "mine", Source(lambda settings, train: shapes(train, count=settings.count, image_size=9)))
    settings = SourceSettings(count=12)
    assert at_hand("mine", settings) and load_images("mine", settings, train=True).images.shape == (12, 9, 9, 3)
    monkeypatch.setitem(SOURCES, "bad", Source(lambda settings, train: "images"))  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=r"bad must return a cifar_lit.data.image_set.ImageSet, not a str"):
        load_images("bad", settings, train=True)


def test_a_data_set_in_ones_own_file_is_named_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_data.py").write_text(
        "from cifar_lit.data.shapes import shapes\n"
        "from cifar_lit.data.sources import Source\n"
        "def load(settings, train):\n"
        "    return shapes(train, count=settings.count, image_size=9)\n"
        "remote = Source(load, at_hand=lambda settings: False, fixed={'channels': 3})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_allowed", set())
    with pytest.raises(UsageError, match=r"my_own_data\.load would run code of its module: type it on the command line"):
        load_images("my_own_data.load", SourceSettings(), train=True)
    plugins.allow_imports(["my_own_data.load", "my_own_data.remote"])
    assert len(load_images("my_own_data.load", SourceSettings(count=12), train=True)) == 12
    assert at_hand("my_own_data.load", SourceSettings()) and not at_hand("my_own_data.remote", SourceSettings())
    with pytest.raises(UsageError, match=r"data\.channels of my_own_data.remote is 3, not 1: leave it out"):
        load_images("my_own_data.remote", SourceSettings(channels=1), train=True)
