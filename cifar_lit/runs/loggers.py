"""Where curves go: `metrics.csv` and TensorBoard, both straight in the run folder."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from cifar_lit.files import atomic_write, find_os_error, read_text, write_failure
from cifar_lit.runs.run_folder import MAX_TABLE, RunFolder, display_path, read_rows
from cifar_lit.text import note

# The first columns of metrics.csv, which every run has; whatever else is logged gets a column behind them.
COLUMNS = (
    "epoch", "step", "lr", "weight_norm", "train/loss", "train/accuracy", "val/loss", "val/accuracy",
    "test/loss", "test/accuracy", "val/balanced_accuracy", "val/macro_f1", "test/balanced_accuracy", "test/macro_f1",
)  # fmt: skip


MAIN_SETTINGS = ("recipe", "net", "lr", "optimizer")  # the first columns of TensorBoard's hparams tab


# What TensorBoard's hparams tab shows of a run: the settings that people compare runs by.
COMPARED = (
    "recipe", "dataset", "net", "width", "optimizer", "lr", "momentum", "weight_decay", "schedule", "warmup_epochs",
    "label_smoothing", "class_weights", "sampling", "ema_decay", "batch_size", "max_epochs", "precision", "crop", "flip",
    "cutout", "seed",
)  # fmt: skip


def logged_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that runs are compared by, out of the whole configuration."""
    values = {**settings.get("trainer", {}), **settings.get("model", {}), **settings.get("data", {})}
    values |= {"recipe": settings.get("recipe"), "seed": settings.get("seed_everything")}
    return {name: values[name] for name in COMPARED if values.get(name) is not None}


@contextmanager
def _writing(run: RunFolder) -> Iterator[None]:
    """Raise Failure if the folder is full, read-only or gone."""
    try:
        yield
    except (OSError, ValueError) as error:  # Lightning's loggers raise ValueError from the OSError
        cause = find_os_error(error)
        if cause is None:
            raise
        raise write_failure(display_path(run.path), cause, run.resumable) from error


class CurveFile(Logger):
    """`metrics.csv`: one row for each moment of logging, empty where a value was not taken.

    Lightning's CSVLogger deletes the earlier curves when a run is resumed; here rows up to the resumed step stay, but for those
    of a test, which is made again.
    """

    name, version = "", ""  # which Lightning asks for: the run folder has both

    def __init__(self, run: RunFolder, resumed_step: int | None = None) -> None:
        super().__init__()
        self._run, self._resumed_step = run, resumed_step
        self._columns: list[str] = []  # of the file, none until there is something to write

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends a row; a value of a new name makes a column of its own."""
        with _writing(self._run):
            self._write({**metrics, "step": step})

    def _write(self, row: dict[str, Any]) -> None:
        path = self._run.path / "metrics.csv"
        if row.keys() <= set(self._columns):
            with path.open("r+", newline="", encoding="utf-8") as file:  # not "a", which makes what is gone anew
                file.seek(0, os.SEEK_END)
                csv.DictWriter(file, self._columns).writerow(row)
            return
        rows = read_rows(path) if self._columns or self._resumed_step is not None else []
        if not self._columns and self._resumed_step is not None:
            if _lacks_row(path, self._resumed_step):
                note(
                    f"{display_path(path)}: its last row was cut short, by a full disk or a power loss: the curves lack it"
                )
            rows = [kept for kept in rows if _step_of(kept) <= self._resumed_step]
            rows = [kept for kept in rows if not any(name.startswith("test/") for name in kept)]
        self._columns = list(dict.fromkeys([*COLUMNS, *self._columns, *(name for kept in rows for name in kept), *row]))
        # a kill in the middle would take the earlier curves with it
        with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows([*rows, row])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Settings are in config.yaml."""


def _lacks_row(path: Path, resumed_step: int) -> bool:
    """Return whether the last row is cut short, unless the resumed run takes its step again."""
    try:
        lines = read_text(path, MAX_TABLE).splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return False
    if len(lines) < 2 or lines[-1].endswith("\n"):
        return False
    whole_cells = lines[-1].split(",")[:-1]
    return _step_of(dict(zip(lines[0].split(","), whole_cells, strict=False))) <= resumed_step


def _step_of(row: Mapping[str, str]) -> float:
    """The step of a row that was read; infinite where that is damaged."""
    try:
        return float(row.get("step", 0))
    except ValueError:
        return inf


def _put_main_settings_first(experiment: Summary) -> None:
    """Mark the main settings as differing between runs: TensorBoard sorts these first, and the others by name."""
    plugin_data = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin_data.content)
    for setting in content.experiment.hparam_infos:
        setting.differs = setting.name in MAIN_SETTINGS
    plugin_data.content = content.SerializeToString()


class TensorBoardCurves(TensorBoardLogger):
    """TensorBoard's event file in the run folder, with a hparams tab that compares runs by what was validated and tested.

    Args:
        settings: What the tab shows of this run, plain values; None for what is not to be compared there.
    """

    def __init__(self, run: RunFolder, settings: dict[str, Any] | None, resumed_step: int | None = None) -> None:
        purge: dict[str, Any] = {} if resumed_step is None else {"purge_step": resumed_step + 1}
        super().__init__(run.logs, name="", version="", default_hp_metric=False, **purge)
        self._run, self._settings = run, settings

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self._run.path)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes scalars; the epoch is left out, as every curve has its own axis."""
        scores = [name.partition("/")[2] for name in metrics if name.startswith(("val/", "test/"))]
        with _writing(self._run):
            if scores and self._settings is not None:
                # The tab is told the settings, and the scalars that it is to show beside them, before the first is written.
                names = [f"{part}/{score}" for part in ("test", "val") for score in scores]
                experiment, *session = hparams(self._settings, dict.fromkeys(names, 0))
                _put_main_settings_first(experiment)
                for summary in (experiment, *session):
                    self.experiment._get_file_writer().add_summary(summary)
                self._settings = None
            super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Settings are in config.yaml, and in the tab with the first scores."""

    @rank_zero_only
    def log_images(self, tag: str, image: Tensor, step: int = 0) -> None:
        """Writes one picture, uint8 (C, H, W)."""
        with _writing(self._run):
            self.experiment.add_image(tag, image, step)

    @rank_zero_only
    def save(self) -> None:
        """Flushes; settings are in config.yaml, not in a file of TensorBoard's."""
        with _writing(self._run):
            self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Closes the file, which has all that was logged; what failed before would fail again."""
        with suppress(OSError):
            super().finalize(status)
