"""Readers of runs that others made: compared, reported, resumed."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from security.fuzz_files import ODD_TENSORS, PICTURES, checkpoint_file
from security.fuzzing import Reader, typed
from security.mutations import changed, csv_files, damaged, json_files, plain, yaml_files, zip_files

GENUINE: dict[str, bytes] = {}  # the files of a run by their places in its folder; filled before any reader is tried

CHECKPOINTS = ("checkpoints/last.ckpt", "checkpoints/best.ckpt")
TARGETS = {"link to a file": "outside/secret.png", "link to a folder": "outside", "link to /dev/zero": "/dev/zero"}
PLACES = (*TARGETS, "link to itself", "pipe", "folder", "nothing")


def files_of(kind: str) -> st.SearchStrategy[Any]:
    """Contents for a file of a run."""
    content = GENUINE[kind]
    match Path(kind).suffix:
        case ".yaml":
            return yaml_files(yaml.safe_load(content))
        case ".json":
            return json_files(json.loads(content))
        case ".csv":
            return csv_files(content.decode())
        case ".ckpt":
            contents = torch.load(io.BytesIO(content), weights_only=True)
            return changed(contents, plain | st.sampled_from(ODD_TENSORS)).map(checkpoint_file) | zip_files(content)
    return damaged(content)


def runs(*kinds: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some files of a run changed, or something else in their places."""
    contents = {kind: st.deferred(lambda kind=kind: files_of(kind)) | st.sampled_from(PLACES) for kind in kinds}
    one = st.sampled_from(kinds).flatmap(lambda kind: st.tuples(st.just(kind), contents[kind]))
    return st.lists(one, min_size=1, max_size=2).map(dict)


def put_run(given: dict[str, Any], place: str = "logs/run") -> None:
    """A copy of the genuine run with these files in it."""
    shutil.rmtree("logs", ignore_errors=True)
    for name, genuine_content in GENUINE.items():
        path, content = Path(place, name), given.get(name, genuine_content)
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case bytes():
                path.write_bytes(content)
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case str() if content.startswith("link to"):
                path.symlink_to(TARGETS.get(content, path.name))


def compare_runs(given: tuple[dict[str, Any], dict[str, Any], list[str]]) -> None:
    first, second, rest = given
    put_run(first)
    shutil.move("logs", "first")
    put_run(second)
    shutil.move("first/run", "logs/an\x1b[2Jother [b]")
    shutil.rmtree("first")
    typed("compare", "logs", *rest)


def report_run(given: dict[str, Any]) -> None:
    put_run(given)
    typed("report", "logs/run", "--device", "cpu")


# What keeps a run small that goes on, and from downloading a data set.
BOUNDS = ("--dataset=shapes", "--data.image_size=16", "--data.num_classes=4", "--data.count=60", "--data.val_size=20")


def resume_run(given: dict[str, Any]) -> None:
    put_run({"metrics.json": None, **given})
    typed("fit", "--resume", "logs/run", "--epochs=2", "--trainer.limit_train_batches=1", "--devices=1", *BOUNDS)


def put_secret() -> None:
    Path("outside").mkdir()
    Path("outside/secret.png").write_bytes(PICTURES[0])


COMPARED = ("config.yaml", "metrics.json", "metrics.csv", "predictions.csv")
WRONG_KINDS = [
    {"config.yaml": b"data: {dataset: shapes, num_classes: {}}"},
    {"metrics.csv": b"step,a\\x\n1,2\n2,3\n"},
    {"metrics.json": b'{"parameters": []}'},
]
READERS = {
    "runs to compare": Reader(
        st.tuples(
            runs(*COMPARED),
            runs(*COMPARED),
            st.sampled_from([[], [], ["--csv", "-"], ["--json", "-"], ["--plot", "curves.png"]]),
        ),
        compare_runs,
        put_secret,
    ),
    "a run to report": Reader(runs(*COMPARED, "model.safetensors"), report_run, put_secret, WRONG_KINDS, seconds=20),
    "a run to resume": Reader(
        runs("config.yaml", "metrics.csv", *CHECKPOINTS),
        resume_run,
        put_secret,
        [{"metrics.csv": b"epoch,step\nepoch,step\n0,5\n"}, {"checkpoints/last.ckpt": "folder"}],
        seconds=20,
    ),
}
