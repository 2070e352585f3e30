"""Attacks that choose classes to import, or paths to write, delete or download to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from contract.command_line import draw_folder
from lightning.pytorch.callbacks import ModelCheckpoint
from security.attack import Attack, harmless
from security.hostile_files import BESIDE, LAUGHS
from security.sandbox import SMALL
from security.test_hostile import FIT

from cifar_lit.cli import main

RESUME = ["--resume", "run", "--epochs", "2"]
NO_SHAPES = ["--data.image_size=null", "--data.num_classes=null"]
NO_DOWNLOAD = ["--data.url", "none", *NO_SHAPES]
REFUSED = "which no file may choose: type that setting yourself, or give --trust"
CLEAR = "\x1b[2J" * 40
FASHION_FILE = "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz"
OWN_IMAGES = {"dataset": "folder", "root": "../images", "cache_dir": "OUTSIDE"}
PART = "class_path: ModelCheckpoint\ninit_args: {dirpath: OUTSIDE}\n"

Prepare = Callable[[Path], object]


# ---- a run to resume


def unfinished(folder: Path, callback: dict[str, Any], state: dict[str, Any]) -> None:
    """Make the run resumable, with a ModelCheckpoint in its config.yaml and that callback's state in its checkpoint."""
    (folder / "run/metrics.json").unlink()
    config, path = folder / "run/config.yaml", folder / "run/checkpoints/last.ckpt"
    defaults = {name: each.default for name, each in signature(ModelCheckpoint).parameters.items()}
    path_of_class = f"{ModelCheckpoint.__module__.rpartition('.')[0]}.ModelCheckpoint"
    text = json.dumps([{"class_path": path_of_class, "init_args": {**defaults, **callback}}])
    config.write_text(config.read_text().replace("callbacks: null", f"callbacks: {text}"))
    checkpoint = torch.load(path, weights_only=True)
    empty = dict.fromkeys(("best_model_path", "last_model_path", "kth_best_model_path"), "")
    empty |= {"best_k_models": {}, "best_model_score": None, "dirpath": callback.get("dirpath")}
    checkpoint["callbacks"][ModelCheckpoint(**callback).state_key] = {**empty, **state}
    torch.save(checkpoint, path)


def best(path: object) -> dict[str, Any]:
    """Return the state of a ModelCheckpoint whose best model is at `path` and has a bad score."""
    score = torch.tensor(1e9)
    scores = {"best_model_score": score, "current_score": score, "kth_value": score}
    paths = {"best_model_path": str(path), "kth_best_model_path": str(path)}
    return {**paths, "best_k_models": {str(path): score}, **scores}


def deletion(
    target: str, inside: bool = False, state: Callable[[object], dict[str, Any]] = best, **callback: Any
) -> Prepare:
    """A checkpoint that names `target` for deletion: by a path inside the run, or in the callback's own `dirpath`."""

    def prepare(folder: Path) -> None:
        path = folder / "run/checkpoints" / ".." / ".." / target if inside else folder / target
        own = {} if inside else {"dirpath": str(path.parent)}
        settings = {"monitor": "val/loss", **callback, **own}
        unfinished(folder, settings, {**state(path), "dirpath": str(folder / "run/checkpoints"), **own})

    return prepare


def resumed(prepare: Prepare) -> Attack:
    return harmless(prepare, RESUME)


def resume_whole_run() -> int:
    """Resume the run and assert that it still exists."""
    code = main(RESUME)
    assert Path("run/config.yaml").exists(), "the run was deleted"
    return code


def momentum(value: Callable[[torch.Tensor], Any]) -> Prepare:
    """A run with these momentum buffers in its checkpoint."""

    def prepare(folder: Path) -> None:
        unfinished(folder, {}, {})
        config, path = folder / "run/config.yaml", folder / "run/checkpoints/last.ckpt"
        text = config.read_text().replace("optimizer_options: null", "optimizer_options: {momentum: 0.9}")
        config.write_text(text.replace("log_every_n_steps: null", "log_every_n_steps: 1"))
        checkpoint = torch.load(path, weights_only=True)
        settings = json.loads(checkpoint["cifar_lit"]["settings"]) | {"model.optimizer_options": {"momentum": 0.9}}
        checkpoint["cifar_lit"]["settings"] = json.dumps(settings)
        weights = list(checkpoint["state_dict"].values())
        for optimizer in checkpoint["optimizer_states"]:
            numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
            for group in optimizer["param_groups"]:
                group["momentum"] = 0.9
            optimizer["state"] = {number: {"momentum_buffer": value(weights[0])} for number in numbers}
        torch.save(checkpoint, path)

    return prepare


