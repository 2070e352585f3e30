"""Where curves go: `metrics.csv` and TensorBoard, both straight in the run folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from cifar_lit.runs.run_folder import RunFolder, write_text

COLUMNS = (
    "epoch", "step", "lr", "weight_norm", "train/loss", "train/accuracy", "val/loss", "val/accuracy",
    "test/loss", "test/accuracy",
)  # fmt: skip


class CurveFile(Logger):
    """`metrics.csv`: one row for each moment of logging, empty where a value was not taken.

    Lightning's CSVLogger deletes the earlier curves when a run is resumed; here rows up to the resumed step stay.
    """

    def __init__(self, run: RunFolder, resumed_step: int | None = None) -> None:
        super().__init__()
        self._run, self._resumed_step = run, resumed_step
        self._ready = False

    @property
    def name(self) -> str:
        """Of the recipe."""
        return self._run.name

    @property
    def version(self) -> str:
        """Unused: the run folder holds the number."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends a row."""
        path = self._run.path / "metrics.csv"
        if not self._ready:
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self._kept(path))
            write_text(path, text.getvalue())  # whole: a kill in the middle would take the earlier curves with it
            self._ready = True
        with path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, extrasaction="ignore").writerow({**metrics, "step": step})

    def _kept(self, path: Path) -> list[dict[str, str]]:
        """The rows up to the resumed step, without what a kill or a full disk cut short, and without a test's."""
        if self._resumed_step is None or not path.exists():
            return []
        with path.open(newline="") as file:
            whole = [line for line in file if line.endswith("\n")]
        rows = [row for row in csv.DictReader(whole) if not row.get("test/loss")]  # the test is made again
        return [row for row in rows if int(row["step"] or 0) <= self._resumed_step]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Settings are in config.yaml."""


class TensorBoardCurves(TensorBoardLogger):
    """TensorBoard's event file in the run folder, with a hparams tab that compares runs by their test accuracy.

    settings: what the tab shows of this run, plain values; None for what is not to be compared there.
    """

    def __init__(self, run: RunFolder, settings: dict[str, Any] | None, resumed_step: int | None = None) -> None:
        purge: dict[str, Any] = {} if resumed_step is None else {"purge_step": resumed_step + 1}
        super().__init__(run.logs, name="", version="", default_hp_metric=False, **purge)
        self._run, self._settings = run, settings
        self._told_settings = False

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self._run.path)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes scalars; the epoch is left out, as every curve has its own axis."""
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Declares the settings once, and the metrics whose scalars the tab is to show beside them."""
        if self._settings is None or self._told_settings or self._run.resumed:
            return
        self._told_settings = True
        metrics = dict.fromkeys(("test/accuracy", "test/loss", "val/accuracy", "val/loss"), 0)
        for summary in hparams(self._settings, metrics):
            self.experiment._get_file_writer().add_summary(summary)

    @rank_zero_only
    def log_images(self, tag: str, image: Tensor, step: int = 0) -> None:
        """Writes one picture, uint8 (C, H, W)."""
        self.experiment.add_image(tag, image, step)

    @rank_zero_only
    def save(self) -> None:
        """Flushes; settings are in config.yaml, not in a file of TensorBoard's."""
        self.experiment.flush()
