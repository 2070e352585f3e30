"""Learning curves: test accuracy over the number of training images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator, PercentFormatter

from cifar_lit.runs.figures import FIRST, INK, RULE, as_svg, new_chart, own_style
from cifar_lit.runs.run_folder import read_metrics

FILE, PICTURE = "learning-curve.json", "learning-curve.png"


def read_points(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of metrics.json files, by ascending images. Runs on other images than the last are left out."""
    points = {}
    for metrics in runs:
        with suppress(KeyError, TypeError, ValueError):  # without a test, of another version, or damaged
            test, images = metrics["test"], int(metrics["data"]["train"])
            if _identity(metrics) != _identity(runs[-1]) or images <= 0 or test["images"] <= 0:
                continue
            low, high = map(float, test["interval"])
            per_class = {}
            for name, value in test["per_class"].items():
                if value is not None:
                    per_class[str(name)] = float(value)
            row = {"accuracy": test["accuracy"], "interval": [low, high], "per_class": per_class}
            points[images] = {"images": images, "tested": test["images"], **row}
    return [points[images] for images in sorted(points)]


def _identity(metrics: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what two trainings of a curve have in common: the test images, all images and their labels."""
    return metrics["test"]["fingerprint"], metrics["data"]["images"], metrics["data"]["labels"]


def curve_of(run: Path, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the points of the learning curve that ends with this run; empty if there is none."""
    if not (run.parent / FILE).is_file():
        return []
    others = [path.parent for path in run.parent.glob("*/metrics.json") if path.parent != run]
    points = read_points([*map(read_metrics, others), metrics])
    is_last = points and points[-1]["images"] == metrics["data"]["train"]  # two shares of few groups may be equal
    if len(others) < 3 or not is_last:
        return []
    return points


@own_style
def draw(points: Sequence[Mapping[str, Any]], png: Path | None = None) -> str:
    """Return the measured points with their intervals as `<svg>`, or write them to a PNG file."""
    first, ink, rule = FIRST, INK, RULE
    if png:
        first, ink, rule = "#0072B2", "#000000", "#e6e6e6"
    figure, axes = new_chart(ink, rule)
    sizes = [point["images"] for point in points]
    for point in points:
        axes.plot([point["images"]] * 2, point["interval"], color=ink, linewidth=1)
    axes.plot(sizes, [point["accuracy"] for point in points], color=first, marker="o", markersize=4, linewidth=1.6)
    axes.set(xlim=(0, 1.03 * sizes[-1]), xlabel="training images")
    axes.set_title("test accuracy, with 95 % intervals", loc="left", fontsize=9, color=ink)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    if png:
        figure.savefig(png, format="png", dpi=200, facecolor="white")
        return ""
    return as_svg(figure, "learning-curve", "Test accuracy over training images")