def version(text: str) -> Prepare:
    """A run whose checkpoint contains this version of Lightning."""

    def prepare(folder: Path) -> None:
        unfinished(folder, {}, {})
        path = folder / "run/checkpoints/last.ckpt"
        torch.save({**torch.load(path, weights_only=True), "pytorch-lightning_version": text}, path)

    return prepare


# ---- configurations


def config(text: str, **files: str) -> Prepare:
    """A configuration own.yaml in the folder `work`; OUTSIDE in it stands for the path of the user's folder."""

    def prepare(folder: Path) -> None:
        (folder / "work").mkdir()
        for name, content in {"own_yaml": text, **files}.items():
            path = folder / "work" / name.replace("_yaml", ".yaml")
            path.write_text(content.replace("OUTSIDE", str(folder / "outside")))

    return prepare


def with_pictures(prepare: Prepare) -> Prepare:
    """The preparation and a folder of images of two classes."""
    return lambda folder: (prepare(folder), draw_folder(folder / "images", {"a": 4, "b": 4}))


def with_link(text: str, name: str) -> Prepare:
    """A configuration and a link of this name to the user's folder."""
    return lambda folder: (config(text)(folder), (folder / "work" / name).symlink_to(folder / "outside"))


def in_work(line: Sequence[str]) -> Callable[[], int]:
    def run() -> int:
        os.chdir("work")
        return main(list(line))

    return run


def fit_own(*words: str) -> Callable[[], int]:
    """A training with own.yaml, started in its folder."""
    return in_work(["fit", "--recipe", "../small.yaml", "--config", "own.yaml", *words])


def refused_setting(setting: str, own: str | Prepare, *words: str) -> Attack:
    """A setting that configuration files may not choose; `own` is the text of own.yaml or writes it."""
    prepare = config(own) if isinstance(own, str) else own
    return Attack(prepare, fit_own(*words), says=f"a configuration file sets {setting} to ")


def trainer_class(key: str, class_path: str, setting: str, *words: str, **init_args: Any) -> Attack:
    """A refused setting of a class of Lightning."""
    value = json.dumps({"class_path": class_path, "init_args": init_args})
    text = f"trainer: {{{key}: {f'[{value}]' if key == 'callbacks' else value}}}"
    return refused_setting(f"trainer.{key}.{setting}", text, *words)


def checkpoint(setting: str = "filename", **init_args: Any) -> Attack:
    return trainer_class("callbacks", "ModelCheckpoint", setting, **init_args)


def metric_config(setting: str, name: str, value: Any) -> Prepare:
    """A configuration with a metric of torchmetrics."""
    curve = {"class_path": f"torchmetrics.classification.{name}", "init_args": {setting: value}}
    return config(f"model: {{metrics: {json.dumps({'curve': curve})}}}")


def metric(setting: str, name: str, value: Any) -> Attack:
    return refused_setting(f"model.metrics.curve.{setting}", metric_config(setting, name, value))


def referring(setting: str, part: str | None) -> Attack:
    """A configuration that sets `setting` to the file part.yaml, a named pipe if `part` is None."""

    def prepare(folder: Path) -> None:
        config(f"{setting}: part.yaml", part_yaml=part or "")(folder)
        if part is None:
            (folder / "work/part.yaml").unlink()
            os.mkfifo(folder / "work/part.yaml")

    return Attack(prepare, fit_own(), says="a configuration file refers to settings in 'part.yaml', which is not read")


def incomplete(dataset: str, decoy: str) -> Attack:
    """A configuration with a data folder elsewhere that contains only one file with a name of that data set."""

    def prepare(folder: Path) -> None:
        path = folder / "elsewhere" / decoy
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        config(f"data: {{dataset: {dataset}, root: {folder}/elsewhere}}")(folder)

    def run() -> int:
        code = fit_own(*NO_DOWNLOAD)()
        files = [path.relative_to("../elsewhere") for path in Path("../elsewhere").rglob("*") if path.is_file()]
        assert files == [Path(decoy)] and (Path("../elsewhere") / decoy).read_text() == "mine", files
        return code

    return Attack(prepare, run, says=f"where {dataset} is not complete")


DOWNLOADING = """import pathlib
def load(settings, train):
    pathlib.Path(settings.root, 'download').touch()
    raise SystemExit(3)
"""


def own_source(folder: Path) -> None:
    """A custom source that writes to its root, like a torchvision data set with download=True."""
    (folder / "mine.py").write_text(DOWNLOADING)
    config("data: {root: OUTSIDE}")(folder)


