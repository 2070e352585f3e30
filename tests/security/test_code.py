"""Code from files: the user's own files may name any class; a run, checkpoint or model of others only with --trust."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from contract.command_line import Answer, assert_refused, checkpoint_of, copy_run, run_command

from cifar_lit import ImageClassifier, ImageData, load
from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.trust import UntrustedName
from cifar_lit.inference.model_file import load_model_file, save_weights
from cifar_lit.training.checkpoint import read_checkpoint, read_weights

SMALL = ("--recipe", "small.yaml", "--epochs", "1")
OWN = """
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from torch import nn
Path("ran").touch()
class Net(nn.Sequential):
    def __init__(self, channels, image_size, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(channels * image_size[0] * image_size[1], num_classes))
class Watch(Callback):
    pass
"""
TRUSTED = "lightning.pytorch.callbacks.LearningRateMonitor"


class MakeFolder:
    """Creates the folder `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.fixture
def own(working_folder: Path, request: pytest.FixtureRequest) -> str:
    """Return the name of a module in the working folder. Modules stay imported, so each test has its own."""
    name = f"own_{abs(hash(request.node.name)) % 10**8}"
    (working_folder / f"{name}.py").write_text(OWN)
    return name


def forget(module: str) -> None:
    """Make the next import run the module's code again, as in a new process."""
    sys.modules.pop(module, None)
    Path("ran").unlink(missing_ok=True)


def assert_untrusted(answer: Answer, name: str) -> None:
    assert_refused(answer, 2, f"the settings of this run name {name}: add --trust")
    assert not Path("ran").exists()


def change_config(run: Path, **groups: dict[str, object]) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for group, values in groups.items():
        settings[group] |= values
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def test_a_typed_file_names_any_class_and_the_settings_of_its_run_only_with_trust(own: str) -> None:
    text = f"model: {{net: {own}.Net}}\ntrainer: {{callbacks: [{{class_path: {own}.Watch}}]}}\n"
    Path("mine.yaml").write_text(text)
    answer = run_command(*SMALL, "--config", "mine.yaml")
    assert answer.code == 0, answer.err
    run = Path("lightning_logs/small-1")
    assert f"cifar-lit classify {run} IMAGES --trust" in answer.out
    checkpoint = ("test", "--ckpt_path", run / "checkpoints/best.ckpt")
    export = ("export", run, "--to", "torch-export")
    for words in (checkpoint, export):
        forget(own)
        answer = run_command(*words)
        assert answer.code == 2 and "add --trust" in answer.err and not Path("ran").exists()
        assert run_command(*words, "--trust").code == 0
    assert run_command(*checkpoint, "--recipe", "small.yaml", "--config", "mine.yaml").code == 0, (
        "typed: the user's own"
    )
    forget(own)
    assert run_command("fit", "--config", run / "config.yaml").code == 0, "typed: the user's own"


@pytest.mark.parametrize("repeated", [True, False])
def test_a_run_with_own_parts_is_resumed_by_the_printed_command_and_by_its_own(own: str, repeated: bool) -> None:
    stop = "import os, signal\nWatch.on_train_epoch_end = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
    Path(f"{own}.py").write_text(OWN + stop)
    Path("mine.yaml").write_text(f"trainer: {{callbacks: [{{class_path: {own}.Watch}}]}}\n")
    first = ("train", "--recipe", "small.yaml", "--config", "mine.yaml")
    answer = run_command(*first)
    command = answer.err.splitlines()[-1].split()
    assert (answer.code, command) == (130, ["cifar-lit", "train", "--resume", "lightning_logs/small-1", "--trust"])
    forget(own)
    assert_untrusted(run_command(*command[1:-1]), f"{own}.Watch")
    Path(f"{own}.py").write_text(OWN)
    answer = run_command(*first, "--resume") if repeated else run_command(*command[1:])
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("group", "settings", "name"),
    [
        ("trainer", {"callbacks": [{"class_path": "MODULE.Watch"}]}, "MODULE.Watch"),
        ("trainer", {"callbacks": "MODULE.Watch"}, "MODULE.Watch"),
        ("trainer", {"callbacks": "[{class_path: MODULE.Watch}]"}, "MODULE.Watch"),
        ("trainer", {"profiler": {"class_path": "os.system", "init_args": {"command": "touch ran"}}}, "os.system"),
        ("trainer", {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": "os.abort"}}]}, "os"),
        ("trainer", {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "/x"}}]}, "/x"),
        (
            "trainer",
            {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"filename": "../../x"}}]},
            "../../x",
        ),
        ("model", {"net": "MODULE.Net"}, "MODULE.Net"),
        ("model", {"net": "os.system"}, "os.system"),
        ("model", {"net": "torch.hub.load", "net_options": {"repo_or_dir": "a/b", "model": "c"}}, "torch.hub.load"),
        ("model", {"net": "lightning.pytorch.cli.LightningCLI"}, "lightning.pytorch.cli.LightningCLI"),
        ("model", {"optimizer": "MODULE.Net"}, "MODULE.Net"),
        ("model", {"schedule": "MODULE.Net"}, "MODULE.Net"),
        ("model", {"loss": "MODULE.Net"}, "MODULE.Net"),
        ("data", {"dataset": "MODULE.Net"}, "MODULE.Net"),
    ],
)
def test_a_foreign_run_is_refused_in_one_line_without_running_code(
    run_dir: Path, own: str, group: str, settings: dict[str, object], name: str
) -> None:
    run = copy_run(run_dir)
    change_config(run, **{group: json.loads(json.dumps(settings).replace("MODULE", own))})
    (run / "metrics.json").unlink()
    for words in (["--resume", run], ["test", "--ckpt_path", run / "checkpoints/best.ckpt"]):
        answer = run_command(*words)
        assert_refused(answer, 2, f"the settings of this run name {name.replace('MODULE', own)}", "add --trust")
        assert not Path("ran").exists()


def test_a_foreign_run_may_name_classes_of_the_libraries(run_dir: Path, working_folder: Path) -> None:
    run = copy_run(run_dir)
    change_config(run, trainer={"callbacks": [{"class_path": TRUSTED}]}, model={"optimizer": "torch.optim.Adam"})
    assert run_command("test", "--ckpt_path", run / "checkpoints/best.ckpt").code == 0


@pytest.mark.parametrize("further", [(), ("--logs", "MODULE.x/y"), ("--data-dir", "MODULE.*")])
def test_the_name_of_a_folder_allows_no_package(run_dir: Path, own: str, further: tuple[str, ...]) -> None:
    run = Path(shutil.copytree(run_dir, f"{own}.run"))
    change_config(run, model={"net": f"{own}.Net"}, data={"dataset": f"{own}.Net"})
    words = [word.replace("MODULE", own) for word in further]
    assert_untrusted(run_command("test", "--ckpt_path", run / "checkpoints/best.ckpt", *words), f"{own}.Net")
    assert_untrusted(run_command("report", run, "--accelerator", "cpu"), f"{own}.Net")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir ['ran']", "!!python/name:os.system ''"])
def test_yaml_makes_no_objects(working_folder: Path, tag: str) -> None:
    Path("mine.yaml").write_text(f"trainer: {{max_epochs: {tag}}}\n")
    answer = run_command(*SMALL, "--config", "mine.yaml")
    assert_refused(answer, 2, "mine.yaml is not valid YAML at line 1, column 23")
    assert not Path("ran").exists()


@pytest.mark.parametrize("read", [read_checkpoint, read_weights])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_not_executed(
    working_folder: Path, read: Callable[[Path], object], zipped: bool
) -> None:
    path = Path("best.ckpt")
    torch.save({"state_dict": {"a": torch.zeros(1)}, "x": MakeFolder()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(Failure, match="it would execute code"):
        read(path)
    path.write_bytes(pickle.dumps(MakeFolder()))
    with pytest.raises(Failure):
        read(path)
    assert not Path("ran").exists()


def test_hyper_parameters_of_a_checkpoint_are_imported_only_if_the_program_passes_them(
    run_dir: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    contents = checkpoint_of(run_dir / "checkpoints/best.ckpt")
    for name in ("hyper_parameters", "hparams", "datamodule_hyper_parameters"):
        foreign = {
            "net": f"{own}.Net",
            "dataset": f"{own}.Net",
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
        }
        torch.save({**contents, name: foreign}, "foreign.ckpt")
        for kind in (ImageClassifier, ImageData):
            with pytest.raises(UntrustedName, match=f"{own}.Net"):
                kind.load_from_checkpoint("foreign.ckpt")
    assert not Path("ran").exists()


def test_lightning_builds_no_objects_from_hyper_parameters(
    run_dir: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    contents = checkpoint_of(run_dir / "checkpoints/best.ckpt")
    contents["hyper_parameters"] |= {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "net_options": {"a": {"class_path": f"{own}.Watch"}},
    }
    torch.save(contents, "foreign.ckpt")
    with pytest.raises(UsageError, match="lenet has no 'a'"):
        ImageClassifier.load_from_checkpoint("foreign.ckpt")
    assert not Path("ran").exists()


def test_a_model_file_names_a_net_only_with_trust(run_dir: Path, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    loaded = load_model_file(run_dir)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))
    save_weights(Path("model.safetensors"), net.state_dict(), replace(loaded.card, net=f"{own}.Net"))
    with pytest.raises(UntrustedName, match=f"{own}.Net"):
        load("model.safetensors")
    assert not Path("ran").exists()
    assert load("model.safetensors", trust=True).classes == loaded.classes
    with pytest.raises(UntrustedName):
        load("model.safetensors")
