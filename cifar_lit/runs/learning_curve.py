"""Learning curves: test accuracy over the number of training images, and what more images are expected to give.

The error is modelled as a power law with a floor, a + b·n^-c (C. Cortes et al., Learning Curves: Asymptotic Values and
Rate of Convergence, NIPS 1993). Four points do not determine three parameters, so no single fit is reported. All laws
on a grid are weighted by their likelihood, and quantiles over them give medians and 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from cifar_lit.runs.figures import FIRST, INK, as_svg, new_chart, own_style
from cifar_lit.runs.run_folder import read_metrics
from cifar_lit.stats import wilson_interval

FILE, PICTURE = "learning-curve.json", "learning-curve.png"
SHARES = (0.25, 0.5, 0.75, 1.0)
# Grid, with equal prior weights. Error at the largest number of images: within ± 5 standard deviations.
FLOORS = np.linspace(0, 1, 11)  # a, as a share of that error
EXPONENTS = np.linspace(0.05, 1.5, 16)  # c
# Standard deviation over seeds, as a share of the error: 0.01 … 0.06 for most recipes, 0.18 for one.
NOISES = np.array([0.01, 0.02, 0.04, 0.08, 0.16])
NORMAL = np.linspace(-3, 3, 13)  # standard deviations of one measurement

Range = tuple[float, float, float]  # median, and limits of the 95 % interval


class Point(NamedTuple):
    """A training: its images, the test images, and the test accuracy in total and of each class (None: no image)."""

    train: int
    test: int
    accuracy: float
    per_class: Mapping[str, float | None]


def read_points(runs: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the points of metrics.json files, by ascending images. Runs on other images than the last are left out."""

    def identity(metrics: Mapping[str, Any]) -> list[object]:
        return [metrics["test"]["fingerprint"], *(metrics["data"][name] for name in ("images", "labels"))]

    points = {}
    for metrics in runs:
        with suppress(KeyError, TypeError):  # a run without a test, or metrics.json of another version
            test, train = metrics["test"], int(metrics["data"]["train"])
            if identity(metrics) == identity(runs[-1]) and test["images"]:
                points[train] = Point(train, test["images"], test["accuracy"], dict(test["per_class"]))
    return [points[train] for train in sorted(points)]


class PowerLaws:
    """All power laws on the grid, weighted by the likelihood of the measured errors.

    A measured error is normal around the law, with the variance of a binomial fraction of the test images and that of
    the seed. The errors of one test set are treated as independent, which makes intervals wider rather than narrower.

    Args:
        sizes: numbers of training images, ascending, at least two.
        accuracies: test accuracy of each.
        tested: number of test images.
    """

    def __init__(self, sizes: Sequence[int], accuracies: Sequence[float], tested: int) -> None:
        errors = [1 - (accuracy * tested + 0.5) / (tested + 1) for accuracy in accuracies]  # within (0, 1)
        self._tested, self._largest = tested, sizes[-1]
        reach = 5 * (errors[-1] * (1 - errors[-1]) / tested + (NOISES.max() * errors[-1]) ** 2) ** 0.5
        ends = np.linspace(max(errors[-1] - reach, errors[-1] / 20), min(errors[-1] + reach, 0.999), 25)
        self._end, self._floor, self._exponent, self._noise = np.ix_(ends, FLOORS, EXPONENTS, NOISES)
        likelihood = np.zeros((len(ends), len(FLOORS), len(EXPONENTS), len(NOISES)))
        for size, error in zip(sizes, errors, strict=True):
            law = self._errors(size)
            variance = self._variance(law)
            likelihood -= (error - law) ** 2 / (2 * variance) + np.log(variance) / 2
        self._weights = np.exp(likelihood - likelihood.max())

    def _errors(self, images: float) -> np.ndarray:
        """Return the error of each law for a number of training images."""
        falling: np.ndarray = (1 - self._floor) * (images / self._largest) ** -self._exponent
        return np.clip(self._end * (self._floor + falling), 1e-6, 0.999)

    def _variance(self, errors: np.ndarray) -> np.ndarray:
        variance: np.ndarray = errors * (1 - errors) / self._tested + (self._noise * errors) ** 2
        return variance

    def _quantiles(self, values: np.ndarray, weights: np.ndarray) -> Range:
        values, weights = (each.ravel() for each in np.broadcast_arrays(values, weights))
        order = values.argsort()
        total = weights[order].cumsum()
        median, low, high = values[order[np.searchsorted(total, total[-1] * np.array([0.5, 0.025, 0.975]))]].tolist()
        return median, low, high

    def accuracy(self, images: float) -> Range:
        """Return the test accuracy expected of one training with so many images. The interval contains its noise."""
        errors = self._errors(images)
        measured = errors[..., None] + self._variance(errors)[..., None] ** 0.5 * NORMAL
        return self._quantiles(np.clip(1 - measured, 0, 1), self._weights[..., None] * np.exp(-(NORMAL**2) / 2))

    def gain(self, factor: float = 2.0) -> Range:
        """Return the gain in accuracy, without noise, by `factor` times the largest number of images."""
        gain = self._errors(self._largest) - self._errors(factor * self._largest)
        return self._quantiles(gain, self._weights)

    @property
    def floor(self) -> Range:
        """The error that more images do not remove, a."""
        return self._quantiles(self._end * self._floor, self._weights)

    @property
    def exponent(self) -> Range:
        """The exponent, c."""
        return self._quantiles(self._exponent, self._weights)


