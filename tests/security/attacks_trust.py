"""Runs, checkpoints and configurations that want classes imported, or files written, deleted or fetched where they say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from hashlib import sha256
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
CHOSEN = "which no file may choose: type that setting yourself, or give --trust"
WATCHED: dict[str, Any] = {
    "monitor": "val/loss"
}  # of a ModelCheckpoint: it keeps the best, and removes what was best before

Prepare = Callable[[Path], object]


# ---- a run that is gone on with


def unfinished(folder: Path, callback: dict[str, Any], state: dict[str, Any]) -> None:
    """Makes of the run one to go on with: with a ModelCheckpoint in its config.yaml, and this state of it in its checkpoint."""
    (folder / "run/metrics.json").unlink()
    config, path = folder / "run/config.yaml", folder / "run/checkpoints/last.ckpt"
    text = json.dumps([{"class_path": "ModelCheckpoint", "init_args": callback}])
    config.write_text(config.read_text().replace("callbacks: null", f"callbacks: {text}"))
    checkpoint = torch.load(path, weights_only=True)
    paths = dict.fromkeys(("best_model_path", "last_model_path", "kth_best_model_path"), "")
    empty = {**paths, "best_k_models": {}, "best_model_score": None}
    checkpoint["callbacks"][ModelCheckpoint(**callback).state_key] = {
        **empty,
        "dirpath": callback.get("dirpath"),
        **state,
    }
    torch.save(checkpoint, path)


def best(path: object) -> dict[str, Any]:
    """The state of a ModelCheckpoint whose best model so far is at `path`, and is bad."""
    score = torch.tensor(1e9)
    scores = {"best_model_score": score, "current_score": score, "kth_value": score}
    return {
        "best_model_path": str(path),
        "kth_best_model_path": str(path),
        "best_k_models": {str(path): score},
        **scores,
    }


def removal(
    target: str, inside: bool = False, state: Callable[[object], dict[str, Any]] = best, **callback: Any
) -> Prepare:
    """A checkpoint that names `target` for removal; the callback's folder is above it or, if `inside`, that of the run."""

    def prepare(folder: Path) -> None:
        path = folder / "run/checkpoints" / ".." / ".." / target if inside else folder / target
        own = {} if inside else {"dirpath": str(path.parent)}
        unfinished(folder, {**callback, **own}, {**state(path), "dirpath": str(folder / "run/checkpoints"), **own})

    return prepare


def whole_run() -> int:
    """Goes on with the run, which must be there afterwards."""
    code = main(RESUME)
    assert Path("run/config.yaml").exists(), "the run was removed"
    return code


def momentum(value: Callable[[torch.Tensor], Any]) -> Prepare:
    """A run with momentum, of whose optimizer's state a checkpoint holds this."""

    def prepare(folder: Path) -> None:
        unfinished(folder, {}, {})
        config, path = folder / "run/config.yaml", folder / "run/checkpoints/last.ckpt"
        text = config.read_text().replace("momentum: 0.0", "momentum: 0.9")
        config.write_text(text.replace("log_every_n_steps: null", "log_every_n_steps: 1"))
        checkpoint = torch.load(path, weights_only=True)
        weights = list(checkpoint["state_dict"].values())
        for optimizer in checkpoint["optimizer_states"]:
            numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
            for group in optimizer["param_groups"]:
                group["momentum"] = 0.9
            optimizer["state"] = {number: {"momentum_buffer": value(weights[0])} for number in numbers}
        torch.save(checkpoint, path)

    return prepare


def version(text: str) -> Prepare:
    """A run whose checkpoint names this version of Lightning."""

    def prepare(folder: Path) -> None:
        unfinished(folder, {}, {})
        path = folder / "run/checkpoints/last.ckpt"
        torch.save({**torch.load(path, weights_only=True), "pytorch-lightning_version": text}, path)

    return prepare


# ---- configurations


def config(text: str, **files: str) -> Prepare:
    """The configuration own.yaml, in a working folder beside the user's one; OUTSIDE in it is the path of that."""

    def prepare(folder: Path) -> None:
        (folder / "work").mkdir()
        for name, content in {"own_yaml": text, **files}.items():
            path = folder / "work" / name.replace("_yaml", ".yaml")
            path.write_text(content.replace("OUTSIDE", str(folder / "outside")))

    return prepare


def trainer(key: str, class_path: str, **init_args: Any) -> Prepare:
    """A configuration with a class of Lightning's."""
    value = json.dumps({"class_path": class_path, "init_args": init_args})
    return config(f"trainer: {{{key}: {f'[{value}]' if key == 'callbacks' else value}}}")


