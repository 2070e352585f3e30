"""Learning curves: test accuracy over the number of training images, and what more images are expected to give.

The error is modelled as a power law with a floor, a + b·n^-c (C. Cortes et al., Learning Curves: Asymptotic Values and
Rate of Convergence, NIPS 1993). Four points do not determine three parameters, so there is no best fit. All laws of a
grid are weighted by the likelihood of the measured errors, and each result is a median with a 95 % interval over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from cifar_lit.runs.figures import FIRST, INK, RULE, as_svg, new_chart, own_style
from cifar_lit.runs.run_folder import read_metrics

FILE, PICTURE = "learning-curve.json", "learning-curve.png"
FLOORS = np.linspace(0, 1, 11)  # a, as a share of the error with all images
EXPONENTS = np.linspace(0.05, 1.5, 16)  # c
# Standard deviation over seeds, as a share of the error, and of how many recipes (results/README.md).
NOISES, RECIPES = np.array([0.01, 0.02, 0.03, 0.06, 0.18]), np.array([1, 2, 3, 1, 1])
NORMAL = np.linspace(-3, 3, 13)  # standard deviations of one measurement

Range = list[float]  # median, and limits of the 95 % interval


def read_points(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of metrics.json files, by ascending images. Runs on other images than the last are left out."""

    def identity(metrics: Mapping[str, Any]) -> list[object]:
        return [metrics["test"]["fingerprint"], *(metrics["data"][name] for name in ("images", "labels"))]

    points = {}
    for metrics in runs:
        with suppress(KeyError, TypeError, ValueError):  # without a test, of another version, or damaged
            test, images = metrics["test"], int(metrics["data"]["train"])
            per_class = {str(name): float(value) for name, value in test["per_class"].items() if value is not None}
            if identity(metrics) == identity(runs[-1]) and images > 0 and test["images"] > 0:
                low, high = map(float, test["interval"])
                row = {"accuracy": test["accuracy"], "interval": [low, high], "per_class": per_class}
                points[images] = {"images": images, "tested": test["images"], **row}
    return [points[images] for images in sorted(points)]


def curve_of(run: Path, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the points of the learning curve that ends with this run; empty if there is none."""
    others = [path.parent for path in run.parent.glob("*/metrics.json") if path.parent != run]
    points = read_points([*map(read_metrics, others), metrics]) if (run.parent / FILE).is_file() else []
    # The last of four trainings. Two shares of few groups may have the same images.
    return points if len(others) > 2 and points and points[-1]["images"] == metrics["data"]["train"] else []


def fit_law(
    sizes: Sequence[int], accuracies: Sequence[float], tested: int, targets: Sequence[float] = ()
) -> dict[str, Any]:
    """Fit a power law to the accuracies on one test set.

    A measured error is normal around the law, with the variances of a binomial fraction and of the seed. The errors are
    treated as independent, which makes intervals wider rather than narrower. All laws are equally likely beforehand,
    and the noise of the seed is that of a recipe of this package.

    Args:
        sizes: numbers of training images, ascending.
        accuracies: test accuracy of each.
        tested: number of test images.
        targets: numbers of training images.

    Returns:
        `a` and `c`; `gain`, the increase of accuracy by twice the images, without noise; and `accuracy`, a list with
        the accuracy expected for each target, whose interval contains the noise of one training.
    """
    errors = [1 - (min(max(accuracy, 0), 1) * tested + 0.5) / (tested + 1) for accuracy in accuracies]  # in (0, 1)
    reach = 5 * (errors[-1] * (1 - errors[-1]) / tested + (NOISES[-1] * errors[-1]) ** 2) ** 0.5
    ends = np.linspace(max(errors[-1] - reach, errors[-1] / 20), min(errors[-1] + reach, 0.999), 25)
    end, floor, exponent, noise = np.ix_(ends, FLOORS, EXPONENTS, NOISES)

    def law(images: float) -> np.ndarray:
        """Return the error of each law."""
        return np.clip(end * (floor + (1 - floor) * (images / sizes[-1]) ** -exponent), 1e-6, 0.999)

    def variance(error: np.ndarray) -> np.ndarray:
        return np.asarray(error * (1 - error) / tested + (noise * error) ** 2)

    def quantiles(values: np.ndarray, weights: np.ndarray) -> Range:
        values, weights = (each.ravel() for each in np.broadcast_arrays(values, weights))
        order = values.argsort()
        total = weights[order].cumsum()
        places = np.searchsorted(total, total[-1] * np.array([0.5, 0.025, 0.975]))
        return [round(value, 6) for value in values[order[places]].tolist()]

    def expected(images: float) -> Range:
        error = law(images)
        measured = 1 - error[..., None] - variance(error)[..., None] ** 0.5 * NORMAL
        return quantiles(measured.clip(0, 1), weights[..., None] * np.exp(-(NORMAL**2) / 2))

    fits = [(error - law(size)) ** 2 / variance(law(size)) for size, error in zip(sizes, errors, strict=True)]
    likelihood = -sum(fit + np.log(variance(law(size))) for size, fit in zip(sizes, fits, strict=True)) / 2
    weights = np.exp(likelihood - likelihood.max()) * RECIPES
    gain = quantiles(law(sizes[-1]) - law(2 * sizes[-1]), weights)
    ranges = {"a": quantiles(end * floor, weights), "c": quantiles(exponent, weights), "gain": gain}
    return {**ranges, "accuracy": list(map(expected, targets))}


def overall(points: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> dict[str, Any]:
    """Return `fit_law` of the accuracy over all classes."""
    return fit_law(
        [point["images"] for point in points], [point["accuracy"] for point in points], points[-1]["tested"], targets
    )


@own_style
def draw(points: Sequence[Mapping[str, Any]], png: Path | None = None) -> str:
    """Return the measured points and the expected accuracy as `<svg>`, or write them to a PNG file."""
    first, ink, rule = ("#0072B2", "#000000", "#e6e6e6") if png else (FIRST, INK, RULE)
    figure, axes = new_chart(ink, rule)
    sizes = np.geomspace(points[0]["images"], 2 * points[-1]["images"], 12).tolist()
    medians, lows, highs = zip(*overall(points, sizes)["accuracy"], strict=True)
    axes.fill_between(sizes, lows, highs, color=first, alpha=0.15, linewidth=0, label="95 % of trainings")
    axes.plot(sizes, medians, color=first, linewidth=1.6, label="expected")
    for point in points:
        axes.plot([point["images"]] * 2, point["interval"], color=ink, linewidth=1)
    measured = [(point["images"], point["accuracy"]) for point in points]
    axes.plot(*zip(*measured, strict=True), color=ink, marker="o", markersize=4, linestyle="none", label="measured")
    axes.set(xlim=(0, 1.03 * sizes[-1]), xlabel="training images")
    axes.set_title("test accuracy", loc="left", fontsize=9, color=ink)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, labelcolor=ink, fontsize=9, loc="lower right")
    if png:
        figure.savefig(png, format="png", dpi=200, facecolor="white")
        return ""
    return as_svg(figure, "learning-curve", "Test accuracy over training images, up to twice as many")