def laws_of(points: Sequence[Point]) -> PowerLaws:
    """Return the laws of the accuracy in total."""
    return PowerLaws([point.train for point in points], [point.accuracy for point in points], points[-1].test)


def gains_by_class(points: Sequence[Point], tested: Mapping[str, int]) -> dict[str, Range]:
    """Return the gain in accuracy of each class by twice the images. tested: test images by class."""
    gains = {}
    for name, count in tested.items():
        accuracies = [accuracy for point in points if (accuracy := point.per_class.get(name)) is not None]
        if count and len(accuracies) == len(points):
            gains[name] = PowerLaws([point.train for point in points], accuracies, count).gain()
    return gains


def siblings(run: Path, metrics: Mapping[str, Any]) -> list[Point]:
    """Return the points of the curve that ends with this run; empty if it belongs to none. metrics: of this run."""
    others = [path.parent for path in run.parent.glob("*/metrics.json") if path.parent != run]
    points = read_points([*map(read_metrics, others), metrics]) if (run.parent / FILE).is_file() else []
    return points if len(points) > 2 and points[-1].train == metrics["data"]["train"] else []


# ---- Charts.


def draw(axes: Any, points: Sequence[Point], laws: PowerLaws, colours: tuple[str, str]) -> None:
    """Draw the measured points and the expected accuracy up to twice the images."""
    sizes = np.geomspace(points[0].train, 2 * points[-1].train, 25)
    medians, lows, highs = zip(*map(laws.accuracy, sizes), strict=True)
    axes.fill_between(sizes, lows, highs, color=colours[0], alpha=0.15, linewidth=0, label="95 % of trainings")
    axes.plot(sizes, medians, color=colours[0], linewidth=1.6, label="expected")
    limits = [wilson_interval(round(point.accuracy * point.test), point.test) for point in points]
    x, y = [point.train for point in points], [point.accuracy for point in points]
    bars = [[accuracy - low, high - accuracy] for accuracy, (low, high) in zip(y, limits, strict=True)]
    axes.errorbar(x, y, np.transpose(bars), color=colours[1], fmt="o", markersize=4, linewidth=1, label="measured")
    axes.set_xlim(0, 2.05 * x[-1])
    axes.set_xlabel("training images")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))


@own_style
def svg_chart(points: Sequence[Point], laws: PowerLaws) -> str:
    """Return the curve as `<svg>`."""
    figure, axes = new_chart()
    draw(axes, points, laws, (FIRST, INK))
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right")
    return as_svg(figure, "learning-curve", "Test accuracy over the number of training images, up to twice as many")


@own_style
def save_png(points: Sequence[Point], laws: PowerLaws, file: Path) -> None:
    """Draw the curve into a PNG file."""
    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, points, laws, ("#0072B2", "#000000"))
    axes.set_ylabel("test accuracy")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file, format="png")
