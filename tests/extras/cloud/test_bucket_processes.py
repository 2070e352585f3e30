"""Killed trainings, and trainings in two processes, give the same weights from a bucket as from a local folder."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from contract.command_line import OWN_IMAGES, RECIPE, SMALL
from data.own_images import save_photo
from extras.cloud.spoiled_bucket import Bucket

WORDS = (*SMALL, *OWN_IMAGES, "--data.val_size", 4, "--batch-size", 8, "--epochs", 4, "--checkpoint-every", 2)
STREAM = pytest.mark.parametrize("stream", ["false", "true"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for seed in range(60):
        save_photo(tmp_path / "photos" / ("cat", "dog")[seed % 2] / f"{seed}.jpg", seed)
    return tmp_path / "photos"


def start(folder: Path, *words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cifar_lit", "train", *map(str, (*WORDS, *words))]
    environment = {**os.environ, "CIFAR_LIT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text(RECIPE)
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def weights(folder: Path) -> bytes:
    return (folder / "lightning_logs/small-1/model.safetensors").read_bytes()


@pytest.mark.slow
@STREAM
def test_two_processes_train_alike(stream: str, bucket: Bucket, photos: Path, tmp_path: Path) -> None:
    url = bucket.fill(photos, "photos")
    trainings = {"local": ("--data-dir", photos), "bucket": ("--data-dir", url, "--data.stream", stream)}
    for name, words in trainings.items():
        folder = tmp_path / name
        assert start(folder, *words, "--devices", 2).wait(200) == 0, (folder / "output.txt").read_text()
    assert weights(tmp_path / "local") == weights(tmp_path / "bucket")
    assert len(bucket.read("GET")) in (60, 61)  # one process reads for both, the first image also for its size


@pytest.mark.stress
@STREAM
def test_ten_kills_and_a_cache_that_is_deleted_change_no_bit(
    stream: str, bucket: Bucket, photos: Path, tmp_path: Path
) -> None:
    assert start(tmp_path / "local", "--data-dir", photos).wait(200) == 0
    folder, moments = tmp_path / "bucket", random.Random(0)
    words: tuple[object, ...] = ("--data-dir", bucket.fill(photos, "photos"), "--data.stream", stream)
    kills = 0
    while kills < 10:
        resume = ("--resume",) if [*folder.glob("lightning_logs/*/checkpoints/last.ckpt")] else ()
        if not resume:
            shutil.rmtree(folder / "lightning_logs", ignore_errors=True)
        process = start(folder, *words, *resume)
        time.sleep(moments.uniform(1, 7))
        if process.poll() is not None:  # finished before the kill
            break
        process.kill()
        process.wait()
        kills += 1
        if kills % 2:
            shutil.rmtree(folder / "cache", ignore_errors=True)
    if process.poll() != 0:
        resume = ("--resume",) if [*folder.glob("lightning_logs/*/checkpoints/last.ckpt")] else ()
        assert start(folder, *words, *resume).wait(200) == 0, (folder / "output.txt").read_text()
    assert kills >= 5
    assert weights(folder) == weights(tmp_path / "local")
