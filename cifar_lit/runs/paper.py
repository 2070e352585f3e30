"""A LaTeX table row, answers to a reproducibility checklist and BibTeX, for runs that differ only in their seeds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import cifar_lit
from cifar_lit.errors import UsageError
from cifar_lit.runs.compare import SEED, data_differences, differing, find_runs, groups, read_run
from cifar_lit.runs.run_folder import display_path
from cifar_lit.text import listed, natural_key, printable

HARDWARE = ("devices", "accelerator", "threads", "precision")  # keys of metrics.json
_WORDS = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "'": "quotesingle"}
_ESCAPES = str.maketrans({each: f"\\{each}" for each in "&%$#_{}"})
_ESCAPES |= str.maketrans({each: f"\\text{word}{{}}" for each, word in _WORDS.items()})


def latex(value: object) -> object:
    """Return a text escaped for LaTeX, on one line. Numbers and `Markup` stay as they are."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value).translate(_ESCAPES).replace("--", "-{}-")  # two join to a dash
    return value


def filled(package: str, template: str, escape: Callable[[object], object], **values: object) -> str:
    """Return a template of a package with values, each of which passes through `escape`."""
    pages = Environment(
        loader=PackageLoader(package, "pages"), finalize=escape, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return pages.get_template(template).render(version=Markup(cifar_lit.__version__), **values)


def citations(dataset: object) -> Markup:
    """Return the BibTeX entries of this program and of a data set that it can download."""
    return Markup(filled("cifar_lit.runs", "citations.bib.j2", latex, dataset=dataset))


def paper(names: Sequence[str]) -> str:
    """Return the text for a paper about runs; `names` as in `find_runs`.

    Raise UsageError if a run has no test results or settings, or if runs differ in more than the seed.
    """
    runs = [read_run(path) for path in find_runs(names)]
    for run in runs:
        if not run.test or not run.settings:
            raise UsageError(f"{run.name}: {run.note}. A table needs runs with config.yaml and test results.")
    differences = [name for name in differing(runs) if name not in (SEED, "threads")]
    if data_differences(runs) or len({run.test.get("fingerprint") for run in runs}) > 1:
        differences.append("their data")
    if differences:
        remedy = "name runs that differ only in the seed; `cifar-lit compare` shows their groups"
        raise UsageError(f"there is no mean of runs that differ in {listed(differences)}: {remedy}")
    first, seeds = runs[0], sorted({str(run.seed) for run in runs}, key=natural_key)
    command = f"cifar-lit train --config {shlex.quote(display_path(first.path / 'config.yaml'))}"
    if len(seeds) > 1:
        command += f" --seeds {','.join(seeds)}"
    return filled(
        "cifar_lit.runs", "paper.tex.j2", latex,
        group=groups(runs)[0], first=first, metrics=first.metrics, data=first.metrics.get("data"), seeds=seeds,
        hardware=_distinct({name: run.metrics.get(name) for name in HARDWARE} for run in runs),
        versions=_distinct(run.metrics.get("versions") or {} for run in runs),
        notes=[f"{run.name}: {run.note}" for run in runs if run.note], command=command,
        citations=citations(first.metrics.get("dataset")),
    )  # fmt: skip


def _distinct(values: Iterable[Mapping[str, object]]) -> str:
    texts = [", ".join(f"{name} {value}" for name, value in each.items()) for each in values]
    return "; ".join(dict.fromkeys(texts))
