"""W&B and MLflow, through Lightning's loggers. A resumed run continues its tracked run.

Servers and keys come from their environment variables or the home folder, never from a run or the working folder.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from cifar_lit.errors import Failure, UsageError, check_choice, first_line
from cifar_lit.files import check_database, write_text
from cifar_lit.runs.run_folder import RunFolder, display_path, read_json
from cifar_lit.text import note, say

# Defaults of the trackers' variables. By MLflow's own, the training waits for minutes if the server is gone.
VARIABLES = {
    "WANDB_PROJECT": "cifar-lit", "WANDB_CONSOLE": "off", "WANDB_SILENT": "true", "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "60", "WANDB_FINISH_TIMEOUT_RAISES": "true",
    "MLFLOW_EXPERIMENT_NAME": "cifar-lit", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # fmt: skip


class _Wandb(WandbLogger):
    """Online after a login or if WANDB_MODE says so, else offline in the run folder."""

    def __init__(self, run: Path, run_id: str | None, settings: dict[str, Any]) -> None:
        import wandb

        with chdir(Path(wandb.__file__).parent):  # it would read wandb/settings in the working folder
            wandb.setup()
        mode: Literal["offline"] | None = None
        if not wandb.login(prompt=False, verify=False) and "WANDB_MODE" not in os.environ:
            mode = "offline"
        folder = Path(os.environ.get("WANDB_DIR") or run).absolute()  # for W&B's process, which keeps that folder
        super().__init__(run.name, folder, id=run_id, mode=mode, config=settings)
        files = Path(self.experiment.settings.sync_dir)
        (files / "logs/debug-core.log").unlink(missing_ok=True)  # a run with a symlink to outside cannot be resumed
        parts = f"{shlex.quote(display_path(files.parent))}/offline-run-*-{self.version}"  # a folder for each start
        self.place = self.experiment.url or f"offline: upload it with `wandb sync {parts}`"

    def finalize(self, status: str) -> None:
        self.experiment.finish(exit_code=int(status == "failed"))


class _MLflow(MLFlowLogger):
    """On the server or in the database of MLFLOW_TRACKING_URI, else in a file beside the runs."""

    def __init__(self, run: Path, run_id: str | None, settings: dict[str, Any]) -> None:
        logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)  # it warns of a new experiment
        uri, database = os.environ.get("MLFLOW_TRACKING_URI"), run.parent.absolute() / "mlflow.db"
        if not uri:
            check_database(database)  # a stranger's may say where files go, but only values are logged
            uri = f"sqlite:///{database}"
        super().__init__(os.environ["MLFLOW_EXPERIMENT_NAME"], run.name, uri, run_id=run_id)
        if not run_id:
            self.log_hyperparams(settings)
        self.place = uri
        if not uri.startswith("http"):
            self.place = f"open with `mlflow ui --backend-store-uri {shlex.quote(uri)}`"


TRACKERS: dict[str, type[_Wandb | _MLflow]] = {"wandb": _Wandb, "mlflow": _MLflow}


class TrackerLogger(Logger):
    """Log curves to a tracker, a key of TRACKERS. An error of the tracker does not end the training."""

    name, version = "", ""  # required by Lightning

    def __init__(self, tracker: str, run: RunFolder, settings: dict[str, Any]) -> None:
        super().__init__()
        self._key, self._run, self._settings = tracker, run, settings
        self._tracker: _Wandb | _MLflow | None = None  # stays None in all but the first process

    def start(self) -> None:
        """Start or continue the tracked run. Raise Failure on errors."""
        ids = read_json(self._run.path / "trackers.json")  # anyone may have written it
        run_id = ids.get(self._key)
        if not re.fullmatch("[0-9a-z]{8,32}", str(run_id)):
            run_id = None
        try:
            self._tracker = TRACKERS[self._key](self._run.path, run_id, self._settings)
            write_text(self._run.path / "trackers.json", json.dumps({**ids, self._key: self._tracker.version}) + "\n")
        except Exception as error:  # their classes differ by package
            reason = _public(first_line(error))
            raise Failure(f"{self._key} cannot start ({reason}): fix that, or leave it out of --logger") from error
        say(f"{self._key:<12} {_public(self._tracker.place)}")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log values."""
        values = dict(metrics)
        values.pop("epoch", None)
        values.pop("step", None)
        self._try("log_metrics", values, step)

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Do nothing: `start` logs the configuration."""

    def finalize(self, status: str) -> None:
        """Close the tracked run, except after a successful fit, which Lightning calls `success`: a test may follow."""
        if status != "success":
            self._try("finalize", status)

    def _try(self, method: str, *args: object) -> None:
        """Call a method of the tracker. After an error, print a warning and call none any more."""
        try:
            if self._tracker:
                getattr(self._tracker, method)(*args)
        except Exception as error:  # their classes differ by package
            self._tracker, reason = None, _public(first_line(error))
            note(f"{self._key} failed ({reason}): the training continues without it; metrics.csv is complete")


def logger_names(setting: str) -> list[str]:
    """Return the names in the setting `logger`; raise UsageError for an unknown name or a missing package."""
    names = setting.replace(" ", "").split(",")
    for name in names:
        check_choice("--logger", name, ("tensorboard", "csv", *TRACKERS))
        if name in TRACKERS and find_spec(name) is None:
            raise UsageError(f'--logger {name} needs a package: pip install "cifar-lit[{name}]"')
    if TRACKERS.keys() & names:
        os.environ.update({**VARIABLES, **os.environ})
    return names


def _public(text: str) -> str:
    """Return text without user names and passwords in URLs."""
    return re.sub(r"(?<=//)[^\s'\"]*@", "", text)
