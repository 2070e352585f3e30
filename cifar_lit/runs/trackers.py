"""W&B and MLflow, through Lightning's loggers. A resumed run continues its tracked run.

Project, group, tags, server and keys are the trackers' own environment variables or files in the home folder, so no
file of a run holds a secret, and no file of the working folder chooses who gets it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shlex
from collections.abc import Mapping
from contextlib import chdir
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from cifar_lit.errors import Failure, UsageError, check_choice, first_line
from cifar_lit.files import check_database, write_text
from cifar_lit.runs.run_folder import RunFolder, check_links, display_path, read_curves, read_json
from cifar_lit.text import note, say

# Defaults of the trackers' variables. By MLflow's own, the training waits for minutes if the server is gone.
VARIABLES = {
    "WANDB_PROJECT": "cifar-lit", "WANDB_CONSOLE": "off", "WANDB_SILENT": "true", "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "60", "WANDB_FINISH_TIMEOUT_RAISES": "true",
    "MLFLOW_EXPERIMENT_NAME": "cifar-lit", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # fmt: skip


class _Wandb:
    """A run of W&B: online after a login or if WANDB_MODE says so, else offline in the run folder."""

    def __init__(self, run: Path, run_id: str | None, settings: dict[str, Any]) -> None:
        import wandb
        from lightning.pytorch.loggers.wandb import WandbLogger

        with chdir(Path(wandb.__file__).parent):  # it would read wandb/settings in the working folder
            wandb.setup()
        is_offline = not wandb.login(prompt=False, verify=False) and "WANDB_MODE" not in os.environ
        mode, folder = "offline" if is_offline else None, Path(os.environ.get("WANDB_DIR") or run).absolute()
        earlier = [*folder.glob(f"wandb/offline-run-*-{run_id}")]
        self.id = run_id or secrets.token_hex(8)
        self.run = WandbLogger(run.name, folder, id=self.id, mode=mode, config=settings).experiment
        for part in earlier:
            (part / f"run-{run_id}.wandb.synced").touch()  # a kill loses its last rows; the new part gets all rows
        self.close = lambda status: self.run.finish(exit_code=int(status != "success"))
        self.wandb, files = wandb, Path(self.run.settings.sync_dir)
        (files / "logs/debug-core.log").unlink(missing_ok=True)  # a run with a symlink to outside cannot be resumed
        self.place = self.run.url or f"offline: upload it with `wandb sync {shlex.quote(display_path(files))}`"

    def log(self, metrics: dict[str, float], step: int, row: int) -> None:
        if row >= self.run.starting_step:
            self.run.log({**metrics, "trainer/global_step": step}, step=row)

    def log_image(self, name: str, image: Any, row: int) -> None:
        self.run.log({name: self.wandb.Image(image)}, step=row)

    def log_model(self, file: Path) -> None:
        artifact = self.wandb.Artifact(f"model-{self.id}", "model")
        artifact.add_file(str(file), policy="immutable")  # not copied
        self.run.log_artifact(artifact)


class _MLflow:
    """A run of MLflow, on the server or in the database of MLFLOW_TRACKING_URI, else in a file beside the runs."""

    def __init__(self, run: Path, run_id: str | None, settings: dict[str, Any]) -> None:
        from lightning.pytorch.loggers.mlflow import MLFlowLogger

        logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)  # it warns of a new experiment
        logs, experiment = run.parent.absolute(), os.environ["MLFLOW_EXPERIMENT_NAME"]
        own = None if os.environ.get("MLFLOW_TRACKING_URI") else logs / "mlflow.db"
        uri = f"sqlite:///{own}" if own else os.environ["MLFLOW_TRACKING_URI"]
        if own:
            check_database(own)
        is_database = re.match(r"\w*sql", uri)
        files = (logs / "mlartifacts").as_uri() if is_database else None
        self.logger = MLFlowLogger(experiment, run.name, uri, artifact_location=files, run_id=run_id)
        self.client, self.id, self.close = self.logger.experiment, self.logger.run_id, self.logger.finalize
        if own:
            self._check_place(own, f"{files}/{self.id}/artifacts")
        if run_id:
            self.client.update_run(run_id, "RUNNING")
        else:
            self.logger.log_hyperparams(settings)
        names, history = self.client.get_run(self.id).data.metrics, self.client.get_metric_history
        self.steps = {name: max(point.step for point in history(self.id, name)) for name in names}
        page = f"{uri}/#/experiments/{self.logger.experiment_id}/runs/{self.id}"
        self.place = f"open it with `mlflow ui --backend-store-uri {shlex.quote(uri)}`" if is_database else page

    def _check_place(self, database: Path, expected: str) -> None:
        """Raise Failure if a database of the working folder makes MLflow write files elsewhere."""
        place, folder = self.client.get_run(self.id).info.artifact_uri, database.parent / "mlartifacts"
        if place != expected or folder.is_symlink():
            fault = f"{display_path(database)} sends files to {place}"
            raise Failure(f"{fault}: name it with MLFLOW_TRACKING_URI to allow it")
        check_links(folder)

    def log(self, metrics: dict[str, float], step: int, row: int) -> None:
        if new := {name: value for name, value in metrics.items() if step > self.steps.get(name, -1)}:
            self.logger.log_metrics(new, step)
            self.steps |= dict.fromkeys(new, step)

    def log_image(self, name: str, image: Any, row: int) -> None:
        self.client.log_image(self.id, image, f"{name}.png")

    def log_model(self, file: Path) -> None:
        self.client.log_artifact(self.id, str(file))


TRACKERS: dict[str, Any] = {"wandb": _Wandb, "mlflow": _MLflow}


class TrackerLogger(Logger):
    """Log a training to a tracker, from the first process. An error of the tracker does not end the training.

    tracker: a key of TRACKERS. resumed_step: step of the checkpoint that is resumed, None for a new run.
    """

    name, version = "", ""  # required by Lightning

    def __init__(self, tracker: str, run: RunFolder, settings: dict[str, Any], resumed_step: int | None) -> None:
        super().__init__()
        self._key, self._run, self._settings, self._resumed_step = tracker, run, settings, resumed_step
        self._tracker: Any = None
        self._row = 0  # rows logged by all parts of a resumed run
        self._failed = self._warned = False

    @rank_zero_only
    def save(self) -> None:
        """Start or continue the tracked run. Lightning calls this before the first step. Raise Failure on errors."""
        if self._tracker:
            return
        file = self._run.path / "trackers.json"  # ids of the tracked runs
        ids = read_json(file)
        earlier = re.fullmatch("[0-9a-f]{16,32}", str(ids.get(self._key)))  # anyone may have written the file
        run_id = earlier[0] if earlier and self._resumed_step is not None else None
        try:
            self._tracker = TRACKERS[self._key](self._run.path, run_id, self._settings)
            write_text(file, json.dumps({**ids, self._key: self._tracker.id}) + "\n")
        except Exception as error:  # their classes differ by package
            reason = _public(first_line(error))
            raise Failure(f"{self._key} cannot start ({reason}): fix that, or leave it out of --logger") from error
        if self._resumed_step is not None:
            self._log_file(self._resumed_step)
        say(f"{self._key:<12} {_public(self._tracker.place)}")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the values that the tracked run does not have yet."""
        self._try("log", {name: x for name, x in metrics.items() if name not in ("epoch", "step")}, step, self._row)
        self._row += 1

    def _log_file(self, stop: float = inf) -> None:
        self._row = 0
        for row in read_curves(self._run.path):
            if row.get("step", 0) <= stop and (stop == inf or "test/loss" not in row):  # a resumed run tests again
                self.log_metrics(row, int(row.get("step", 0)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `save` logs the configuration."""

    @rank_zero_only
    def log_images(self, tag: str, image: Tensor, step: int = 0) -> None:
        """Log a picture, uint8 (C, H, W)."""
        self._try("log_image", tag, to_pil_image(image), self._row)

    def finish(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log scores of metrics.json, the model file, and after an error the missing rows; close the tracked run."""
        if self._failed:
            self._failed = False
            self._log_file()
        scores = {f"final/{part}/{name}": x for part in ("val", "test") for name, x in (metrics[part] or {}).items()}
        self.log_metrics({name: value for name, value in scores.items() if isinstance(value, float)}, step)
        self._try("log_model", self._run.path / "model.safetensors")
        self._try("close", "success")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the tracked run of a training that failed or was stopped. `finish` closes the others."""
        if self._tracker and status != "success":
            self._try("close", status)

    def _try(self, method: str, *args: Any) -> None:
        """Call a method of the tracker. After the first error, print a warning and call none until `finish`."""
        try:
            if not self._failed:
                getattr(self._tracker, method)(*args)
        except Exception as error:  # their classes differ by package
            if not self._warned:
                reason = _public(first_line(error))
                note(f"{self._key} failed ({reason}): the training continues without it; metrics.csv is complete")
            self._failed = self._warned = True


def logger_names(setting: str) -> list[str]:
    """Return the names in the setting `logger`; raise UsageError for an unknown name or a missing package."""
    names = setting.replace(" ", "").split(",")
    for name in names:
        check_choice("--logger", name, ("tensorboard", "csv", *TRACKERS))
        if name in TRACKERS and find_spec(name) is None:
            raise UsageError(f'--logger {name} needs a package: pip install "cifar-lit[{name}]"')
    for name, value in VARIABLES.items() if TRACKERS.keys() & names else ():
        os.environ.setdefault(name, value)
    return names


def _public(text: str) -> str:
    """Return text without user names and passwords in URLs."""
    return re.sub(r"(?<=//)[^\s'\"]*@", "", text)