def imported(*words: str, key: str = "callbacks") -> Attack:
    """A configuration that names a class of a harmful module; the command line uses its name for another setting."""

    def prepare(folder: Path) -> None:
        (folder / "pics.py").write_text(BESIDE["evil.py"].replace("Evil", "Set"))
        (folder / "own.yaml").write_text(f"trainer: {{{key}: [{{class_path: pics.Set}}]}}\n")

    return Attack(prepare, [*FIT, "--config", "own.yaml", *words], says="names pics.Set, whose code would run")


def forged_mark(folder: Path) -> None:
    """A configuration with a custom class, and a forged cache entry that marks it as the user's own."""
    (folder / "evil.py").write_text(BESIDE["evil.py"])
    text = "trainer: {callbacks: [{class_path: evil.Evil}]}\n"
    (folder / "own.yaml").write_text(text)
    mark = folder / "cache/own-configurations" / sha256(text.encode()).hexdigest()
    mark.parent.mkdir(parents=True)
    mark.touch()


# ---- a run to report or export


def data_of_run(**settings: Any) -> Prepare:
    """A run with these data settings; OUTSIDE stands for the path of the user's folder."""

    def prepare(folder: Path) -> None:
        (folder / "work").mkdir()
        values = {"dataset": "cifar10", **settings}
        text = json.dumps({"data": values}).replace("OUTSIDE", str(folder / "outside"))
        (folder / "run/config.yaml").write_text(text)

    return prepare


def report(setting: str, **settings: Any) -> Attack:
    line = in_work(["report", "../run", "--accelerator", "cpu"])
    return Attack(with_pictures(data_of_run(**settings)), line, says=f"a configuration file sets data.{setting} to ")


