"""Own images in a bucket are the same as in a local folder, whatever happens to network, bucket and copy."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract.command_line import OWN_IMAGES, SMALL, run_command
from data.own_images import save_photo
from extras.cloud.spoiled_bucket import Bucket, Fault

from cifar_lit.data import split_images
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.data.sources import load_images
from cifar_lit.errors import Failure, UsageError
from cifar_lit.extras.cloud import images, store
from cifar_lit.runs.run_folder import read_json

NewProcess = Callable[[], None]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two classes with eight photos each."""
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(16):
        save_photo(folder / ("cat", "dog")[seed % 2] / f"{seed}.png", seed)
    return folder


@pytest.fixture
def url(bucket: Bucket, photos: Path) -> str:
    return bucket.fill(photos, "a/photos")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def settings(root: object, cache: Path) -> SourceSettings:
    return SourceSettings(root=str(root), cache_dir=str(cache), image_size=16)


def load(root: object, cache: Path, train: bool = True) -> ImageSet:
    return load_images("folder", settings(root, cache), train)


def test_bucket_and_folder_give_bit_equal_weights(url: str, photos: Path, working_folder: Path) -> None:
    words = (*SMALL, *OWN_IMAGES, "--data.val_size", 2, "--batch-size", 8, "--data.placement", "host")
    runs = []
    for root, stream in ((photos, "false"), (url, "false"), (url, "true")):  # workers fork after the bucket was read
        answer = run_command(*words, "--data-dir", root, "--data.stream", stream)
        assert answer.code == 0, answer.err
        runs.append(working_folder / f"lightning_logs/small-{len(runs) + 1}")
    local, *others = ((run / "model.safetensors").read_bytes() for run in runs)
    assert others == [local, local]
    record = read_json(runs[1] / "metrics.json")["data"]
    assert len(record.pop("listing")) == 64
    assert record == read_json(runs[0] / "metrics.json")["data"]


def test_a_table_in_the_bucket_names_labels_and_parts(bucket: Bucket, photos: Path, cache: Path) -> None:
    rows = [f"all/{seed}.png,{seed % 2},{('train', 'test')[seed > 11]}" for seed in range(16)]
    table = "\n".join(["path,label,split", *rows])
    bucket.put("b/labels.csv", table.encode())
    for seed in range(16):
        bucket.put(f"b/all/{seed}.png", (photos / ("cat", "dog")[seed % 2] / f"{seed}.png").read_bytes())
    train, test = (load(f"{bucket.url}/b/labels.csv", cache, part) for part in (True, False))
    assert (train.classes, len(train), test.labels.tolist()) == (("0", "1"), 12, [0, 0, 1, 1])
    assert train.versions is not None and len(train.versions.unique()) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_local_table_names_labels_and_parts_of_images_in_a_bucket(
    stream: bool, bucket: Bucket, url: str, photos: Path, cache: Path, tmp_path: Path
) -> None:
    rows = [f"{('cat', 'dog')[seed % 2]}/{seed}.png,{seed % 4},{('train', 'test')[seed > 11]}" for seed in range(16)]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,label,split", *rows]))
    here = replace(settings(url, cache), labels=str(table), stream=stream)
    train, test = (load_images("folder", here, part) for part in (True, False))
    assert (train.classes, len(train), test.labels.tolist()) == (("0", "1", "2", "3"), 12, [0, 1, 2, 3])
    copy = shutil.copytree(photos, tmp_path / "photos")
    assert torch.equal(train.images, load(shutil.copy(table, copy), cache).images)
    assert train.versions is not None and len(train.versions.unique()) == 12


