"""Where curves go: `metrics.csv` and TensorBoard, both straight in the run folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import RunFolder

# The first columns of metrics.csv, which every run has; whatever else is logged gets a column behind them.
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
        self._columns: list[str] = []  # of the file, none until there is something to write

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
        """Appends a row; a value of a new name makes a column of its own."""
        path = self._run.path / "metrics.csv"
        row = {**metrics, "step": step}
        if not row.keys() <= set(self._columns):
            rows = _whole_rows(path) if self._columns else self._resumed_rows(path)
            earlier = [name for kept in rows for name in kept]
            self._columns = list(dict.fromkeys([*COLUMNS, *self._columns, *earlier, *row]))
            header = dict(zip(self._columns, self._columns, strict=True))
            write_text(path, self._as_text([header, *rows]))  # whole: a kill in the middle would take the earlier curves with it
        with path.open("a", newline="", encoding="utf-8") as file:
            file.write(self._as_text([row]))

    def _as_text(self, rows: Iterable[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue()

    def _resumed_rows(self, path: Path) -> list[dict[str, str]]:
        """The rows up to the resumed step, without those of a test, which is made again."""
        if self._resumed_step is None:
            return []
        rows = [row for row in _whole_rows(path) if not any(name.startswith("test/") for name in row)]
        return [row for row in rows if int(row.get("step", 0)) <= self._resumed_step]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Settings are in config.yaml."""


def _whole_rows(path: Path) -> list[dict[str, str]]:
    """The values of each row of a metrics.csv by column, without a row that a kill or a full disk cut short."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader([line for line in file if line.endswith("\n")])
        return [{name: value for name, value in row.items() if name and value} for row in rows]


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
        if scores and self._settings is not None:
            self._declare_hparams(self._settings, scores)
            self._settings = None
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)

    def _declare_hparams(self, settings: dict[str, Any], scores: list[str]) -> None:
        """Tells the tab the settings, and the scalars that it is to show beside them: before the first of them is written."""
        names = [f"{part}/{score}" for part in ("test", "val") for score in scores]
        for summary in hparams(settings, dict.fromkeys(names, 0)):
            self.experiment._get_file_writer().add_summary(summary)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing yet: see `_declare_hparams`; settings are in config.yaml, too."""

    @rank_zero_only
    def log_images(self, tag: str, image: Tensor, step: int = 0) -> None:
        """Writes one picture, uint8 (C, H, W)."""
        self.experiment.add_image(tag, image, step)

    @rank_zero_only
    def save(self) -> None:
        """Flushes; settings are in config.yaml, not in a file of TensorBoard's."""
        self.experiment.flush()
