"""W&B and MLflow, through Lightning's loggers. A resumed run continues its tracked run.

Project, group, tags, server and keys are the trackers' own environment variables, so no file of a run holds a secret.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from cifar_lit.errors import Failure, UsageError, check_choice, first_line
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import RunFolder, display_path, read_curves, read_json
from cifar_lit.text import note, say

IDS = "trackers.json"  # id of each tracked run
# Defaults of the trackers' variables. By MLflow's own, the training waits for minutes if the server is gone.
VARIABLES = {
    "WANDB_PROJECT": "cifar-lit", "WANDB_CONSOLE": "off", "WANDB_SILENT": "true", "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "60", "WANDB_FINISH_TIMEOUT_RAISES": "true",
    "MLFLOW_EXPERIMENT_NAME": "cifar-lit", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # fmt: skip


class _Wandb:
    """A run of W&B: online after a login or if WANDB_MODE says so, else offline in the run folder."""

    def __init__(self, run: Path, run_id: str | None) -> None:
        import wandb
        from lightning.pytorch.loggers.wandb import WandbLogger

        is_offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        mode, folder = "offline" if is_offline else None, Path(os.environ.get("WANDB_DIR") or run)
        for part in folder.glob(f"wandb/offline-run-*-{run_id}"):
            (part / f"run-{run_id}.wandb.synced").touch()  # it may lack its last rows; the next part has all rows
        self.logger = WandbLogger(run.name, folder, id=run_id or secrets.token_hex(8), mode=mode)
        self.run = self.logger.experiment
        self.id = self.run.id
        files = Path(self.run.settings.sync_dir)
        (files / "logs/debug-core.log").unlink(missing_ok=True)  # a run with a symlink to outside cannot be resumed
        self.place = self.run.url or f"offline: upload it with `wandb sync {shlex.quote(display_path(files))}`"

    def log(self, metrics: dict[str, float], step: int, row: int) -> None:
        if row >= self.run.starting_step:
            self.run.log({**metrics, "trainer/global_step": step}, step=row)

    def log_image(self, name: str, image: Any, step: int, row: int) -> None:
        import wandb

        self.run.log({name: wandb.Image(image)}, step=row)

    def log_model(self, file: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"model-{self.id}", "model")
        artifact.add_file(str(file), policy="immutable")  # not copied
        self.run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "success"))


class _MLflow:
    """A run of MLflow, on the server of MLFLOW_TRACKING_URI or in a SQLite file beside the run folders."""

    def __init__(self, run: Path, run_id: str | None) -> None:
        from lightning.pytorch.loggers.mlflow import MLFlowLogger

        logs, server = run.parent.absolute(), os.environ.get("MLFLOW_TRACKING_URI")
        experiment, uri = os.environ["MLFLOW_EXPERIMENT_NAME"], server or f"sqlite:///{logs}/mlflow.db"
        files = None if server else (logs / "mlartifacts").as_uri()
        self.logger = MLFlowLogger(experiment, run.name, uri, artifact_location=files, run_id=run_id)
        self.client, self.id, self.close = self.logger.experiment, self.logger.run_id, self.logger.finalize
        if run_id:
            self.client.update_run(run_id, "RUNNING")
        self.steps: dict[str, int] | None = None  # last step of each value on the server
        database = shlex.quote(f"sqlite:///{display_path(logs)}/mlflow.db")
        page = f"{server}/#/experiments/{self.logger.experiment_id}/runs/{self.id}"
        self.place = page if server else f"open it with `mlflow ui --backend-store-uri {database}`"

    def log(self, metrics: dict[str, float], step: int, row: int) -> None:
        if self.steps is None:
            names, history = self.client.get_run(self.id).data.metrics, self.client.get_metric_history
            self.steps = {name: max(point.step for point in history(self.id, name)) for name in names}
        new, steps = {name: x for name, x in metrics.items() if step > self.steps.get(name, -1)}, self.steps
        self.steps = None  # unknown after an error
        self.logger.log_metrics(new, step)
        self.steps = steps | dict.fromkeys(new, step)

    def log_image(self, name: str, image: Any, step: int, row: int) -> None:
        self.client.log_image(self.id, image, f"{name}.png")

    def log_model(self, file: Path) -> None:
        self.client.log_artifact(self.id, str(file))


TRACKERS: dict[str, Any] = {"wandb": _Wandb, "mlflow": _MLflow}


class TrackerLogger(Logger):
    """Log a training to a tracker, from the first process. An error of the tracker does not end the training.

    Args:
        tracker: key of TRACKERS.
        run: the run folder.
        settings: the parsed configuration.
        resumed_step: step of the checkpoint that is resumed, None for a new run.
    """

    name, version = "", ""  # required by Lightning

    def __init__(self, tracker: str, run: RunFolder, settings: dict[str, Any], resumed_step: int | None) -> None:
        super().__init__()
        self._key, self._run, self._settings, self._resumed_step = tracker, run, settings, resumed_step
        self._tracker: Any = None
        self._row = 0  # number of rows logged, also by the earlier parts of a resumed run
        self._failed = self._warned = False

    @rank_zero_only
    def save(self) -> None:
        """Start or continue the tracked run. Lightning calls this before the first step. Raise Failure on errors."""
        if self._tracker:
            return
        ids = read_json(self._run.path / IDS)
        earlier = re.fullmatch("[0-9a-f]{16,32}", str(ids.get(self._key)))  # anyone may have written the file
        run_id = earlier[0] if earlier and self._resumed_step is not None else None
        try:
            self._tracker = TRACKERS[self._key](self._run.path, run_id)
            write_text(self._run.path / IDS, json.dumps({**ids, self._key: self._tracker.id}) + "\n")
            if not run_id or self._key == "wandb":
                self._tracker.logger.log_hyperparams(self._settings)
        except Exception as error:  # of any class
            reason = _without_passwords(first_line(error))
            raise Failure(f"{self._key} cannot start ({reason}): fix that, or leave it out of --logger") from error
        if self._resumed_step is not None:
            self._log_file(self._resumed_step)
        say(f"{self._key:<12} {_without_passwords(self._tracker.place)}")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the values that the tracked run does not have yet."""
        values = {name: value for name, value in metrics.items() if name not in ("epoch", "step")}
        self._attempt(lambda: self._tracker.log(values, int(step or 0), self._row))
        self._row += 1

    def _log_file(self, last: float = inf) -> None:
        """Log the rows of metrics.csv up to a step. A test is repeated by a resumed run."""
        self._row = 0
        for row in read_curves(self._run.path):
            if row.get("step", 0) <= last and not (last < inf and any(name.startswith("test/") for name in row)):
                self.log_metrics(row, int(row.get("step", 0)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `save` logs the configuration."""

    @rank_zero_only
    def log_images(self, tag: str, image: Tensor, step: int = 0) -> None:
        """Log a picture, uint8 (C, H, W)."""
        self._attempt(lambda: self._tracker.log_image(tag, to_pil_image(image), step, self._row))

    def finish(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log scores of metrics.json, the model file, and after an error the missing rows; close the tracked run."""
        if self._failed:
            self._failed = False
            self._log_file()
        scores = {f"final/{part}/{name}": x for part in ("val", "test") for name, x in (metrics[part] or {}).items()}
        self.log_metrics({name: value for name, value in scores.items() if isinstance(value, float)}, step)
        self._attempt(lambda: self._tracker.log_model(self._run.path / "model.safetensors"))
        self._attempt(lambda: self._tracker.close("success"))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the tracked run of a training that failed or was stopped. `finish` closes the others."""
        if self._tracker and status != "success":
            self._attempt(lambda: self._tracker.close(status))

    def _attempt(self, action: Callable[[], Any]) -> None:
        """Perform an action. After the first error, print a warning and skip all further actions."""
        try:
            if not self._failed:
                action()
        except Exception as error:  # of any class
            if not self._warned:
                reason = _without_passwords(first_line(error))
                note(f"{self._key} failed ({reason}): the training continues without it; metrics.csv is complete")
            self._failed = self._warned = True


def _without_passwords(text: str) -> str:
    return re.sub(r"(?<=//)[^\s'\"]*@", "", text)


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