def test_a_changed_object_of_a_local_table_is_noticed(
    bucket: Bucket, url: str, photos: Path, cache: Path, tmp_path: Path, new_process: NewProcess
) -> None:
    rows = [f"{('cat', 'dog')[seed % 2]}/{seed}.png,{seed % 2}" for seed in range(16)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    here = replace(settings(url, cache), labels=str(tmp_path / "labels.csv"))
    before = [load_images("folder", here, part).images for part in (True, False)]
    bucket.put("a/photos/cat/0.png", (photos / "dog/1.png").read_bytes())
    new_process()
    after = [load_images("folder", here, part).images for part in (True, False)]
    assert not torch.equal(torch.cat(before), torch.cat(after))


def test_a_missing_table_of_labels_is_refused(url: str, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv"):
        load_images("folder", replace(settings(url, cache), labels=str(tmp_path / "none.csv")), train=True)


def test_a_process_lists_once_and_a_second_one_copies_nothing_again(
    url: str, bucket: Bucket, cache: Path, new_process: NewProcess
) -> None:
    load(url, cache)
    load(url, cache, train=False)
    assert len(bucket.read("GET")) == 16
    lists = len(bucket.requests) - 16
    new_process()
    load(url, cache)
    assert len(bucket.read("GET")) == 16 and len(bucket.requests) - 16 > lists


def test_two_processes_at_once_copy_each_object_once(
    url: str, bucket: Bucket, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = images.local_copy.__wrapped__  # without the memory of this process
    with ThreadPoolExecutor() as pool:
        assert len({*pool.map(copy, [url, url], [cache, cache], [False, False])}) == 1
    assert len(bucket.read("GET")) == 16
    assert capsys.readouterr().err.count("waiting for another process that copies the same bucket") == 1


def test_ranks_that_start_later_use_the_listing_of_the_first_one(url: str, bucket: Bucket, cache: Path) -> None:
    load(url, cache)
    before = len(bucket.requests)
    images.local_copy.cache_clear()  # a process with the environment of the first one
    load(url, cache)
    assert len(bucket.requests) == before


def test_the_copy_follows_changed_new_and_deleted_objects(
    url: str, bucket: Bucket, cache: Path, photos: Path, new_process: NewProcess
) -> None:
    load(url, cache)
    bucket.put("a/photos/cat/0.png", (photos / "cat/2.png").read_bytes())
    bucket.put("a/photos/fox/1.png", (photos / "cat/4.png").read_bytes())
    for number in range(1, 16, 2):
        bucket.delete(f"a/photos/dog/{number}.png")
    bucket.requests.clear()
    new_process()
    train, test = load(url, cache), load(url, cache, train=False)
    assert train.classes == ("cat", "fox")
    assert len(train) + len(test) == 9
    assert bucket.read("GET") == ["a/photos/cat/0.png", "a/photos/fox/1.png"]


def test_a_large_data_set_is_compared_by_the_versions_of_its_objects(
    url: str, bucket: Bucket, photos: Path, cache: Path, new_process: NewProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_images, "MAX_HASHED", 0)  # pixels are too many to compare
    saved = split_images.split_rows(split_images.SplitImages("folder", settings(url, cache), 2))
    bucket.put("a/photos/cat/0.png", (photos / "cat/0.png").read_bytes() + b" ")
    new_process()
    parts = split_images.SplitImages("folder", settings(url, cache), 2)
    assert "images of this run have changed (1 of 16): cat/0.png. Restore" in split_images.split_fault(parts, saved)


@pytest.mark.parametrize("loss", ["folder", "file", "truncated"])
def test_what_is_lost_in_the_cache_is_copied_again(
    loss: str, url: str, bucket: Bucket, cache: Path, new_process: NewProcess
) -> None:
    expected = load(url, cache).images
    (copy,) = cache.glob("buckets/*/images")
    if loss == "folder":
        shutil.rmtree(cache)
    elif loss == "file":
        (copy / "cat/0.png").unlink()
    else:
        (copy / "cat/0.png").write_bytes((copy / "cat/0.png").read_bytes()[:-1])
    bucket.requests.clear()
    new_process()
    assert torch.equal(load(url, cache).images, expected)
    assert len(bucket.read("GET")) == (16 if loss == "folder" else 1)


def test_an_interrupted_copy_resumes(
    url: str, bucket: Bucket, cache: Path, new_process: NewProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "CONNECTIONS", 1)
    bucket.faults.append(("GET a/photos/dog/1.png", status(403, "ExpiredToken")))
    with pytest.raises(Failure, match=r"photos/dog/1.png: access is refused \(ExpiredToken\): renew the credentials"):
        load(url, cache)
    bucket.faults.clear()
    bucket.requests.clear()
    new_process()
    assert len(load(url, cache)) == 12
    assert bucket.read("GET")[0] == "a/photos/dog/1.png" and len(bucket.read("GET")) == 8


# ---- Faults of the network and the bucket.


def status(code: int, name: str) -> Fault:
    """Return a fault: an error of S3."""

    def fault(app: Any, environ: Any, start: Any) -> list[bytes]:
        start(f"{code} {name}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{name}</Code><Message>secret-text</Message></Error>".encode()]

    return fault


def spoiled(spoil: Callable[[bytes], bytes]) -> Fault:
    """Return a fault: an answer with its headers and another body."""

    def fault(app: Any, environ: Any, start: Any) -> list[bytes]:
        return [spoil(b"".join(app(environ, start)))]

    return fault


def once(bucket: Bucket, fault: Fault) -> Fault:
    """Return a fault that happens for the first matching request only."""

    def first(app: Any, environ: Any, start: Any) -> Any:
        bucket.faults.clear()
        return fault(app, environ, start)

    return first


PASSING = {
    "truncated": spoiled(lambda body: body[:-7]),
    "damaged": spoiled(lambda body: body[:-7] + b"1234567"),
    "throttled": status(503, "SlowDown"),
}


@pytest.mark.parametrize("kind", PASSING)
def test_a_passing_fault_is_retried(kind: str, url: str, bucket: Bucket, photos: Path, cache: Path) -> None:
    bucket.faults.append(("GET a/photos/dog/1.png", once(bucket, PASSING[kind])))
    loaded = load(url, cache)
    assert torch.equal(loaded.images, load(photos, cache).images)
    assert bucket.read("GET").count("a/photos/dog/1.png") == 2


LASTING = {
    "truncated": (PASSING["truncated"], r"arrives damaged \(.*\), 4 times"),
    "throttled": (PASSING["throttled"], "cannot be read or written .*SlowDown.*: check network"),
    "missing": (status(404, "NoSuchKey"), "does not exist, or was deleted after it was listed"),
    "changed": (status(412, "PreconditionFailed"), "has changed since it was listed: start again"),
}


@pytest.mark.parametrize("kind", LASTING)
def test_a_lasting_fault_names_the_object_and_the_remedy(kind: str, url: str, bucket: Bucket, cache: Path) -> None:
    fault, text = LASTING[kind]
    bucket.faults.append(("GET a/photos/dog/1.png", fault))
    with pytest.raises(Failure, match=f"^{url}/dog/1.png {text}") as error:
        load(url, cache)
    assert "secret-text" not in str(error.value)


def test_an_object_that_arrives_byte_by_byte_has_a_deadline(
    url: str, bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.CLIENT, "timeout", "1s")
    monkeypatch.setattr(store, "ATTEMPTS", 2)
    ends = threading.Event()

    def drip(app: Any, environ: Any, start: Any) -> Iterator[bytes]:
        for byte in b"".join(app(environ, start)):
            yield bytes([byte])
            if ends.wait(0.2):
                return

    bucket.faults.append(("GET a/photos/dog/1.png", drip))
    began = time.monotonic()
    with pytest.raises(Failure, match=f"^{url}/dog/1.png arrives damaged"):
        load(url, cache)
    ends.set()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("server_compares", [True, False])
def test_an_object_that_changes_after_the_listing_is_noticed(
    server_compares: bool, url: str, bucket: Bucket, cache: Path
) -> None:
    conditions = []

    def change(app: Any, environ: Any, start: Any) -> Any:
        if not conditions:
            bucket.put("a/photos/dog/1.png", b"another content")
        conditions.append(environ["HTTP_IF_MATCH"])
        if not server_compares:
            del environ["HTTP_IF_MATCH"]
        return app(environ, start)

    bucket.faults.append(("GET a/photos/dog/1.png", change))
    with pytest.raises(Failure, match=f"^{url}/dog/1.png has changed since it was listed: start again"):
        load(url, cache)
    assert len(conditions[0].strip('"')) == 32  # the ETag
    assert not list(cache.rglob("dog/1.png"))


def test_an_etag_that_is_no_md5_is_accepted_after_a_second_look(url: str, bucket: Bucket, cache: Path) -> None:
    bucket.faults.append((r"GET a/photos/.*png", spoiled(lambda body: body[:-4] + b"1234")))  # alike each time
    load(url, cache)
    assert 16 < len(bucket.read("GET")) <= 32


def test_no_network_is_one_line(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:9")
    with pytest.raises(Failure, match=f"^{url} cannot be read or written .*: check network") as error:
        load(url, cache)
    assert "secret" not in str(error.value)


def test_a_profile_of_the_user_gives_credentials_unless_the_environment_does(
    url: str, bucket: Bucket, cache: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "aws_access_key_id = of-the-profile\naws_secret_access_key = secret\nregion = eu-west-1"
    (tmp_path / "credentials").write_text(f"[default]\n{keys}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    users: list[str] = []

    def note_user(app: Any, environ: Any, start: Any) -> Any:
        key, _, region, *_ = environ["HTTP_AUTHORIZATION"].partition("Credential=")[2].split("/")
        users.append(f"{key} in {region}")
        return app(environ, start)

    bucket.faults.append(("GET", note_user))
    load(url, cache / "1")
    assert set(users) == {"key in us-east-1"}
    users.clear()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    assert torch.equal(load(url, cache / "2").images, load(photos, cache).images)
    assert set(users) == {"of-the-profile in eu-west-1"}


def test_a_profile_that_does_not_exist_is_one_line(
    url: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(Failure, match=f"^{url} cannot be read .*nobody.* could not be found"):
        load(url, cache)


def test_a_bucket_that_does_not_exist_is_one_line(bucket: Bucket, cache: Path) -> None:
    with pytest.raises(Failure, match=r"^s3://no-such-bucket/a does not exist"):
        load("s3://no-such-bucket/a", cache)


def test_a_full_disk_is_noticed_before_anything_is_copied(
    url: str, bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=store.SPARE_BYTES + 1000))
    with pytest.raises(Failure, match=r"needs 0.\d GB, but the disk of .* has 0.3 GB free: free some space"):
        load(url, cache)
    assert bucket.read("GET") == []


# ---- Names and URLs that come from others.


@pytest.mark.parametrize(
    "key", ["../evil.png", "cat/../../evil.png", "cat/a\\..\\evil.png", "cat/\x1b[2J.png", "cat//1.png"]
)
def test_names_that_leave_the_folder_are_refused(key: str, url: str, bucket: Bucket, cache: Path) -> None:
    bucket.put_raw(f"a/photos/{key}", b"1")
    with pytest.raises(Failure, match=f"^{url}.*(rename or remove it|names of objects)$"):
        load(url, cache)
    assert not list(cache.rglob("*.png"))


@pytest.mark.parametrize("key", ["cat/0.PNG", "Cat/x.png", "cat/0.png/x.png", "dog/\u0041\u030a.png"])
def test_names_of_one_file_on_other_systems_are_refused(key: str, url: str, bucket: Bucket, cache: Path) -> None:
    bucket.put("a/photos/dog/\u00e5.png", b"1")
    bucket.put(f"a/photos/{key}", b"1")
    with pytest.raises(Failure, match="are one file on systems where case does not count: rename one"):
        load(url, cache)


def test_empty_objects_for_folders_and_other_files_are_left_out(
    url: str, bucket: Bucket, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put_raw("a/photos/cat/", b"")
    bucket.put("a/photos/notes.pdf", b"1")
    assert len(load(url, cache)) == 12
    assert f"{url}: 2 objects are neither images nor tables" in capsys.readouterr().err


SECRETS = ["s3://user:secret@b/a", "s3://b/a?X-Amz-Signature=secret", "https://h/a?sig=secret", "az://c/a#secret"]


@pytest.mark.parametrize("url", SECRETS)
def test_a_url_with_credentials_is_refused_and_written_nowhere(url: str, working_folder: Path) -> None:
    answer = run_command(*SMALL, *OWN_IMAGES, "--data-dir", url)
    assert (answer.code, len(answer.err.splitlines())) == (2, 1)
    assert "put credentials into the environment" in answer.err and "secret" not in answer.err
    assert not list(working_folder.glob("lightning_logs/*/*"))


def test_a_file_of_somebody_else_cannot_choose_a_bucket(url: str, bucket: Bucket, working_folder: Path) -> None:
    for setting in (f"data: {{root: '{url}'}}", f"copy_to: {url}"):
        (working_folder / "theirs.yaml").write_text(setting)
        answer = run_command(*SMALL, *OWN_IMAGES, "--config", "theirs.yaml")
        assert answer.code == 2 and "which no file may choose" in answer.err
    assert "GET" not in str(bucket.requests)


def test_a_bucket_is_own_images(url: str, cache: Path) -> None:
    with pytest.raises(UsageError, match="a bucket holds own images, but the data set is cifar10: add --dataset fol"):
        load_images("cifar10", SourceSettings(root=url), train=True)


def test_other_schemes_are_refused(cache: Path) -> None:
    with pytest.raises(UsageError, match=r"^file://host is no object storage: use one of s3, gs, az"):
        load("file://host/etc", cache)
