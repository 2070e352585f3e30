"""With data.stream, the images of a bucket are the same as a copy, but only decoded ones are kept on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data.own_images import save_photo
from extras.cloud.spoiled_bucket import Bucket
from PIL import Image

from cifar_lit.data import cache as decoded_cache
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.data.sources import load_images
from cifar_lit.errors import Failure, UsageError
from cifar_lit.extras.cloud import store

NewProcess = Callable[[], None]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def url(bucket: Bucket, tmp_path: Path) -> str:
    """Return a bucket with two classes of four photos each."""
    for seed in range(8):
        save_photo(tmp_path / "photos" / ("cat", "dog")[seed % 2] / f"{seed}.jpg", seed)
    return bucket.fill(tmp_path / "photos", "photos")


def load(root: object, cache: Path, stream: bool = True, image_size: int | None = 16) -> ImageSet:
    settings = SourceSettings(root=str(root), cache_dir=str(cache), image_size=image_size, stream=stream)
    return load_images("folder", settings, train=True)


def images_on_disk(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.suffix in (".png", ".jpg") and path.stat().st_size]


def test_no_image_stays_on_the_disk_and_a_second_process_reads_none(
    url: str, bucket: Bucket, cache: Path, new_process: NewProcess
) -> None:
    copied = load(url, cache, stream=False)
    bucket.requests.clear()
    streamed = load(url, cache / "other")
    assert len(bucket.read("GET")) == 8
    assert images_on_disk(cache / "other") == []
    new_process()
    again = load(url, cache / "other")
    assert len(bucket.read("GET")) == 8
    for each in (streamed, again):
        assert torch.equal(each.images, copied.images) and each.names == copied.names
        assert copied.versions is not None and each.versions is not None
        assert torch.equal(each.versions, copied.versions)


def test_only_a_changed_object_is_read_again(
    url: str, bucket: Bucket, cache: Path, tmp_path: Path, new_process: NewProcess
) -> None:
    photos = [(tmp_path / "photos" / name).read_bytes().ljust(50_000) for name in ("cat/0.jpg", "dog/1.jpg")]
    bucket.put("photos/cat/0.jpg", photos[0])
    before = load(url, cache)
    bucket.put("photos/cat/0.jpg", photos[1])  # equally large
    bucket.requests.clear()
    new_process()
    after = load(url, cache)
    assert bucket.read("GET") == ["photos/cat/0.jpg"]
    assert before.names and not torch.equal(after.images, before.images)


def test_few_images_are_on_the_disk_at_a_time(
    url: str, bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded_cache, "CHUNK", 2)
    counts = []

    def count(app: Any, environ: Any, start: Any) -> Any:
        counts.append(len(images_on_disk(cache)))
        return app(environ, start)

    bucket.faults.append(("GET photos/.*jpg", count))
    load(url, cache)
    assert len(counts) == 8 and max(counts) <= 2


def test_a_fault_ends_with_the_name_of_the_object_and_what_was_decoded_is_kept(
    url: str, bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, new_process: NewProcess
) -> None:
    monkeypatch.setattr(decoded_cache, "CHUNK", 1)

    def expire(app: Any, environ: Any, start: Any) -> Any:
        start("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>ExpiredToken</Code></Error>"]

    bucket.faults.append(("GET photos/dog/5.jpg", expire))
    with pytest.raises(Failure, match=f"^{url}/dog/5.jpg: access is refused .* renew the credentials"):
        load(url, cache)
    assert images_on_disk(cache) == []
    bucket.faults.clear()
    bucket.requests.clear()
    new_process()
    assert len(load(url, cache)) == 6
    assert 0 < len(bucket.read("GET")) < 8


def test_what_a_killed_process_left_is_deleted(url: str, cache: Path) -> None:
    load(url, cache)
    (index,) = cache.glob("*/index.json")
    (index.parent / "fetched").mkdir()
    (index.parent / "fetched/0123.png").write_bytes(b"1")
    index.unlink()
    load(url, cache)
    assert images_on_disk(cache) == []


def test_nothing_is_read_again_when_the_folder_of_empty_files_is_lost(
    url: str, bucket: Bucket, cache: Path, new_process: NewProcess
) -> None:
    before = load(url, cache)
    shutil.rmtree(cache / "buckets")
    bucket.requests.clear()
    new_process()
    assert torch.equal(load(url, cache).images, before.images)
    assert bucket.read("GET") == []


def test_a_file_written_to_the_folder_of_empty_files_is_not_used(
    url: str, bucket: Bucket, cache: Path, tmp_path: Path, new_process: NewProcess
) -> None:
    before = load(url, cache)
    (empty,) = cache.rglob("cat/0.jpg")
    empty.write_bytes((tmp_path / "photos/dog/1.jpg").read_bytes())
    new_process()
    assert torch.equal(load(url, cache).images, before.images)
    assert images_on_disk(cache) == []


def test_a_table_in_the_bucket_is_read_and_its_images_are_streamed(bucket: Bucket, url: str, cache: Path) -> None:
    rows = [f"{('cat', 'dog')[seed % 2]}/{seed}.jpg,{seed % 2}" for seed in range(8)]
    bucket.put("photos/labels.csv", "\n".join(["path,label", *rows]).encode())
    table = f"{url}/labels.csv"
    streamed = load(table, cache)
    assert images_on_disk(cache) == []
    assert torch.equal(streamed.images, load(table, cache, stream=False).images)


def test_images_larger_than_the_disk_are_streamed_and_the_refused_copy_says_so(
    bucket: Bucket, url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("photos/cat/large.jpg", b"1" * 1_000_000)  # damaged
    free = SimpleNamespace(free=store.SPARE_BYTES + 500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(Failure, match=r"do not copy images: --data\.stream true"):
        load(url, cache, stream=False)
    with pytest.raises(Failure, match=r"1 of 9 images .* damaged: cat/large\.jpg"):
        load(url, cache)


def test_a_table_may_also_list_a_local_file(bucket: Bucket, url: str, cache: Path, tmp_path: Path) -> None:
    photo = save_photo(tmp_path / "elsewhere/9.jpg", 9)
    rows = [f"{('cat', 'dog')[seed % 2]}/{seed}.jpg,{seed % 2}" for seed in range(8)]
    bucket.put("photos/labels.csv", "\n".join(["path,label", *rows, f"{photo},0"]).encode())
    table = f"{url}/labels.csv"
    streamed = load(table, cache)
    assert torch.equal(streamed.images, load(table, cache, stream=False).images)
    assert photo.stat().st_size and images_on_disk(cache / "buckets")


def test_a_copy_is_kept_when_the_bucket_is_streamed(
    url: str, bucket: Bucket, cache: Path, new_process: NewProcess
) -> None:
    load(url, cache, stream=False)
    load(url, cache)
    bucket.requests.clear()
    new_process()
    load(url, cache, stream=False)
    assert bucket.read("GET") == []


def test_size_and_levels_of_deep_images_are_those_of_a_copy(bucket: Bucket, cache: Path, tmp_path: Path) -> None:
    for number in range(8):
        file = tmp_path / "deep" / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(1000, 1300, (16, 16), np.uint16)
        Image.fromarray(values).save(file)
    deep = bucket.fill(tmp_path / "deep", "deep")
    streamed, copied = load(deep, cache, image_size=None), load(deep, cache, stream=False, image_size=None)
    assert copied.levels is not None and streamed.levels == copied.levels
    assert streamed.images.shape[1:] == (16, 16, 3) and torch.equal(streamed.images, copied.images)


def test_streaming_needs_a_bucket(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.stream reads the images of a bucket: leave it out"):
        load(tmp_path, cache)
