"""A run is copied to a bucket while it trains, and resumed from there as if it had not moved."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from contract.command_line import SMALL, Answer, run_command
from extras.cloud.spoiled_bucket import Bucket
from extras.cloud.test_images import spoiled, status

from cifar_lit.errors import Failure, UsageError
from cifar_lit.extras.cloud import run_copy, store
from cifar_lit.extras.cloud.run_copy import RunCopy, fetch_run, upload
from cifar_lit.files import PART
from cifar_lit.runs import config_file

FILES = {"config.yaml": b"{}", "checkpoints/last.ckpt": b"last", "checkpoints/best.ckpt": b"best", "metrics.csv": b"1"}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, working_folder: Path) -> None:
    monkeypatch.setattr(run_copy, "PERIOD", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(working_folder / "home"))


def train(*words: object, **variables: str) -> Answer:
    return run_command(*SMALL, "--epochs", 3, *words, **variables)


def test_a_run_resumed_from_a_bucket_equals_an_uninterrupted_one(
    bucket: Bucket, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: RunCopy, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    assert train("--logs", "whole").code == 0
    target = ("--copy-to", f"{bucket.url}/runs")
    with monkeypatch.context() as patch:
        patch.setattr(RunCopy, "on_train_epoch_start", interrupt)
        answer = train(*target)
    assert answer.code == 130
    assert f"run copied to {bucket.url}/runs/small-1" in answer.err
    shutil.rmtree(working_folder / "lightning_logs")

    resume = ("--resume", f"{bucket.url}/runs/small-1")
    monkeypatch.setattr(config_file, "_allowed", set())  # forget what was typed in this process
    there = {"XDG_CACHE_HOME": str(working_folder / "home of another machine")}
    refused = run_command(*resume, **there)
    assert refused.code == 2 and "sets copy_to to 's3://" in refused.err
    answer = run_command(*resume, *target, **there)
    assert answer.code == 0, answer.err
    whole, resumed = (working_folder / logs / "small-1/model.safetensors" for logs in ("whole", "lightning_logs"))
    assert whole.read_bytes() == resumed.read_bytes()
    copied = {"metrics.json", "model.safetensors", "checkpoints/best.ckpt", "config.yaml", "metrics.csv", ".copy"}
    assert copied <= {key.removeprefix("runs/small-1/") for key in bucket.names()}
    answer = run_command(*resume)
    assert answer.code == 2 and "is finished" in answer.err


def test_an_unreachable_bucket_does_not_end_the_training(working_folder: Path, bucket: Bucket) -> None:
    bucket.faults.append(("PUT", status(503, "SlowDown")))
    answer = train("--copy-to", f"{bucket.url}/runs")
    assert answer.code == 0
    told, last = (line for line in answer.err.splitlines() if "SlowDown" in line)
    assert "the training continues" in told and last.startswith("the copy of the run is incomplete")
    assert (working_folder / "lightning_logs/small-1/metrics.json").exists()


def write_run(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def copying(bucket: Bucket, working_folder: Path) -> Iterator[tuple[RunCopy, Path]]:
    """Return the copy of the run logs/run-1, which has been started, and the folder."""
    run = write_run(working_folder / "logs/run-1")
    folder: Any = SimpleNamespace(path=run)
    copy = RunCopy(f"{bucket.url}/runs/", folder)
    trainer: Any = SimpleNamespace(is_global_zero=True, fast_dev_run=False)
    copy.on_fit_start(trainer, pl_module=trainer)
    yield copy, run
    copy.finish_copy()


def wait_for(bucket: Bucket, key: str, data: bytes) -> None:
    end = time.monotonic() + 10
    while key not in bucket.names() or bucket.content(key) != data:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_checkpoints_are_uploaded_in_mid_training_after_what_they_need(
    copying: tuple[RunCopy, Path], bucket: Bucket
) -> None:
    copy, run = copying
    wait_for(bucket, "runs/run-1/checkpoints/last.ckpt", b"last")
    bucket.requests.clear()
    write_run(run, {"metrics.csv": b"1, 2", "checkpoints/last.ckpt": b"2", "checkpoints/best.ckpt": b"3"})
    wait_for(bucket, "runs/run-1/checkpoints/last.ckpt", b"2")
    write_run(run, {"metrics.json": b"{}", ".lock": b"", "x" + PART: b"", "checkpoints/previous.ckpt": b"1"})
    (run / "link").symlink_to(__file__)
    copy.finish_copy()
    order = [request for request in bucket.requests if request.startswith("PUT") and ".copy" not in request]
    names = ("checkpoints/best.ckpt", "metrics.csv", "checkpoints/last.ckpt", "metrics.json")
    assert order == [f"PUT runs/run-1/{name}?" for name in names]


def test_an_upload_is_tried_again_until_the_bucket_answers(
    copying: tuple[RunCopy, Path], bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.faults.append(("PUT", status(403, "ExpiredToken")))
    copy, run = copying
    write_run(run, {"checkpoints/last.ckpt": b"new"})
    time.sleep(0.3)
    bucket.faults.clear()
    wait_for(bucket, "runs/run-1/checkpoints/last.ckpt", b"new")
    copy.finish_copy()
    assert capsys.readouterr().err.splitlines()[-1] == f"run copied to {bucket.url}/runs/run-1"


def test_the_end_waits_a_limited_time_for_a_bucket_that_hangs(
    copying: tuple[RunCopy, Path], bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, run = copying
    wait_for(bucket, "runs/run-1/checkpoints/last.ckpt", b"last")
    bucket.faults.append(("PUT", lambda app, environ, start: time.sleep(2) or app(environ, start)))
    monkeypatch.setattr(run_copy, "FINAL_SECONDS", 0.2)
    write_run(run, {"metrics.json": b"{}"})
    start = time.monotonic()
    copy.finish_copy()
    assert time.monotonic() - start < 1.5
    assert "the copy of the run is incomplete" in capsys.readouterr().err
    bucket.faults.clear()


def test_the_copy_of_another_run_is_not_overwritten(copying: tuple[RunCopy, Path], bucket: Bucket) -> None:
    _, run = copying
    wait_for(bucket, "runs/run-1/checkpoints/last.ckpt", b"last")
    other: Any = SimpleNamespace(path=write_run(run.parent / "elsewhere/run-1", {"checkpoints/last.ckpt": b"other"}))
    second = RunCopy(f"{bucket.url}/runs", other)
    second.on_fit_start(SimpleNamespace(is_global_zero=True, fast_dev_run=False), pl_module=other)  # type: ignore
    second.finish_copy()
    assert "is the copy of another run: choose another place with --copy-to" in second._fault
    assert bucket.content("runs/run-1/checkpoints/last.ckpt") == b"last"


def test_a_file_that_grows_or_is_large_is_uploaded_as_it_was(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_copy, "PART_BYTES", 6 << 20)  # S3 takes no parts below 5 MiB
    data = os.urandom(13 << 20)
    (tmp_path / "large").write_bytes(data + b"more")
    upload(bucket.store, "large", tmp_path / "large", len(data))
    assert bucket.content("large") == data


def test_an_upload_of_another_size_is_noticed(bucket: Bucket, tmp_path: Path) -> None:
    def shorter(app: Any, environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [("Content-Length", "4"), ("Last-Modified", "Sun, 01 Nov 2026 10:00:00 GMT"), ("ETag", "1")])
        return []

    (tmp_path / "file").write_bytes(b"12345")
    bucket.faults.append(("HEAD file", shorter))
    with pytest.raises(Failure, match="file has 4 bytes in the bucket instead of 5"):
        upload(bucket.store, "file", tmp_path / "file", 5)


# ---- Get a run.


@pytest.fixture
def copied(bucket: Bucket, tmp_path: Path) -> str:
    """Return the URL of a run in the bucket."""
    run = write_run(tmp_path / "original")
    for name in FILES:
        upload(bucket.store, f"runs/run-1/{name}", run / name, len(FILES[name]))
    return f"{bucket.url}/runs/run-1"


def test_a_run_is_fetched_once_and_then_used_while_it_is_not_behind(copied: str, bucket: Bucket) -> None:
    bucket.put("runs/run-1/.owner", b"process 1")
    run = fetch_run(copied, Path("logs"))
    assert {name: (run / name).read_bytes() for name in FILES} == FILES
    assert not (run / ".owner").exists()
    (run / "checkpoints/last.ckpt").rename(run / "checkpoints/previous.ckpt")
    write_run(run, {"checkpoints/last.ckpt": b"later"})
    assert fetch_run(copied, Path("logs")) == run
    (run / "checkpoints/previous.ckpt").unlink()
    with pytest.raises(UsageError, match=r"^logs/run-1 has other checkpoints than s3://.*: use --resume logs/run-1"):
        fetch_run(copied, Path("logs"))


def test_a_bucket_that_cannot_be_read_when_a_run_is_compared_is_one_line(copied: str, bucket: Bucket) -> None:
    fetch_run(copied, Path("logs"))
    bucket.faults.append(("HEAD runs/run-1/checkpoints/last.ckpt", status(403, "AccessDenied")))
    with pytest.raises(Failure, match=f"^{copied}: access is refused"):
        fetch_run(copied, Path("logs"))


def test_a_file_with_another_checksum_is_refused(copied: str, bucket: Bucket) -> None:
    bucket.faults.append(("GET .*metrics.csv", spoiled(lambda body: b"2")))
    with pytest.raises(Failure, match=r"run-1/metrics.csv arrives damaged \(its checksum differs\), 4 times"):
        fetch_run(copied, Path("logs"))
    assert not list(Path("logs").rglob("config.yaml"))  # nothing that --resume would take for a run
    bucket.faults.clear()
    assert fetch_run(copied, Path("logs")).exists()


def test_a_run_with_a_name_that_leaves_its_folder_is_refused(copied: str, bucket: Bucket) -> None:
    bucket.put_raw("runs/run-1/a/../../../evil", b"1")
    with pytest.raises(Failure, match="evil"):
        fetch_run(copied, Path("logs"))
    assert not list(Path().rglob("*evil*"))


@pytest.mark.parametrize("missing", ["config.yaml", "checkpoints"])
def test_what_is_no_run_is_refused(missing: str, copied: str, bucket: Bucket) -> None:
    for name in [name for name in FILES if missing in name]:
        bucket.delete(f"runs/run-1/{name}")
    with pytest.raises(UsageError, match=r"is no copy of a run: it has no config.yaml and checkpoints/last.ckpt"):
        fetch_run(copied, Path("logs"))


def test_a_run_larger_than_the_disk_is_refused(copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=store.SPARE_BYTES))
    with pytest.raises(Failure, match="free some space"):
        fetch_run(copied, Path("logs"))


def test_a_copy_goes_to_a_bucket_only(working_folder: Path) -> None:
    for url in ("https://host/runs", "s3://key:secret@bucket/runs", "runs"):
        answer = train("--copy-to", url)
        assert answer.code == 2 and "secret" not in answer.err
    assert not list(working_folder.glob("lightning_logs/*/config.yaml"))
