"""Fuzzed commands that compare, report, check and resume runs."""

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
from security.fuzzing import Reader, run_line
from security.mutations import changed, csv_files, damaged, json_files, plain, yaml_files, zip_files

GENUINE: dict[str, bytes] = {}  # contents of a run folder by path; filled before the first test

CHECKPOINTS = ("checkpoints/last.ckpt", "checkpoints/best.ckpt")
TARGETS = {"link to a file": "outside/secret.png", "link to a folder": "outside", "link to /dev/zero": "/dev/zero"}
REPLACEMENTS = (*TARGETS, "link to itself", "pipe", "folder", "nothing")


def changed_file(name: str) -> st.SearchStrategy[Any]:
    """Changed contents for a file of a run."""
    content = GENUINE[name]
    match Path(name).suffix:
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


def runs(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """One or two files of a run, changed or replaced by something else."""
    replacements = st.sampled_from(REPLACEMENTS)
    contents = {name: st.deferred(lambda name=name: changed_file(name)) | replacements for name in names}
    one = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), contents[name]))
    return st.lists(one, min_size=1, max_size=2).map(dict)


def put_run(files: dict[str, Any]) -> None:
    """Write a copy of the genuine run with these files to logs/run."""
    shutil.rmtree("logs", ignore_errors=True)
    for name, genuine_content in GENUINE.items():
        path = Path("logs/run", name)
        content = files.get(name, genuine_content)
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


def compare_runs(inputs: tuple[dict[str, Any], dict[str, Any], list[str]]) -> None:
    first, second, flags = inputs
    put_run(first)
    shutil.move("logs", "first")
    put_run(second)
    shutil.move("first/run", "logs/an\x1b[2Jother [b]")
    shutil.rmtree("first")
    run_line("compare", "logs", *flags)


def report_run(files: dict[str, Any]) -> None:
    put_run(files)
    run_line("report", "logs/run", "--accelerator", "cpu")


# Settings that keep a resumed run small and offline.
BOUNDS = ("--dataset=shapes", "--data.image_size=16", "--data.num_classes=4", "--data.count=60", "--data.val_size=20")


def resume_run(files: dict[str, Any]) -> None:
    put_run({"metrics.json": None, **files})
    run_line("fit", "--resume", "logs/run", "--epochs=2", "--trainer.limit_train_batches=1", "--devices=1", *BOUNDS)


def put_secret() -> None:
    Path("outside").mkdir()
    Path("outside/secret.png").write_bytes(PICTURES[0])


OUTPUTS = ([], [], ["--csv", "-"], ["--json", "-"], ["--plot", "curves.png"])
COMPARED = ("config.yaml", "metrics.json", "metrics.csv", "predictions.csv")
WRONG_KINDS = [
    {"config.yaml": b"data: {dataset: shapes, num_classes: {}}"},
    {"metrics.csv": b"step,a\\x\n1,2\n2,3\n"},
    {"metrics.json": b'{"parameters": []}'},
]
READERS = {
    "runs to compare": Reader(
        st.tuples(runs(*COMPARED), runs(*COMPARED), st.sampled_from(OUTPUTS)), compare_runs, put_secret
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
