"""LightningCLI under our command line: builds data, model and Trainer from the settings, then runs the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse.typing import PositiveFloat
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

from cifar_lit import hardware as machine
from cifar_lit.cli import trust
from cifar_lit.cli.checks import check_settings
from cifar_lit.cli.errors import long_flags, parsed
from cifar_lit.cli.flags import LOGS, OWN, SHORT, Command, arguments, recipe_path
from cifar_lit.cli.resume import resolve_resume, validate_resume
from cifar_lit.cli.run import Run
from cifar_lit.cli.tuner import device_of, memory_told, search
from cifar_lit.data.datamodule import ImageData
from cifar_lit.distributed.join import join
from cifar_lit.distributed.progress import RankProgress
from cifar_lit.distributed.rank_info import advice, is_first_process, rank_info
from cifar_lit.errors import Failure, UsageError
from cifar_lit.runs.predictions import write_predictions
from cifar_lit.runs.run_folder import RunFolder, display_path, run_of
from cifar_lit.training.callbacks import Interrupted, NoProfiler
from cifar_lit.training.checkpoint import AtomicCheckpointIO, describe, read_checkpoint
from cifar_lit.training.classifier import ImageClassifier

DEFAULT_RECIPES = {"gpu": "fast94", "cpu": "laptop"}

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 10,
    "num_sanity_val_steps": 0,  # a fit validates after its first epoch anyway
    "enable_model_summary": False,  # the start card says what matters
    "use_distributed_sampler": False,  # our loaders share images out exactly; the sampler would count some twice
    "precision": None,
}


def run_command(command: Command) -> None:
    """Runs fit, train, validate, test or predict as parsed from the command line.

    Raises UsageError, Failure, Interrupted and what Lightning raises.
    """
    TrainingCLI(command)


class TrainingCLI(LightningCLI):
    """LightningCLI with one sub-command, our arguments and our run around the Trainer."""

    model: ImageClassifier
    datamodule: ImageData

    def __init__(self, command: Command) -> None:
        self.command = command
        self.name = "fit" if command.name == "train" else command.name
        self.checkpoint = self._resumed()
        base = self._base()
        trust.guard(command, base)
        kwargs = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            ImageClassifier,
            ImageData,
            save_config_callback=None,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={**kwargs, "prog": "cifar-lit", self.name: dict(kwargs)},
            args=arguments(command, base, self.name),
        )

    def _resumed(self) -> Path | None:
        """The checkpoint to go on from; the same in every process of the run."""
        if self.command.resume is None:
            return None
        if self.name != "fit":
            raise UsageError(f"--resume goes on with a training; `{self.name}` takes --ckpt_path PATH")
        return resolve_resume(self.command, is_first_process(os.environ))

    def _base(self) -> Path | None:
        """The weakest settings: of the run that is resumed or tested, else of a recipe."""
        command = self.command
        if self.checkpoint is not None:
            run = run_of(self.checkpoint)
            assert run is not None
            if command.recipe:
                raise UsageError(f"--resume goes on with the recipe of {display_path(run)}: leave --recipe out")
            return run / "config.yaml"
        if command.recipe:
            return recipe_path(command.recipe)
        tested = command.value("ckpt_path")
        if tested and not command.configs:
            run = run_of(Path(tested).expanduser())
            if run is not None:
                return run / "config.yaml"
        if command.configs or command.asks_only:
            return None
        wanted = command.value("trainer.accelerator") or "auto"
        command.recipe = DEFAULT_RECIPES["gpu" if wanted != "cpu" and machine.detect_machine().gpus else "cpu"]
        return recipe_path(command.recipe)

    # ---- parsing

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one that runs, as each costs a parser."""
        return {self.name: super().subcommands()[self.name]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what is ours, and lets the data tell the model its shape."""
        parser.add_argument("--recipe", type=str | None, default=None, help="name of the recipe, for the run's folder")
        parser.add_argument("--logs", type=str, default=LOGS, help="folder for run folders")
        text = "checkpoints within epochs, every so many steps (500) or minutes (10m); their ends have one anyway"
        parser.add_argument("--checkpoint_every", type=int | str | None, default=None, help=text)
        text = "seconds without a sign from one of several processes after which the run is ended"
        parser.add_argument("--rank_timeout", type=PositiveFloat, default=60.0, help=text)
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)
        parser.link_arguments("data.input_shape", "model.input_shape", apply_on="instantiate")
        parser.link_arguments("data.class_count", "model.num_classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses our line; the usage screen that argparse prints with an error is left out."""
        own = long_flags(self._subcommand_parsers[self.name])
        self.config = parsed(parser, args, {*own, *SHORT, *OWN})

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint's settings must not override flags."""

    # ---- building

    @property
    def settings(self) -> Any:
        """The sub-command's part of the configuration."""
        return self.config[self.name]

    def before_instantiate_classes(self) -> None:
        """Checks the machine and what is to be tested before data are touched."""
        if self.name != "fit":
            tested = self.settings.ckpt_path
            if tested is None:
                raise UsageError("which weights? Name a checkpoint: --ckpt_path lightning_logs/NAME/checkpoints/best.ckpt")
            if not Path(tested).expanduser().is_file():
                raise UsageError(f"there is no checkpoint {tested}")
        trainer, self.machine = self.settings.trainer, machine.detect_machine()
        trainer.accelerator, trainer.devices = machine.choose_devices(self.machine, trainer.accelerator, trainer.devices)
        if self.name == "predict":
            if trainer.devices not in ("auto", 1) and not (isinstance(trainer.devices, list) and len(trainer.devices) == 1):
                raise UsageError("predict runs on one device: leave --devices out, or name one")
            trainer.devices = 1 if trainer.devices == "auto" else trainer.devices
        place = rank_info(machine.count_devices(self.machine, trainer.accelerator, trainer.devices), trainer.num_nodes)
        self.watch = join(place, self.settings.rank_timeout)
        self.notes: dict[str, str] = {}
        if trainer.precision is None:
            trainer.precision, self.notes["precision"] = machine.choose_precision(self.machine, trainer.accelerator)
        check_settings(self.settings)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The Trainer with our callbacks and loggers beside the configured ones."""
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs that have it, as Lightning advises; nothing elsewhere
        data = self.datamodule
        self._search()
        self.settings.data.mean, self.settings.data.std = data.statistics
        run_path = run_of(self.checkpoint) if self.checkpoint else None
        first = is_first_process(os.environ)
        folder = RunFolder(
            Path(self.settings.logs).expanduser(), self.settings.recipe or "custom", run_path, first, self.command.job
        )
        step = None
        if self.checkpoint:
            try:
                self.checkpoint, step = validate_resume(self.checkpoint, self.command, first)
            except BaseException:
                folder.release()
                raise
            self.notes |= {"resume": display_path(self.checkpoint), "step": str(step)}
        parser = self._subcommand_parsers[self.name]
        text = parser.dump(self.settings, skip_none=False, skip_link_targets=True)
        trust.remember(text)
        self.run = Run(folder, yaml.safe_load(text), text, self.notes, self.name)
        if self.watch:
            self.watch.release, self.watch.advice = folder.release, lambda: advice(self._hint(), os.environ)
        wanted = self.config_init[self.name].trainer
        callbacks = wanted.callbacks or []
        loggers = wanted.logger if isinstance(wanted.logger, list) else [wanted.logger]
        validates = len(data.split[1]) > 0
        bar = bool(wanted.enable_progress_bar is not False and sys.stdout.isatty())
        return super().instantiate_trainer(
            callbacks=[
                *(callbacks if isinstance(callbacks, list) else [callbacks]),
                *self.run.callbacks(validates, bar=bar),
                *([RankProgress(self.watch)] if self.watch else []),
            ],
            logger=[
                *(self.run.loggers(step) if wanted.logger is not False else []),
                *(logger for logger in loggers if isinstance(logger, Logger)),
            ],
            plugins=[*(wanted.plugins or []), AtomicCheckpointIO()],
            enable_progress_bar=bar,
            profiler=wanted.profiler or NoProfiler(),
            **({} if validates else {"limit_val_batches": 0}),
            **kwargs,
        )

    def _search(self) -> None:
        """Finds what `--auto-batch` and `--auto-lr` ask for; it is recorded as if it had been typed."""
        auto, trainer = self.command.auto, self.settings.trainer
        if not auto:
            return
        if self.name != "fit" or self.checkpoint:
            raise UsageError(f"--auto-{min(auto)} is for new trainings: leave it out")
        device = device_of(self.machine, trainer.accelerator, trainer.devices)
        search(auto, self.model, self.datamodule, device, str(trainer.precision))
        self.settings.data.batch_size, self.settings.model.lr = self.datamodule.batch_size, self.model.hparams["lr"]

    # ---- running; LightningCLI calls the method of the sub-command's name

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs it; an interruption learns how to go on, and the folder is left to others whatever happens."""
        try:
            with memory_told(self.datamodule):
                super()._run_subcommand(subcommand)
        except Interrupted as interruption:
            interruption.resume = self._hint()
            raise
        finally:
            self.run.folder.release()
            if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
                torch.distributed.destroy_process_group()  # its threads, left to the interpreter's end, can abort it there

    def _hint(self) -> str | None:
        return self.run.resume_command(sys.argv[0], self.command.name)

    def fit(self, model: ImageClassifier, datamodule: ImageData, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Trains, then takes the best weights; `train` goes on to test them."""
        run, trainer = self.run, self.trainer
        datamodule.trainer = trainer  # it tells how many devices there are
        datamodule.train_dataloader()  # refuses what cannot be shared out among them, before there is a run folder
        trainer.fit(model, datamodule=datamodule, ckpt_path=self.checkpoint or ckpt_path, **kwargs)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        val = run.take_best_weights(model)
        test = self._evaluate("test") if self.command.name == "train" else None
        if val and not test:
            trainer.loggers = []  # which have this score already; what is wanted is the outcome of each image
            self._evaluate("validate")
        self._finish(val, test, keep=True)

    def validate(self, model: ImageClassifier, datamodule: ImageData, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Scores a checkpoint on the validation images."""
        if not len(datamodule.split[1]):
            raise UsageError("there is nothing to validate on: data.val_size is 0")
        self._load(ckpt_path)
        self._finish(self._evaluate("validate"), None, keep=False)

    def test(self, model: ImageClassifier, datamodule: ImageData, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Scores a checkpoint on the test images."""
        self._load(ckpt_path)
        self._finish(None, self._evaluate("test"), keep=False)

    def predict(self, model: ImageClassifier, datamodule: ImageData, ckpt_path: Any = None, **kwargs: Any) -> None:
        """Writes the class and its probability for every test image to predictions.csv in a run folder."""
        self._load(ckpt_path)
        batches = self.trainer.predict(model, datamodule=datamodule, return_predictions=True)
        count = write_predictions(self.run.folder.path / "predictions.csv", datamodule.classes, batches)  # type: ignore[arg-type]
        print(f"{count} predictions in {display_path(self.run.folder.path)}/predictions.csv")

    def _load(self, ckpt_path: Any) -> None:
        path = Path(ckpt_path).expanduser()
        checkpoint = read_checkpoint(path)
        try:
            self.model.load_state_dict(checkpoint["state_dict"])
        except RuntimeError:
            other = checkpoint.get("hyper_parameters", {})
            raise Failure(
                f"{path} holds weights of {describe(other)}, not of {describe(self.model.hparams)}: "
                f"leave --net and the data flags out, or give those of the checkpoint"
            ) from None

    def _evaluate(self, how: str) -> Any:
        self.model.score = self.model.outcomes = None
        getattr(self.trainer, how)(self.model, datamodule=self.datamodule, verbose=False)
        return self.model.score

    def _finish(self, val: Any, test: Any, keep: bool) -> None:
        if not self.trainer.is_global_zero or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        metrics = self.run.metrics(self.trainer, self.model, self.datamodule, val, test)
        self.run.show(metrics, val, test, self.model.outcomes, self.datamodule, self.trainer.global_step)
        self.run.write(metrics, self.model if keep else None, self.datamodule, self.model.outcomes if test else None)
        self.run.print_end(metrics, test, self.datamodule)
