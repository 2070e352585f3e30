"""Loggers of the curves: `metrics.csv` and TensorBoard, both directly in the run folder; W&B and MLflow."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from cifar_lit.base.errors import UsageError, check_choice, install_command
from cifar_lit.base.files import atomic_write, display_path, find_os_error, read_json, write_failure, write_text
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.record import read_rows

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

# First columns of every metrics.csv. Other names are appended.
COLUMNS = (
    "epoch", "step", "lr", "weight_norm", "train/loss", "train/accuracy", "val/loss", "val/accuracy",
    "test/loss", "test/accuracy", "val/balanced_accuracy", "val/macro_f1", "test/balanced_accuracy", "test/macro_f1",
)  # fmt: skip
GROUPS = ("trainer", "model", "data")  # a mapping under any other name holds the settings of a feature


def logged_settings(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings for TensorBoard's hparams tab: those of the net, and what else most runs differ in."""
    data = settings["data"]
    shown = {"recipe": settings["recipe"], "seed": settings["seed_everything"]}
    shown |= {"dataset": data["dataset"], "batch_size": data["batch_size"]}
    shown |= {"max_epochs": settings["trainer"]["max_epochs"], **_named("model", settings["model"])}
    return shown | feature_settings(settings)


def feature_settings(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings of all features by their full names; "on" for a feature without settings."""
    shown: dict[str, object] = {}
    for feature, options in settings.items():
        if feature not in GROUPS and isinstance(options, dict):
            shown |= _named(feature, options) or {feature: "on"}
    return shown


def _named(group: str, options: Mapping[str, Any]) -> dict[str, object]:
    """Return the options that are given by their full names, mappings as text."""
    given = {}
    for name, value in options.items():
        if isinstance(value, dict):
            value = str(value)
        if value is not None:
            given[f"{group}.{name}"] = value
    return given


@contextmanager
def _writing(run: RunFolder) -> Iterator[None]:
    """Raise Failure if the disk is full, or the folder is read-only or missing."""
    try:
        yield
    except (OSError, ValueError) as error:  # Lightning's loggers raise ValueError from the OSError
        cause = find_os_error(error)
        if cause is None:
            raise
        raise write_failure(display_path(run.path), cause, run.resumable) from error


def _step_of(run: RunFolder, metrics: Mapping[str, float], step: int | None) -> int | None:
    """Return the step of values: for those of a test, the step of the tested weights."""
    if any(name.startswith("test/") for name in metrics):
        return run.tested.get("step", step)
    return step


class CurveFile(Logger):
    """`metrics.csv`: one row per logging call, with empty cells for values that were not logged.

    Lightning's CSVLogger deletes the earlier curves when a run is resumed. This logger keeps the rows up to the resumed
    step, except the rows of a test, which is repeated.
    """

    name, version = "", ""  # required by Lightning; unused, because the run folder has both

    def __init__(self, run: RunFolder, resumed_step: int | None = None) -> None:
        super().__init__()
        self._run, self._resumed_step = run, resumed_step
        self._columns: list[str] = []  # empty until the file is written

    def create(self) -> None:
        """Write the header of a new run: syncing the file to disk takes longer than many steps."""
        with _writing(self._run):
            self._rewrite()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row. A new name adds a column."""
        row: dict[str, object] = {**metrics, "step": _step_of(self._run, metrics, step)}
        with _writing(self._run):
            if not row.keys() <= set(self._columns):
                self._rewrite(row)
                return
            # Mode "a" would recreate a deleted file.
            path = self._run.path / "metrics.csv"
            with path.open("r+", newline="", encoding="utf-8") as file:
                file.seek(0, os.SEEK_END)
                csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self, *new_rows: dict[str, object]) -> None:
        path = self._run.path / "metrics.csv"
        rows: list[dict[str, Any]] = []
        if self._columns:
            rows = list(read_rows(path))
        elif self._resumed_step is not None:
            rows = [row for row in read_rows(path) if _is_before(row, self._resumed_step)]
        rows += new_rows
        columns = dict.fromkeys([*COLUMNS, *self._columns])
        for row in rows:
            columns |= dict.fromkeys(row)
        self._columns = list(columns)
        # Atomic: a kill while the file is rewritten must not lose the earlier curves.
        with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)

    def log_hyperparams(self, *args: object, **kwargs: Any) -> None:
        """Do nothing: settings are in config.yaml."""