def metric(name: str, **init_args: Any) -> Prepare:
    """A configuration with a metric of torchmetrics."""
    value = {"class_path": f"torchmetrics.classification.{name}", "init_args": init_args}
    return config(f"model: {{metrics: {json.dumps({'curve': value})}}}")


def and_also(prepare: Prepare, add: Callable[[Path], object]) -> Prepare:
    """What is prepared, and then something more."""
    return lambda folder: (prepare(folder), add(folder))


def with_pictures(prepare: Prepare) -> Prepare:
    """And a folder of images of two classes."""
    return and_also(prepare, lambda folder: draw_folder(folder / "images", {"a": 4, "b": 4}))


def with_link(prepare: Prepare, name: str) -> Prepare:
    """And a link of this name to the user's folder."""
    return and_also(prepare, lambda folder: (folder / "work" / name).symlink_to(folder / "outside"))


def in_work(line: Sequence[str]) -> Callable[[], int]:
    def typed() -> int:
        os.chdir("work")
        return main(list(line))

    return typed


def beside(*words: str) -> Callable[[], int]:
    """A training with own.yaml, typed in the folder where it lies."""
    return in_work(["fit", "--recipe", "../small.yaml", "--config", "own.yaml", *words])


def refused_place(prepare: Prepare, setting: str, *words: str) -> Attack:
    return Attack(prepare, beside(*words), says=f"a configuration file sets {setting} to ")


def half_there(dataset: str, decoy: str) -> Attack:
    """A configuration with a data set's folder elsewhere, in which one file has a name of that data set."""

    def prepare(folder: Path) -> None:
        place = folder / "elsewhere" / decoy
        place.parent.mkdir(parents=True)
        place.write_text("mine")
        config(f"data: {{dataset: {dataset}, root: {folder}/elsewhere}}")(folder)

    def typed() -> int:
        code = beside("--data.url", "none", *NO_SHAPES)()
        files = [path.relative_to("../elsewhere") for path in Path("../elsewhere").rglob("*") if path.is_file()]
        assert files == [Path(decoy)] and (Path("../elsewhere") / decoy).read_text() == "mine", files
        return code

    return Attack(prepare, typed, says=f"where {dataset} is not complete")


DOWNLOADING = """import pathlib
def load(settings, train):
    pathlib.Path(settings.root, 'download').touch()
    raise SystemExit(3)
"""


def own_source(folder: Path) -> None:
    """A source of the user's own that writes to its root, as torchvision's do with download=True."""
    (folder / "mine.py").write_text(DOWNLOADING)
    config("data: {root: OUTSIDE}")(folder)


def pointing(prepare: Prepare) -> Attack:
    return Attack(prepare, beside(), says="a configuration file refers to settings in 'part.yaml', which is not read")


def imported(*words: str, key: str = "callbacks") -> Attack:
    """A configuration that names a class of a module which leaves a trace; the line has its name for something else."""

    def prepare(folder: Path) -> None:
        (folder / "pics.py").write_text(BESIDE["evil.py"].replace("Evil", "Set"))
        (folder / "own.yaml").write_text(f"trainer: {{{key}: [{{class_path: pics.Set}}]}}\n")

    return Attack(prepare, [*FIT, "--config", "own.yaml", *words], says="names pics.Set, whose code would run")


def forged_mark(folder: Path) -> None:
    """A configuration with a class of its own, and a note in the cache beside it that it is the user's."""
    (folder / "evil.py").write_text(BESIDE["evil.py"])
    text = "trainer: {callbacks: [{class_path: evil.Evil}]}\n"
    (folder / "own.yaml").write_text(text)
    mark = folder / "cache/own-configurations" / sha256(text.encode()).hexdigest()
    mark.parent.mkdir(parents=True)
    mark.touch()


# ---- a run that is looked at


def data_of_run(**settings: Any) -> Prepare:
    """A run whose config.yaml names these data; OUTSIDE is the path of the user's folder."""

    def prepare(folder: Path) -> None:
        (folder / "work").mkdir()
        values = {"dataset": "cifar10", **settings}
        text = json.dumps({"data": values}).replace("OUTSIDE", str(folder / "outside"))
        (folder / "run/config.yaml").write_text(text)

    return prepare


def report(setting: str, **settings: Any) -> Attack:
    line = in_work(["report", "../run", "--device", "cpu"])
    return Attack(with_pictures(data_of_run(**settings)), line, says=f"a configuration file sets data.{setting} to ")