ATTACKS: dict[str, Attack] = {
    # checkpoints that name paths to delete
    "a run that names a folder of the user as its best checkpoint": Attack(
        deletion("outside/Documents"), RESUME, says=REFUSED
    ),
    "a checkpoint that names a folder of the user by a relative path": resumed(deletion("outside/Documents", True)),
    "the same for a file as last checkpoint": resumed(
        deletion("outside/notes.txt", True, lambda path: {"last_model_path": str(path)}, monitor=None, save_last=True)
    ),
    "the same for a callback that monitors nothing": resumed(
        deletion("outside/notes.txt", True, lambda path: {"best_model_path": str(path)}, monitor=None)
    ),
    "a checkpoint that names its run folder as the best checkpoint": harmless(deletion("run", True), resume_whole_run),
    "a momentum buffer smaller than its weights, past whose end torch would write": Attack(
        momentum(lambda weight: torch.zeros(1)), RESUME, says="its optimizer has another momentum_buffer"
    ),
    "best scores that are text": Attack(
        deletion("x", True, lambda path: {**best(path), "best_k_models": {str(path): "x"}}),
        RESUME,
        says="its best checkpoints have no scores",
    ),
    "a version of Lightning that moves the cursor": Attack(
        version("99.0\r\x85"), RESUME, says="its version of Lightning is invalid"
    ),
    # configurations that choose output paths
    "a callback that writes checkpoints to the user's folder": checkpoint("dirpath", dirpath="../outside"),
    "the same in a referenced file": referring("trainer.callbacks", PART),
    "the same by dotted names": refused_setting(
        "trainer.callbacks.dirpath",
        "trainer.callbacks.class_path: ModelCheckpoint\ntrainer.callbacks.init_args.dirpath: OUTSIDE",
    ),
    "the same in a file for one group of settings": Attack(
        config("model: {}", part_yaml="callbacks: [{class_path: ModelCheckpoint, init_args: {dirpath: OUTSIDE}}]"),
        fit_own("--trainer", "part.yaml"),
        says=REFUSED,
    ),
    "a checkpoint's name that leads out of the run": checkpoint(filename="../../../../outside/x"),
    "a checkpoint's name of two lines with terminal controls": checkpoint(filename=CLEAR + "\n" + CLEAR),
    "a checkpoint's name that becomes a path when formatted": checkpoint(filename="a{epoch:/>9}"),
    "a checkpoint's name with a metric that leads out of the run": checkpoint(filename="{../../../../outside/x}"),
    "a checkpoint's name of 400 million digits": checkpoint(filename="{epoch:0400000000d}"),
    "a checkpoint's name with 400 million decimals": checkpoint(filename="{val/loss:.400000000f}", monitor="val/loss"),
    "a checkpoint's name with the same metric 1,300 times": checkpoint(filename="{0}" * 1300),
    "metrics of 400 million decimals in the progress bar": trainer_class(
        "callbacks", "RichProgressBar", "theme.metrics_format", theme={"metrics_format": ".400000000f"}
    ),
    "a metric of 10⁹ thresholds": metric("thresholds", "BinaryPrecisionRecallCurve", 10**9),
    "a metric of 1,000 listed thresholds": Attack(
        metric_config("thresholds", "BinaryPrecisionRecallCurve", [0.5] * 1000),
        fit_own(),
        says="has more than 200 elements",
    ),
    "a metric of 10⁵ classes": metric("num_classes", "MulticlassConfusionMatrix", 10**5),
    "a net of a million times the width": Attack(
        config("model: {width: 1000000}"), fit_own(), says="must be above 0 and at most 1000"
    ),
    "curves in the user's folder": trainer_class(
        "logger", "CSVLogger", "save_dir", save_dir="../outside", name="", version=""
    ),
    "curves that overwrite those of another run": trainer_class(
        *("logger", "CSVLogger", "version", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=../outside"),
        save_dir="../outside",
        version="..",
    ),
    "a profile in the user's folder": trainer_class(
        "profiler", "SimpleProfiler", "dirpath", dirpath="../outside", filename="x"
    ),
    "run folders in the user's folder": refused_setting("logs", "logs: OUTSIDE"),
    "run folders in the user's folder by a link": refused_setting("logs", with_link("logs: results", "results")),
    "a recipe's name that leads out of the folder of runs": Attack(
        config(f"{SMALL}recipe: ../../outside/x"),
        in_work(["fit", "--config", "own.yaml"]),
        says="a configuration file sets recipe to ",
    ),
    "decoded images in the user's folder": refused_setting(
        "data.cache_dir",
        with_pictures(config("data: {dataset: folder, cache_dir: OUTSIDE}")),
        *["--data-dir", "../images", *NO_SHAPES],
    ),
    "archives downloaded into the user's folder": refused_setting(
        "data.root", "data: {dataset: cifar10, root: OUTSIDE}", *NO_DOWNLOAD
    ),
    "the same by a link": refused_setting(
        "data.root", with_link("data: {dataset: fashion_mnist, root: here}", "here"), *NO_DOWNLOAD
    ),
    "a folder with a file named like CIFAR-10's archive": incomplete("cifar10", "cifar-10-python.tar.gz"),
    "a folder with a file named like one of CIFAR-100": incomplete("cifar100", "cifar-100-python/meta"),
    "a folder with a file named like one of Fashion-MNIST": incomplete("fashion_mnist", FASHION_FILE),
    "a root in the user's folder for a custom source": refused_setting(
        "data.root", own_source, "--dataset", "mine.load", *NO_SHAPES
    ),
    # configurations that choose inputs
    "an archive from an attacker's address": refused_setting(
        "data.url", "data: {dataset: cifar10, root: ., url: 'http://127.0.0.1:9/x'}", *NO_SHAPES
    ),
    "an archive that is the user's key": refused_setting(
        "data.url", "data: {dataset: cifar10, root: ., url: 'OUTSIDE/.ssh/config'}", *NO_SHAPES
    ),
    "a checkpoint of the user to start from": refused_setting("ckpt_path", "ckpt_path: OUTSIDE/best.ckpt"),
    # resource use
    **{
        f"{setting} in a file of 10¹² values": referring(setting, LAUGHS)
        for setting in ("trainer.callbacks", "trainer.logger", "model.metrics", "config")
    },
    "a second configuration that is a named pipe": referring("config", None),
    "a hundred processes": refused_setting("trainer.devices", "trainer: {devices: 100}"),
    "a hundred worker processes": refused_setting(
        "data.workers", "data: {placement: host, workers: 100}", "--epochs", "2"
    ),
    # imports
    **{
        f"a class name as {flag}": imported(flag, "pics.Set")
        for flag in ("--data-dir", "--data.cache_dir", "--data.url", "--trainer.default_root_dir")
    },
    "a checkpoint folder with the name of a class": imported(
        "--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.dirpath=pics.Set", key="logger"
    ),
    "a forged cache entry that a configuration is the user's own": Attack(
        forged_mark, [*FIT, "--config", "own.yaml"], says="names evil.Evil, whose code would run"
    ),
    # runs to report or export
    "a run to report whose archives are downloaded into the user's folder": report("root", root="OUTSIDE"),
    "a run to report whose archive comes from an attacker's address": report(
        "url", root=".", url="http://127.0.0.1:9/"
    ),
    "a run to report whose images are decoded into the user's folder": report("cache_dir", **OWN_IMAGES),
    "a run to export whose images are decoded into the user's folder": harmless(
        with_pictures(data_of_run(**OWN_IMAGES)),
        in_work(["export", "../run", "--to", "safetensors", "--out", "x.safetensors"]),
        "generated images",
    ),
}
