"""fit, train, validate, test and predict: LightningCLI builds data, model and Trainer from the settings."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy

from cifar_lit.base import hardware
from cifar_lit.base.command_line import PARSER_SETTINGS, SYNONYMS, long_flags, parsed
from cifar_lit.base.config_file import plain_values
from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.settings import changed_settings
from cifar_lit.base.text import counted, note, say
from cifar_lit.base.threads import choose_threads
from cifar_lit.base.trust import check_found, limit_parser, untrusted_parts
from cifar_lit.cli.flags import DEFAULT_RECIPES, LOGS, OWN, SHORT, Command, arguments, machine_kind, recipe_path
from cifar_lit.cli.launch import by_slurm, is_first_process, logs_of
from cifar_lit.cli.ranks import ChildRanks
from cifar_lit.cli.run_report import StartCard, print_dev_run, print_results
from cifar_lit.data.datamodule import ImageData
from cifar_lit.features import FEATURES, feature_class, feature_settings
from cifar_lit.models.registry import check_net
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.resume import check_unfinished, find_resumable, run_of
from cifar_lit.run.run import Run
from cifar_lit.train import Results, evaluate, fit, predict
from cifar_lit.training.callbacks import NoProfiler, SlowdownWarning
from cifar_lit.training.checkpoint import (
    AtomicCheckpointIO,
    latest_valid_checkpoint,
    load_weights,
    read_checkpoint,
    regular_checkpoint,
)
from cifar_lit.training.classifier import ImageClassifier, check_model
from cifar_lit.training.orderly_stop import Interrupted

RESUMED_CHECKPOINT = "CIFAR_LIT_RESUME"  # environment variable: the checkpoint that the first process has selected

TRAINER_DEFAULTS: dict[str, object] = {
    "max_epochs": 10,
    "num_sanity_val_steps": 0,  # a fit validates after its first epoch anyway
    "enable_model_summary": False,  # replaced by the start card
    "enable_progress_bar": False,  # a line is printed after each epoch
    "use_distributed_sampler": False,  # it would repeat images; our loaders split batches exactly
    "precision": None,
}


OWN_SETTINGS: tuple[tuple[str, Any, object, str], ...] = (
    ("recipe", str | None, None, "name of the recipe, used to name the run folder"),
    ("logs", str, LOGS, "folder for run folders"),
    ("checkpoint_every", int | str | None, None, "also write checkpoints every 500 (steps) or 10m within epochs"),
    ("logger", str, "tensorboard", "where to log besides metrics.csv: tensorboard, csv (nothing else), wandb, mlflow"),
    ("threads", PositiveInt | None, None, "CPU threads of each process; by default those that are free at the start"),
    ("rank_timeout", PositiveFloat, 600.0, "end the run if a process keeps the others waiting for so many seconds"),
)


class TrainingCLI(LightningCLI):
    """LightningCLI with one subcommand, our flags and a run folder. Creating an instance runs the command."""

    model: ImageClassifier
    datamodule: ImageData

    def __init__(self, command: Command) -> None:
        self.command = command
        self.name = command.name.replace("train", "fit")
        self.first = is_first_process(os.environ)
        self.checkpoint = self._resumed_checkpoint()
        base = self._base_settings()
        self.found = base if command.recipe is None else None  # settings of a run, perhaps of somebody else's
        if self.found:
            limit_parser()
        self.folder: RunFolder | None = None
        try:
            super().__init__(
                ImageClassifier,
                ImageData,
                save_config_callback=None,
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=0,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                parser_kwargs={**PARSER_SETTINGS, "prog": "cifar-lit", self.name: dict(PARSER_SETTINGS)},
                args=arguments(command, base, self.name),
            )
        except BaseException as error:
            if self.folder:
                self.folder.release()
            if isinstance(error.__cause__, UsageError | Failure):  # raised while the parser linked model and data
                raise error.__cause__ from None
            raise

    # ---- where settings come from

    def _resumed_checkpoint(self) -> Path | None:
        """Return the checkpoint to resume, the same in every process of the run. It is not read yet."""
        command = self.command
        if command.resume is None:
            return None
        if self.name != "fit":
            raise UsageError(f"--resume is for trainings; `{self.name}` takes --ckpt_path PATH")
        if not self.first and RESUMED_CHECKPOINT in os.environ:
            checkpoint = Path(os.environ[RESUMED_CHECKPOINT])
        else:
            needs_test = command.name == "train"
            checkpoint = find_resumable(logs_of(command), command.resume, needs_test, self.first)
        run = run_of(checkpoint)
        if run is None:
            raise UsageError(f"{checkpoint} is not in a run folder: give --resume a run, or a checkpoint of one")
        if command.recipe:  # a command repeated from the shell history may name the run's recipe
            command.flags.append(f"--recipe={recipe_path(command.recipe).stem}")
            command.recipe = None
        return checkpoint

    def _base_settings(self) -> Path | None:
        """Return the file of the settings with the lowest precedence: of the run to resume or score, or of a recipe."""
        command = self.command
        if self.checkpoint:
            return self.checkpoint.resolve().parent.parent / "config.yaml"
        if command.recipe:
            return recipe_path(command.recipe)
        if command.configs:
            return None
        scored = command.value("ckpt_path")
        if scored and (run := run_of(Path(scored).expanduser())):
            return run / "config.yaml"
        if command.asks_only:
            return None
        command.recipe = DEFAULT_RECIPES[machine_kind(command.value("trainer.accelerator"))]
        return recipe_path(command.recipe)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return only the subcommand that runs: building a parser is slow."""
        return {self.name: super().subcommands()[self.name]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our own settings, and link the model's shape to the data."""
        for name in FEATURES:
            feature = feature_class(name)
            settings = ", ".join(f"--{setting}" for setting in feature_settings(name))
            text = f"{feature.__doc__.partition(chr(10))[0]} Settings: {settings or 'none'}."
            parser.add_argument(f"--{name}", type=feature | None, default=None, help=text)
        for name, kind, default, text in OWN_SETTINGS:
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        once_loaded = {"apply_on": "instantiate"}
        parser.link_arguments("data", "model.input_shape", lambda data: self._input_shape(data), **once_loaded)
        parser.link_arguments("data", "model.num_classes", lambda data: data.class_count, **once_loaded)

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:  # type: ignore[override]
        """Parse our command line, without argparse's usage text on errors."""
        flags = {*long_flags(self._subcommand_parsers[self.name]), *SHORT, *OWN, *SYNONYMS.values()}
        for name in FEATURES:
            flags.update(feature_settings(name))
        self.config = parsed(parser, args, flags, SHORT)
        if self.found:
            check_found(self.settings.as_dict(), self.found.parent.parent, self.command.flags)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: settings of a checkpoint must not override flags."""

    @property
    def settings(self) -> Namespace:
        """Return the settings of the subcommand."""
        return self.config[self.name]

    # ---- building

    def before_instantiate_classes(self) -> None:
        """Check the checkpoint, the machine and the settings before data are loaded."""
        if self.name != "fit" and self.settings.ckpt_path is None:
            path = "lightning_logs/NAME/checkpoints/best.ckpt"
            raise UsageError(f"{self.name} needs a checkpoint, such as --ckpt_path {path}")
        trainer = self.settings.trainer
        self.machine = hardware.detect_machine()
        accelerator = trainer.accelerator
        trainer.devices = hardware.choose_devices(self.machine, accelerator, trainer.devices)
        if self.name == "predict" and trainer.devices == "auto":
            trainer.devices = 1
        devices = hardware.count_devices(self.machine, accelerator, trainer.devices)
        if self.name == "predict" and devices > 1:
            raise UsageError("predict runs on one device: leave --devices out, or give one")
        self.ranks = devices * trainer.num_nodes
        if sys.platform == "win32" and self.ranks > 1 and self.machine.kind(accelerator) == "gpu":
            raise UsageError("several GPUs need NCCL, which torch does not have on Windows: use --devices 1, or WSL 2")
        if trainer.num_nodes > 1 and "MASTER_ADDR" not in os.environ and not by_slurm(os.environ):
            names = "MASTER_ADDR, MASTER_PORT and NODE_RANK"
            raise UsageError(f"--nodes {trainer.num_nodes} needs {names} on each machine, or torchrun or SLURM")
        self.notes: dict[str, str] = {}
        typed = self.command.value("threads") is not None
        if self.name == "fit" or typed:
            processes = devices
            if hardware.core_count() <= int(os.environ.get("SLURM_CPUS_PER_TASK", "0")):
                processes = 1  # SLURM gives each process cores of its own
            choice = choose_threads(self.settings.threads, typed, processes)
            self.settings.threads, self.notes["threads"] = choice
        if trainer.precision is None:
            trainer.precision, self.notes["precision"] = hardware.choose_precision(self.machine, accelerator)
        check_settings(self.settings, self.ranks)
        for name in FEATURES:
            if self.settings[name] is None:
                continue
            if adjust := getattr(feature_class(name), "adjust_settings", None):
                adjust(self.settings[name], self.settings)
        self._select_checkpoint()

    def _select_checkpoint(self) -> None:
        """Hold the folder of a resumed run, and read the data state of its checkpoint, or of the one to evaluate."""
        self.step: int | None = None
        self.changes: dict[str, object] = {}
        self.data_state: dict[str, object] = {}
        if self.name != "fit":
            self.evaluated = read_checkpoint(Path(self.settings.ckpt_path).expanduser())
            self.data_state = self.evaluated.get("ImageData", {})
        run = None
        if self.checkpoint:
            run = run_of(self.checkpoint)
        logs, recipe = Path(self.settings.logs).expanduser(), self.settings.recipe or "custom"
        self.folder = RunFolder(logs, recipe, run, self.first, self.command.job)
        if self.checkpoint:
            self.checkpoint, contents = validate_resume(self.checkpoint, self.command, self.first)
            trained = plain_values(self.checkpoint.resolve().parent.parent / "config.yaml")
            given = yaml.safe_load(self._config_text())
            given["logs"] = trained.get("logs")  # a resumed run stays in its folder
            may_change = [name for name in FEATURES if getattr(feature_class(name), "may_change", False)]
            may_change += [f"data.{name}" for name in ImageData.may_change]
            self.changes = changed_settings(by_name(trained), by_name(given), may_change)
            self.step, self.data_state = contents["global_step"], contents.get("ImageData", {})
            self.notes |= {"resume": display_path(self.checkpoint), "step": str(self.step)}

    def _config_text(self) -> str:
        return self._subcommand_parsers[self.name].dump(self.settings, skip_none=False, skip_link_targets=True)

    def _input_shape(self, data: ImageData) -> list[int]:
        """Return the shape of an image, after the data have got the split of the checkpoint."""
        if self.checkpoint:
            data.load_state_dict(self.data_state)
        else:
            data.evaluate_split_of(self.data_state)
        return data.input_shape

    def instantiate_trainer(self, **kwargs: object) -> pl.Trainer:
        """Return the Trainer with our callbacks and loggers in addition to the configured ones."""
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it
        configured = self.config_init[self.name].trainer
        self.child_ranks = ChildRanks()
        callbacks = [self.child_ranks, *as_list(configured.callbacks)]
        validates = len(self.datamodule.split[1]) > 0
        self.settings.data.images.mean, self.settings.data.images.std = self.datamodule.statistics
        self.run = self._make_run()
        lines = not self.command.brief
        further: list[Callback] = []
        if self.run.trains and lines:
            further.append(StartCard(self.run))
        if self.run.trains:
            further.append(SlowdownWarning())
        callbacks += self.run.callbacks(validates, lines, [*further, *self._features()])
        loggers = [logger for logger in as_list(configured.logger) if isinstance(logger, Logger)]
        if configured.logger is not False:
            self.run.create_loggers(self.step)
        if not validates:
            kwargs["limit_val_batches"] = 0
        if self.ranks > 1 and configured.strategy in ("auto", "ddp"):
            kwargs["strategy"] = DDPStrategy(timeout=timedelta(seconds=self.settings.rank_timeout))
        return super().instantiate_trainer(
            callbacks=callbacks,
            logger=loggers,
            plugins=[*as_list(configured.plugins), AtomicCheckpointIO()],
            profiler=configured.profiler or NoProfiler(),
            **kwargs,
        )

    def _features(self) -> list[Callback]:
        features: list[Callback] = []
        if self.name != "fit":
            return features
        for name in FEATURES:
            feature = self.config_init[self.name][name]
            if feature is None:
                continue
            features.append(feature)
        return features

    def _make_run(self) -> Run:
        folder, text = self.folder, self._config_text()
        assert folder
        settings = yaml.safe_load(text)
        return Run(folder, settings, text, self.notes, self.command.name, self.model.monitored, self.changes)

    # ---- running

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand and release the folder. Add the command that resumes the run to an error."""
        Interrupted.latest = None
        try:
            parts = (self.run, self.trainer, self.model, self.datamodule)
            result: Results | int | None
            if subcommand == "fit":
                result = fit(*parts, self.checkpoint or self.settings.ckpt_path)
            else:
                load_weights(self.model, self.settings.ckpt_path, self.evaluated)
                if subcommand == "predict":
                    result = predict(*parts)
                else:
                    result = evaluate(*parts)
            if self.trainer.is_global_zero and not self.command.brief:
                self._print(result)
        except BaseException as error:
            interruption = Interrupted.latest
            if interruption is None:
                error.resume = self._resume_line()  # type: ignore[attr-defined]
                raise
            interruption.resume = self._resume_line()
            raise interruption from None
        finally:
            self.run.folder.release()
            self.child_ranks.end(self.trainer)
            if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
                torch.distributed.destroy_process_group()  # its threads can abort the interpreter at exit

    def _print(self, result: Results | int | None) -> None:
        if isinstance(result, Results):
            print_results(self.run, result, self.datamodule)
        elif result:
            say(f"{counted(result, 'prediction')} in {display_path(self.run.folder.path)}/predictions.csv")
        else:
            print_dev_run()

    def _resume_line(self) -> str | None:
        """Return the command that resumes this run, None before its first checkpoint."""
        if not self.run.folder.resumable:
            return None
        line = f"{program(self.command.name)} --resume {shlex.quote(display_path(self.run.folder.path))}"
        if untrusted_parts(self.run.settings, self.run.folder.path.parent):
            line += " --trust"
        return line


def as_list(value: object) -> list[Any]:
    """Return a setting that may be one value, several or none as a new list."""
    if value is None:
        return []
    if isinstance(value, list):
        return list(value)
    return [value]


def check_settings(settings: Namespace, ranks: int) -> None:
    """Raise UsageError for settings that have the right types but are invalid, before data are loaded."""
    if settings.checkpoint_every is not None:
        regular_checkpoint(settings.checkpoint_every)
        if ranks > 1 and not str(settings.checkpoint_every).isdecimal():
            raise UsageError(f"--checkpoint-every {settings.checkpoint_every} needs one process: use a number of steps")
    if settings.recipe and Path(settings.recipe).name != settings.recipe:
        raise UsageError(f"recipe: {settings.recipe!r} must be the name of a folder, without /")
    strategy = str(settings.trainer.strategy)
    if re.search("fsdp|deepspeed|model_?parallel|_spawn|_fork|_notebook", strategy, re.IGNORECASE):
        raise UsageError(f"--trainer.strategy {strategy} is not supported: use --trainer.strategy ddp")
    if settings.trainer.max_epochs == 0:
        raise UsageError("--epochs must be at least 1, not 0")
    check_model(settings.model.as_dict())
    check_net(settings.model.net, settings.model.net_options or {})


def program(command: str) -> str:
    """Return the start of a command line that runs `command` like this process: a script, cifar-lit or `python -m`."""
    path = Path(sys.argv[0])
    if path.suffix == ".py" and path.name != "__main__.py":
        return f"python {shlex.quote(sys.argv[0])}"
    if path.suffix:
        return f"python -m cifar_lit {command}"
    return f"{path.name} {command}"


def by_name(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a config.yaml by dotted name. A feature is one setting, whatever it holds."""
    named: dict[str, object] = {}
    for name, value in settings.items():
        if re.fullmatch("trainer|model|data|data.(augment|split|images|loading)", name) and isinstance(value, dict):
            named |= by_name({f"{name}.{key}": each for key, each in value.items()})
        else:
            named[name] = value
    return named


def validate_resume(checkpoint: Path, command: Command, first: bool) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint to resume and its contents. If it was not typed and is damaged, use an older one.

    Call this while holding the run's lock: before that, another process may write checkpoints or finish the run.
    """
    check_unfinished(checkpoint.resolve().parent.parent, needs_test=command.name == "train")
    is_typed = Path(str(command.resume)).expanduser().is_file()
    if is_typed or (not first and RESUMED_CHECKPOINT in os.environ):
        contents, damaged = read_checkpoint(checkpoint), None
    else:
        checkpoint, contents, damaged = latest_valid_checkpoint(checkpoint)
    if damaged and first:
        note(f"{damaged}: resuming {display_path(checkpoint)} of step {contents['global_step']}")
    os.environ[RESUMED_CHECKPOINT] = str(checkpoint)
    return checkpoint, contents
