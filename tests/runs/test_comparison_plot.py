"""The picture of several runs' curves."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import made_run
from PIL import Image

from cifar_lit.runs.compare import RunRecord, read_run
from cifar_lit.runs.compare_plot import curve, plot_curves, seconds_per_epoch


def test_a_curve_is_over_epochs_that_have_ended(tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "small-1"))
    assert curve(run, "val/accuracy") == ([1.0, 2.0], [0.45, 0.5])
    assert seconds_per_epoch(run) == 5.0
    assert seconds_per_epoch(RunRecord(tmp_path, "none")) is None


def test_ten_runs_are_drawn_with_a_line_each_and_one_entry_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    saved = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kept: (drawn.append(self), saved(self, *args, **kept)))
    runs = [read_run(made_run(tmp_path / f"small-{number}")) for number in range(10)]
    plot_curves(runs, [run.path.name for run in runs], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
        assert image.width > 1000
    (figure,) = drawn
    assert [len(axes.get_lines()) for axes in figure.axes] == [10] * 4
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].get_lines()}
    assert len(styles) == 10
    assert figure.axes[0].get_ylabel() == "validation accuracy, %"
    plot_curves(runs, ["one"] * 5 + ["other"] * 5, tmp_path / "b.png")
    (legend,) = drawn[1].legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "other"]


def test_without_times_and_validation_there_is_one_column_of_training_curves(tmp_path: Path) -> None:
    whole = read_run(made_run(tmp_path / "small-1"))
    rows = [{**row, "val/accuracy": None} for row in whole.curves]
    plot_curves([RunRecord(tmp_path, "a", curves=rows)], ["a"], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width < 1000
    with pytest.raises(ValueError, match="none of these runs has a curve"):
        plot_curves([RunRecord(tmp_path, "a")], ["a"], tmp_path / "b.png")