def _is_before(row: Mapping[str, str], step: int) -> bool:
    """Return whether a row is kept when a training resumes from a step: it is no test's, undamaged and not later."""
    if any(name.startswith("test/") for name in row):
        return False
    try:
        return float(row.get("step", 0)) <= step
    except ValueError:
        return False


class TensorBoardCurves(TensorBoardLogger):
    """TensorBoard's event file in the run folder, with settings and scores for the hparams tab.

    settings: plain values for the hparams tab; None leaves the run out of it.
    resumed_step: TensorBoard ignores earlier events after this step.
    """

    def __init__(self, run: RunFolder, settings: dict[str, Any] | None, resumed_step: int | None = None) -> None:
        purge: dict[str, Any] = {}  # tensorboard takes None for step 0
        if resumed_step is not None:
            purge["purge_step"] = resumed_step + 1
        super().__init__(run.logs, name="", version="", default_hp_metric=False, **purge)
        self._run, self._settings = run, settings

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self._run.path)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars, except the epoch."""
        scores = [name.partition("/")[2] for name in metrics if name.startswith(("val/", "test/"))]
        scalars = dict(metrics)
        scalars.pop("epoch", None)
        with _writing(self._run):
            if scores and self._settings is not None:
                # The settings and the names of the scores must be written before the first score.
                names = [f"test/{score}" for score in scores] + [f"val/{score}" for score in scores]
                for summary in hparams(self._settings, dict.fromkeys(names, 0)):
                    self.experiment._get_file_writer().add_summary(summary)
                self._settings = None
            super().log_metrics(scalars, _step_of(self._run, metrics, step))

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Do nothing: settings are in config.yaml, and are written for the hparams tab with the first scores."""

    @rank_zero_only
    def log_images(self, tag: str, image: Tensor, step: int = 0) -> None:
        """Write a picture, uint8 (C, H, W)."""
        with _writing(self._run):
            self.experiment.add_image(tag, image, step)

    def save(self) -> None:
        """Do nothing, instead of writing Lightning's hparams.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the events so far. The test after a fit continues the file."""
        with _writing(self._run):
            self.experiment.flush()

    @rank_zero_only
    def close(self) -> None:
        """Write and close the file."""
        with _writing(self._run):
            self.experiment.close()


TRACKERS = ("wandb", "mlflow")


def logger_names(setting: str) -> list[str]:
    """Return the names in the setting `logger`; raise UsageError for an unknown name or a missing package."""
    names = setting.replace(" ", "").split(",")
    for name in names:
        check_choice("--logger", name, ("tensorboard", "csv", *TRACKERS))
        if name in TRACKERS and find_spec(name) is None:
            raise UsageError(f"--logger {name} needs a package: {install_command(name)}")
    return names


def start_tracker(name: str, run: RunFolder, settings: dict[str, Any]) -> Logger:
    """Return Lightning's logger of W&B or MLflow, which continues the tracked run of a resumed run.

    W&B is offline without a login; MLflow writes to a database beside the runs. Their own variables change that.
    """
    path = run.path / "trackers.json"
    ids = read_json(path)
    tracker: WandbLogger | MLFlowLogger
    if name == "wandb":
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        project = os.environ.get("WANDB_PROJECT", "cifar-lit")
        wandb.finish()  # an earlier training of this process
        tracker = WandbLogger(run.path.name, run.path, id=ids.get(name), mode=mode, project=project)
    else:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # else a training without its server waits
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.path.absolute().parent / 'mlflow.db'}")
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cifar-lit")
        tracker = MLFlowLogger(experiment, run.path.name, uri, run_id=ids.get(name))
    if name not in ids:
        tracker.log_hyperparams(settings)
    assert tracker.experiment  # starts the tracked run, which gets its id
    write_text(path, json.dumps({**ids, name: tracker.version}) + "\n")
    return tracker


def augmented_sample(data: ImageData, count: int, epoch: int = 0) -> Tensor:
    """Return the first `count` training images of an epoch as augmented by `data`: uint8 (count, C, H, W)."""
    loader = data.train_loader
    (batch,) = loader.maker(epoch)([(loader.epoch_rows(epoch)[:count], 1.0)])
    batch = data.preprocessing.augment_batch(batch, lambda images: images.permute(0, 3, 1, 2))
    return batch.images.float().round().clamp(0, 255).byte().cpu()