def names_checkpoint(says: str = "trainer.callbacks.filename", **init_args: Any) -> Attack:
    return refused_place(trainer("callbacks", "ModelCheckpoint", **init_args), says)


SHAPES_OFF = ("--data.url", "none", *NO_SHAPES)
PART = "class_path: ModelCheckpoint\ninit_args: {dirpath: OUTSIDE}\n"
LAST = lambda path: {"last_model_path": str(path)}  # noqa: E731

ATTACKS: dict[str, Attack] = {
    # what a checkpoint names for removal
    "a run to resume that names a folder of the user's as its earlier best checkpoint": Attack(
        removal("outside/Documents", **WATCHED), RESUME, says=CHOSEN
    ),
    "a checkpoint that leads out of the run to a folder of the user's": harmless(
        removal("outside/Documents", inside=True, **WATCHED), RESUME
    ),
    "the same, to a file, as its last checkpoint": harmless(
        removal("outside/notes.txt", True, LAST, save_last=True), RESUME
    ),
    "the same, of a callback that watches nothing": harmless(
        removal("outside/notes.txt", True, lambda path: {"best_model_path": str(path)}), RESUME
    ),
    "a checkpoint that names the run's own folder as its best": harmless(
        removal("run", inside=True, **WATCHED), whole_run
    ),
    "a momentum smaller than its weights, beyond whose end torch would write": Attack(
        momentum(lambda weight: torch.zeros(1)), RESUME, says="its optimizer has another momentum_buffer"
    ),
    "best scores that are text": Attack(
        removal("x", inside=True, **WATCHED, state=lambda path: {**best(path), "best_k_models": {str(path): "x"}}),
        RESUME,
        says="its best checkpoints have no scores",
    ),
    "a version of Lightning that moves the cursor": Attack(version("99.0\r\x85"), RESUME, says="is not a version"),
    # where a configuration has files written
    "a callback that keeps its checkpoints in the user's folder": names_checkpoint(
        "trainer.callbacks.dirpath", dirpath="../outside"
    ),
    "the same, in a file that it points to": pointing(config("trainer: {callbacks: part.yaml}", part_yaml=PART)),
    "the same, by dotted names": refused_place(
        config("trainer.callbacks.class_path: ModelCheckpoint\ntrainer.callbacks.init_args.dirpath: OUTSIDE"),
        "trainer.callbacks.dirpath",
    ),
    "the same, in a part of the configuration that is a file": Attack(
        config("model: {}", part_yaml="callbacks: [{class_path: ModelCheckpoint, init_args: {dirpath: OUTSIDE}}]"),
        beside("--trainer", "part.yaml"),
        says=CHOSEN,
    ),
    "a checkpoint's name that leads out of the run": names_checkpoint(filename="../../../../outside/x"),
    "a checkpoint's name of two lines, with a terminal's commands": names_checkpoint(
        filename="\n".join(["\x1b[2J" * 40] * 2)
    ),
    "a checkpoint's name that becomes a path when it is filled in": names_checkpoint(filename="{epoch:/>9}"),
    "a metric whose name leads out of the run, in a checkpoint's name": names_checkpoint(
        filename="{../../../../outside/x}"
    ),
    "a checkpoint's name of 400 million digits": names_checkpoint(filename="{epoch:0400000000d}"),
    "a checkpoint's name with 400 million digits behind the point": names_checkpoint(
        monitor="val/loss", filename="{val/loss:.400000000f}"
    ),
    "a checkpoint's name with the same metric 4000 times": names_checkpoint(filename="{0}" * 4000),
    "figures of 400 million digits beside the bar": refused_place(
        trainer("callbacks", "RichProgressBar", theme={"metrics_format": ".400000000f"}),
        "trainer.callbacks.theme.metrics_format",
    ),
    "a metric of 10⁹ thresholds": refused_place(
        metric("BinaryPrecisionRecallCurve", thresholds=10**9), "model.metrics.curve.thresholds"
    ),
    "a metric of 1,000 listed thresholds": Attack(
        metric("BinaryPrecisionRecallCurve", thresholds=[0.5] * 1000), beside(), says="has more than 200 elements"
    ),
    "a metric of 10⁵ classes": refused_place(
        metric("MulticlassConfusionMatrix", num_classes=10**5), "model.metrics.curve.num_classes"
    ),
    "a net of a million times the width": Attack(
        config("model: {width: 1000000}"), beside(), says="width multiplies the hidden widths: it must be above 0"
    ),
    "a table of curves in the user's folder": refused_place(
        trainer("logger", "CSVLogger", save_dir="../outside", name="", version=""), "trainer.logger.save_dir"
    ),
    "curves over those of another run, below a folder that is typed": refused_place(
        trainer("logger", "CSVLogger", save_dir="../outside", version=".."),
        "trainer.logger.version",
        "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=../outside",
    ),
    "a profile in the user's folder": refused_place(
        trainer("profiler", "SimpleProfiler", dirpath="../outside", filename="x"), "trainer.profiler.dirpath"
    ),
    "run folders in the user's folder": refused_place(config("logs: OUTSIDE"), "logs"),
    "run folders in the user's folder, by a link": refused_place(with_link(config("logs: results"), "results"), "logs"),
    "a recipe's name that leads out of the folder of runs": Attack(
        config(f"{SMALL}recipe: ../../outside/x"),
        in_work(["fit", "--config", "own.yaml"]),
        says="a configuration file sets recipe to ",
    ),
    "decoded images in the user's folder": refused_place(
        with_pictures(config("data: {dataset: folder, cache_dir: OUTSIDE}")),
        "data.cache_dir",
        "--data-dir",
        "../images",
        *NO_SHAPES,
    ),
    "archives that are fetched into the user's folder": refused_place(
        config("data: {dataset: cifar10, root: OUTSIDE}"), "data.root", *SHAPES_OFF
    ),
    "the same, by a link": refused_place(
        with_link(config("data: {dataset: fashion_mnist, root: here}"), "here"), "data.root", *SHAPES_OFF
    ),
    "a folder with a file that is called as CIFAR-10's archive": half_there("cifar10", "cifar-10-python.tar.gz"),
    "a folder with a file that is called as one of CIFAR-100's": half_there("cifar100", "cifar-100-python/meta"),
    "a folder with a file of Fashion-MNIST's": half_there(
        "fashion_mnist", "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz"
    ),
    "a root in the user's folder for a source of the user's own": refused_place(
        own_source, "data.root", "--dataset", "mine.load", *NO_SHAPES
    ),
    # what a configuration has fetched and read
    "an archive from an address of a stranger's": refused_place(
        config("data: {dataset: cifar10, root: ., url: 'http://127.0.0.1:9/x'}"), "data.url", *NO_SHAPES
    ),
    "an archive that is the user's key": refused_place(
        config("data: {dataset: cifar10, root: ., url: 'OUTSIDE/.ssh/config'}"), "data.url", *NO_SHAPES
    ),
    "a checkpoint of the user's to begin with": refused_place(config("ckpt_path: OUTSIDE/best.ckpt"), "ckpt_path"),
    # how much it starts and reads
    **{
        f"{setting} in a file of 10¹² values": pointing(config(f"{setting}: part.yaml", part_yaml=LAUGHS))
        for setting in ("trainer.callbacks", "trainer.logger", "model.metrics", "config")
    },
    "a further configuration that is a named pipe": pointing(
        and_also(config("config: part.yaml"), lambda folder: os.mkfifo(folder / "work/part.yaml"))
    ),
    "a hundred processes": refused_place(config("trainer: {devices: 100}"), "trainer.devices"),
    "a hundred processes that read images": refused_place(
        config("data: {placement: host, workers: 100}"), "data.workers", "--epochs", "2"
    ),
    # what is imported
    **{
        f"a class's name as {flag}": imported(flag, "pics.Set")
        for flag in ("--data-dir", "--data.cache_dir", "--data.url", "--trainer.default_root_dir")
    },
    "a folder of checkpoints whose name is a class's too": imported(
        "--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.dirpath=pics.Set", key="logger"
    ),
    "a note in the cache that a configuration is the user's own": Attack(
        forged_mark, [*FIT, "--config", "own.yaml"], says="names evil.Evil, whose code would run"
    ),
    # a run that is looked at
    "a run to report whose archives are fetched into the user's folder": report("root", root="OUTSIDE"),
    "a run to report whose archive is fetched from a stranger's address": report(
        "url", root=".", url="http://127.0.0.1:9/"
    ),
    "a run to report whose images are decoded into the user's folder": report(
        "cache_dir", dataset="folder", root="../images", cache_dir="OUTSIDE"
    ),
    "a run to export whose images are decoded into the user's folder": harmless(
        with_pictures(data_of_run(dataset="folder", root="../images", cache_dir="OUTSIDE")),
        in_work(["export", "../run", "--to", "safetensors", "--out", "x.safetensors"]),
        "generated images",
    ),
}
