"""Write the measured figures of the pages and of the recipe headers from the JSON files in `results/`.

    python scripts/benchmarks/table.py             # print all results as Markdown
    python scripts/benchmarks/table.py --write     # update the pages and the recipe headers
    python scripts/benchmarks/table.py --check     # fail if --write would change anything

A page holds figures in generated blocks, from `<!-- results: KEY -->` to `<!-- /results -->`. KEY is a key of `TABLES`,
or `recipes`: the table of all recipes with intervals. A recipe header names its JSON file in the line `# File:`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from script import run_script

from cifar_lit.bench.commands import BENCHES
from cifar_lit.bench.recipe import LEGEND, mean_text, texts_of
from cifar_lit.bench.report import machine_text, spread_text
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import display_path

WHAT = "print measured results as Markdown, or write them into the pages and the recipe headers of a checkout"
UNMEASURED = "not measured yet"
PAGES = ("README*.md", "docs/**/*.md", "results/*.md")
RECIPES = "cifar_lit/recipes/*.yaml"
BLOCK = re.compile(
    r"(?P<start><!-- results: (?P<key>[\w-]+) -->\n).*?(?P<end>^<!-- /results -->)", re.DOTALL | re.MULTILINE
)
# In "(n = 20; 91.61 … 91.74)" the interval of a mean, in "(270.9 … 299.8, n = 5)" the quartiles of a median.
INTERVAL = re.compile(r"\((?:[\d.,]+ … [\d.,]+, )?(n = \d+)(?:; [\d.]+ … [\d.]+)?\)")
MARKDOWN_WIDTH = 100
RUN_COLUMNS = {  # label in the JSON file: heading
    "test accuracy": "test accuracy",
    "with views": "with TTA",
    "training": "training time",
    "start to end": "start to result",
    "peak memory": "peak memory",
}
OTHER_COLUMNS = ("measurement", "machine", "what", "result", "file")
Row = Sequence[str]


# ---- tables of the pages


class Figure(NamedTuple):
    """A measured figure: the JSON file in `results/`, without its ending, and the figure's label in it."""

    file: str
    label: str


Cell = str | Figure | Sequence[str | Figure]  # a sequence is joined


class Table(NamedTuple):
    """A table of measured figures with its source."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    source: str = "Measured on {machines}; {dates}. Source: {link}."


def accuracy(recipe: str, file: str = "") -> Figure:
    """Return the test accuracy of a recipe."""
    return Figure(file or f"cpu/recipe-{recipe}", f"{recipe}: test accuracy")


def views(recipe: str, file: str = "") -> Figure:
    """Return the test accuracy of a recipe with test-time augmentation."""
    return Figure(file or f"cpu/recipe-{recipe}", f"{recipe}: with views")


def training(recipe: str, file: str = "") -> Figure:
    """Return the training time of a recipe."""
    return Figure(file or f"cpu/recipe-{recipe}", f"{recipe}: training")


def variant(label: str, file: str, separator: str = ", ") -> tuple[Figure, Figure]:
    """Return the accuracy of a changed recipe on held-out images, without and with test-time augmentation."""
    return Figure(f"cpu/{file}", label), Figure(f"cpu/{file}", f"{label}{separator}mirrored views")


README_RECIPES = {  # name: description in English and in Chinese
    "quickstart": ("small CNN on drawn shapes", "小型 CNN,程序绘制的图形"),
    "laptop": ("whitened CNN with Muon, for CPUs", "白化 CNN 与 Muon,面向 CPU"),
    "laptop90": ("the same, shorter training", "同上,训练更短"),
    "laptop100": ("CIFAR-100, for CPUs", "CIFAR-100,面向 CPU"),
    "fast94": ("wider, for a GPU (measured on a CPU)", "更宽,面向 GPU(此处在 CPU 上测得)"),
    "tudui": ("CNN of a tutorial, 10 epochs", "某教程的 CNN,10 个 epoch"),
    "lenet": ("LeNet of the PyTorch tutorial, 2 epochs", "PyTorch 教程的 LeNet,2 个 epoch"),
}
FLOAT32 = {"laptop": training("laptop", "cpu/recipe-laptop-float32")}  # on a CPU without bfloat16
GPU_AIMS = {"fast94": "94 %", "fast95": "95 %", "fast96": "96 %", "fast100": "75 %", "resnet18": "95 %"}
AUGMENTATIONS = {
    "`scale`": "crop",
    "`scale`, `rotation`, `perspective`": "crop, rotation, perspective",
    "brightness, contrast, saturation, hue": "all four colours",
    "`blur`": "blur",
    "`policy: trivial`": "trivial",
    "`policy: randaugment`": "randaugment",
}
STEPS = {
    "`laptop`, batch 500": "cpu/bench-step-laptop",
    "`quickstart`, batch 128": "cpu/bench-step-quickstart",
    "`tudui`, batch 64": "cpu/bench-step-tudui",
    "`lenet`, batch 4": "cpu/bench-step-lenet",
    "one linear layer, batch 64": "cpu/bench-step",
}
IMBALANCE = {
    "no correction": "as it is",
    "`--model.class_weights balanced`": "class weights balanced",
    "`--model.class_weights effective`": "class weights effective",
    "`--data.sampling balanced`": "sampling balanced",
}
FOLDS, PHOTOS = "cpu/finetune-ants-bees-folds", "cpu/finetune-ants-bees"
KILLS = (
    "one process",
    "one process, images from workers",
    "two processes",
)

TABLES: dict[str, Table] = {
    "readme": Table(
        ("recipe", "trains", "test accuracy", "time, CPU with bfloat16", "time, CPU without"),
        [
            *(
                (f"`{name}`", english, accuracy(name), training(name), FLOAT32.get(name, "–"))
                for name, (english, _) in README_RECIPES.items()
            ),
            ("`fast95`, `fast96`, `fast100`, `resnet18`", "for a GPU", UNMEASURED, "–", "–"),
        ],
    ),
    "readme-zh": Table(
        ("配方", "训练内容", "测试准确率", "时间,CPU 带 bfloat16", "时间,CPU 不带"),
        [
            *(
                (f"`{name}`", chinese, accuracy(name), training(name), FLOAT32.get(name, "–"))
                for name, (_, chinese) in README_RECIPES.items()
            ),
            ("`fast95`, `fast96`, `fast100`, `resnet18`", "面向 GPU", "尚未测量", "–", "–"),
        ],
        "测量环境见 {link}。",
    ),
    "gpu": Table(
        ("recipe", "aim", "test accuracy", "with TTA", "training time"),
        [
            (f"`{name}`", aim, *(figure(name, f"gpu/{name}") for figure in (accuracy, views, training)))
            for name, aim in GPU_AIMS.items()
        ],
    ),
    "tutorials": Table(
        ("recipe", "test accuracy", "training time"),
        [(f"`{name}`", accuracy(name), training(name)) for name in ("tudui", "lenet", "laptop")],
    ),
    "tutorial-speed": Table(
        ("epochs of `tudui`, validation included", "speed"),
        [
            ("cifar-lit, bfloat16", Figure("cpu/bench-tutorial", "ours")),
            ("the loop of the tutorial, float32", Figure("cpu/bench-tutorial", "the tutorial's loop, float32")),
            ("ratio", Figure("cpu/bench-tutorial", "ours / the tutorial's loop, float32")),
        ],
    ),
    "step": Table(
        ("training step, float32", "cifar-lit", "plain PyTorch loop", "speed, relative"),
        [
            (
                what,
                Figure(file, "ours, a step"),
                Figure(file, "bare loop, a step"),
                Figure(file, "ours / bare loop"),
            )
            for what, file in STEPS.items()
        ],
    ),
    "input": Table(
        ("input pipeline, CIFAR-10, batch 500", "speed"),
        [
            ("cifar-lit", Figure("cpu/bench-input", "ours")),
            ("torchvision v2 on whole batches", Figure("cpu/bench-input", "v2 on whole batches")),
            ("torchvision v2 on tensors, 2 workers", Figure("cpu/bench-input", "v2 on tensors, 2 workers")),
            ("torchvision on PIL images, 2 workers", Figure("cpu/bench-input", "PIL, 2 workers")),
        ],
    ),
    "scaling": Table(
        ("`quickstart` on two CPU cores", "training time"),
        [
            ("one process", Figure("cpu/bench-scaling", "1 device")),
            ("two processes", Figure("cpu/bench-scaling", "2 devices")),
        ],
    ),
    "augment": Table(
        ("operation", "32 px", "× torchvision", "224 px", "× torchvision"),
        [
            (
                what,
                *(
                    Figure("cpu/bench-augment", f"{operation}, {side} px: {figure}")
                    for side in (32, 224)
                    for figure in ("ours", "ours / torchvision")
                ),
            )
            for what, operation in AUGMENTATIONS.items()
        ],
    ),
    "memory": Table(
        ("data set", "decoded size", "memory limit", "decoding", "training", "relative to training from memory"),
        [
            (
                what,
                *(
                    Figure(file, label)
                    for label in (
                        "decoded images",
                        "limit for all processes, with the pages of files",
                        "decoding within the limit",
                        "training within the limit",
                        "within the limit / in memory",
                    )
                ),
            )
            for what, file in (
                ("images of 128 px, 10 × the memory limit", "cpu/bigger-than-memory"),
                ("a million thumbnails of 64 px, 6 × the limit", "cpu/million-thumbnails"),
            )
        ],
    ),
    "finetune": Table(
        ("photos", "training", "test accuracy", "start to result"),
        [
            ("ants and bees", "`finetune`", Figure(PHOTOS, "ours"), Figure(PHOTOS, "ours, all")),
            (
                "ants and bees",
                "the loop of the PyTorch tutorial",
                Figure(PHOTOS, "hand-written loop"),
                Figure(PHOTOS, "hand-written loop, all"),
            ),
            (
                "ants and bees, 5-fold cross-validation",
                "`finetune --folds 5`",
                (
                    Figure(FOLDS, "all images"),
                    ", 95 % interval ",
                    Figure(FOLDS, "all images, interval from"),
                    " … ",
                    Figure(FOLDS, "all images, interval to"),
                ),
                (Figure(FOLDS, "a training, all"), ", each fold"),
            ),
            (
                "flowers, 5 classes, 128 px",
                "`finetune`",
                accuracy("finetune"),
                Figure("cpu/recipe-finetune", "finetune: start to end"),
            ),
            (
                "flowers, 5 classes, 32 px",
                "`folder`, from scratch",
                accuracy("folder"),
                Figure("cpu/recipe-folder", "folder: start to end"),
            ),
        ],
    ),
    "few-labels": Table(
        ("CIFAR-10", "`finetune`", "its last layer alone", "`folder`, from scratch"),
        [
            (
                f"{images} labelled images",
                *(
                    Figure("cpu/few-labels", f"{images} images, {how}")
                    for how in ("fine-tuned", "last layer", "from scratch")
                ),
            )
            for images in ("100", "1,000")
        ],
    ),
    "imbalance": Table(
        ("CIFAR-10, classes of 50 to 5,000 images", "balanced accuracy", "macro F1"),
        [
            (what, *(Figure("cpu/imbalance", f"{label}: {figure}") for figure in ("balanced accuracy", "macro F1")))
            for what, label in IMBALANCE.items()
        ],
    ),
    "calibration": Table(
        ("`laptop`, `--data.val_size 0.1`", "calibration error"),
        [
            ("without temperature", Figure("cpu/scores", "calibration error without temperature")),
            ("with temperature", Figure("cpu/scores", "calibration error with temperature")),
        ],
    ),
    "use": Table(
        ("operation", "speed", "time", "memory"),
        [
            *(
                (
                    f"`classify`, {files}",
                    Figure("cpu/bench-classify", f"{files}: classify"),
                    (Figure("cpu/bench-classify", f"{files}: from start to end"), " in all"),
                    Figure("cpu/bench-classify", f"{files}: peak memory"),
                )
                for files in ("10,000 files of 32×32", "153 files of 320×240")
            ),
            ("`serve`, start", "–", Figure("cpu/bench-serve", "start"), Figure("cpu/bench-serve", "memory")),
            *(
                (
                    f"`serve`, {clients}",
                    Figure("cpu/bench-serve", label),
                    (Figure("cpu/bench-serve", f"{label}, p50"), " median latency"),
                    "–",
                )
                for clients, label in (("1 client", "1 at a time"), ("32 clients", "32 at a time"))
            ),
            ("`train`, imports", "–", Figure("cpu/bench-cold", "imports alone"), "–"),
            ("`train --recipe quickstart`, whole run", "–", Figure("cpu/bench-cold", "all"), "–"),
        ],
    ),
    "lost-ranks": Table(
        ("stress test: a rank is killed, frozen or cut off (`--rank-timeout 15`)", "result"),
        [
            (what, Figure("cpu/stress-lost_ranks", label))
            for what, label in (
                ("longest time until all processes had ended", "slowest end of a run that lost a rank"),
                ("processes left running", "processes left behind"),
                ("resumed runs with bit-identical weights", "runs gone on with, identical to the last bit"),
            )
        ],
    ),
    "kills": Table(
        ("stress test: a run is killed at random times and resumed", "runs with bit-identical weights"),
        [
            *((what, Figure("cpu/stress-kill", f"{what}: identical to the last bit")) for what in KILLS),
            *(
                (what, Figure("cpu/stress-kill_recipes", f"{label}: identical to the last bit"))
                for what, label in (
                    ("`laptop`, bfloat16", "laptop (growing images, mirrored views), bfloat16"),
                    ("`laptop`, bfloat16, two processes", "laptop, bfloat16, two processes"),
                    ("`fast94`, float32", "fast94 (all views), float32"),
                )
            ),
        ],
    ),
    "peers": Table(
        ("training", "test accuracy", "training time"),
        [
            (what, Figure("cpu/peers", label), Figure("cpu/peers", f"{label}, training"))
            for what, label in (
                ("`laptop`", "laptop"),
                ("the loop of the tutorial, `tudui`", "tutorial"),
                ("timm's ResNet-18, AdamW", "timm"),
                ("plain PyTorch ResNet-18, 3×3 stem", "ResNet-18"),
            )
        ],
    ),
    "airbench": Table(
        ("training", "test accuracy", "with TTA", "training time"),
        [
            (
                "`airbench94_muon.py`, half precision as bfloat16",
                *(Figure("cpu/airbench", label) for label in ("accuracy", "accuracy with views", "training")),
            ),
            ("`fast94`", accuracy("fast94"), views("fast94"), training("fast94")),
        ],
    ),
    "limit": Table(
        ("two CPU cores with bfloat16", "result"),
        [
            ("matrix product", Figure("cpu/budget", "matrix product, bfloat16")),
            ("computation of a `laptop` training", Figure("cpu/budget", "laptop, a training")),
            ("computation of a `fast94` training", Figure("cpu/budget", "fast94, a training")),
            ("tutorial loop, one epoch with test", Figure("cpu/budget", "the tutorial's loop, an epoch with its test")),
            ("`laptop`, training time", training("laptop")),
            ("`laptop`, test accuracy", accuracy("laptop")),
            ("`laptop90`, training time", training("laptop90")),
            ("`laptop90`, test accuracy", accuracy("laptop90")),
            ("`fast94`, training time", training("fast94")),
            ("`fast94`, test accuracy with TTA", views("fast94")),
        ],
    ),
    "variants": Table(
        ("net or training", "held-out accuracy", "with TTA"),
        [
            (what, *variant(label, "variants", ": "))
            for what, label in (
                ("`laptop`: widths 48/192/192", "48/192/192, 3×3 everywhere"),
                ("SiLU", "the same with SiLU"),
                ("2×2 kernels before pooling in groups 2 and 3", "2×2 first in groups 2 and 3"),
                ("2×2, widths 64/256/256", "the same, 64/256/256"),
                ("2×2, widths 48/192 and 256 → 512", "the same, 48/192 and 256 → 512"),
                ("2×2 in all groups, 64/256/256", "2×2 first in all groups, 64/256/256"),
                ("2×2, 24 → 32 px", "2×2, 24 → 32 px"),
                ("2×2, 16 → 24 → 28 → 32 px", "2×2, 16 → 24 → 28 → 32 px"),
                ("2×2, batches of 1,000, lr 0.24", "2×2, batches of 1,000 at 0.24"),
                ("2×2, `skip_easy` 0.3 from 0.4", "2×2, without the 30 % of least loss from 0.4 on"),
                ("2×2, 925 processor seconds", "2×2 first in groups 2 and 3, for 925 s"),
                ("2×2, widths 64/256/256, 925 processor seconds", "the same, 64/256/256, for 925 s"),
            )
        ],
    ),
    "variants-tested": Table(
        ("trained on all 50,000 images", "test accuracy", "with TTA"),
        [
            (what, *variant(label, "variants", ": "))
            for what, label in (
                ("`laptop`: 3×3 everywhere", "3×3 everywhere, all 50,000 images, tested"),
                ("2×2 before pooling", "2×2 first, all 50,000 images, tested"),
                (
                    "2×2 before pooling, 13 epochs",
                    "2×2 first, the Trainer, 13 epochs in 400.7 s of two threads, tested",
                ),
            )
        ],
    ),
    "skip-easy": Table(
        ("short training", "held-out accuracy", "with TTA"),
        [
            (what, *variant(label, file))
            for what, file, label in (
                ("`laptop`", "variants-short", "laptop"),
                ("2×2 kernels before pooling", "variants-short", "2×2 first"),
                ("`skip_easy` 0.3, from 0.4 of the time", "variants-short", "without the 30 % of least loss"),
                (
                    "`skip_easy` 0.5, from 0.6 of the time",
                    "variants-skip-best",
                    "without the 50 % of least loss, from 60 % of the time on",
                ),
                (
                    "`skip_easy` 0.5, from 0.2; widths 32/192/256, lr 0.16",
                    "variants-skip-best",
                    "32/192/256, lr 0.16, without the 50 % of least loss, from 20 % on",
                ),
            )
        ],
    ),
    "skip-easy-scan": Table(
        ("`skip_easy`, further changes", "held-out accuracy", "with TTA"),
        [
            (what, *variant(label, "variants-skip"))
            for what, label in (
                ("0.3 from 0.4", "skip 30 from 0.4"),
                ("0.3 from 0.2", "skip 30 from 0.2"),
                ("0.5 from 0.4", "skip 50 from 0.4"),
                ("0.5 from 0.6", "skip 50 from 0.6"),
                ("0.3 from 0.4, 20 → 24 → 28 px", "skip, 20 24 28"),
                ("0.3 from 0.4, 20 px for longer", "skip, 20 long"),
                ("0.3 from 0.4, batch 250", "skip, batch 250"),
                ("0.3 from 0.4, widths 32/192/256", "skip, 32/192/256"),
                ("0.3 from 0.4, label smoothing 0.1", "skip, smoothing 0.1"),
                ("0.3 from 0.4, lr 0.28", "skip, lr 0.28"),
                ("0.3 from 0.4, lr 0.15", "skip, lr 0.15"),
                ("0.3 from 0.4, SiLU", "skip, SiLU"),
                ("32/192/256, 0.5 from 0.4", "32/192/256, skip 50 from 0.4"),
                ("32/192/256, 0.6 from 0.5", "32/192/256, skip 60 from 0.5"),
                ("24/192/320, 0.5 from 0.4", "24/192/320, skip 50 from 0.4"),
                ("32/160/320, 0.5 from 0.4", "32/160/320, skip 50 from 0.4"),
                ("32/192/256, lr 0.16, 0.5 from 0.2", "32/192/256, lr 0.16, skip 50 from 0.2"),
                (
                    "32/192/256, lr 0.16, 20 → 24 → 28 px, 0.5 from 0.4",
                    "32/192/256, lr 0.16, 20 → 24 → 28 px, skip 50 from 0.4",
                ),
            )
        ],
    ),
    "skip-easy-whole": Table(
        ("as long as `laptop`", "held-out accuracy", "with TTA"),
        [
            (what, *variant(label, file))
            for what, file, label in (
                ("`laptop`", "variants-whole", "laptop"),
                ("`skip_easy` 0.3, from 0.4 of the time", "variants-whole", "without the 30 % of least loss"),
                (
                    "`skip_easy` 0.5, from 0.7 of the time",
                    "variants-whole-half",
                    "without the 50 % of least loss, from 70 % of the time on",
                ),
            )
        ],
    ),
    "shared-machine": Table(
        ("OpenMP wait policy", "one training", "two trainings at once"),
        [
            (what, *(Figure("cpu/shared-machine", f"{load}, {label}") for load in ("alone", "2 at once")))
            for what, label in (
                ("libgomp's default", "default"),
                ("`GOMP_SPINCOUNT=20000`", "GOMP_SPINCOUNT=20000"),
                ("cifar-lit", "ours"),
                ("`OMP_WAIT_POLICY=PASSIVE`", "OMP_WAIT_POLICY=PASSIVE"),
            )
        ],
    ),
    "novelty": Table(
        ("AUROC of `laptop` against CIFAR-10's test images", "CIFAR-100", "flowers"),
        [
            (what, *(Figure("cpu/scores", f"{outside}: {label}") for outside in ("CIFAR-100", "flowers")))
            for what, label in (
                ("energy (the score in use)", "energy"),
                ("entropy", "entropy"),
                ("largest probability", "largest probability"),
                ("distance to neighbours", "distance alone"),
                ("distance × perplexity (removed)", "novelty"),
            )
        ],
    ),
}


# ---- command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `[PATH …]`, `--write` and `--check`."""
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="JSON files or folders to print; all of results/ if none"
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--write", action="store_true", help="update the pages and the recipe headers")
    target.add_argument("--check", action="store_true", help="fail if a page or a recipe header is out of date")


def run(options: argparse.Namespace) -> None:
    """Print, write or check; raise Failure if a checked page differs from its JSON files."""
    if not (options.write or options.check):
        print(results_text(json_files(options.paths or ["results"]), Path.cwd()))
        return
    changed = {page: text for page, text in updated_pages(Path.cwd()).items() if text != page.read_text()}
    if options.check and changed:
        pages = ", ".join(map(display_path, changed))
        raise Failure(f"figures out of date in {pages}: run `python scripts/benchmarks/table.py --write`")
    for page, text in changed.items():
        write_text(page, text)
        print(f"{display_path(page)}: updated")


def updated_pages(root: Path) -> dict[Path, str]:
    """Return the text of each page and recipe of a checkout with current figures; raise UsageError for unknown keys."""
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    texts = {page: updated_page(page, root / "results") for page in pages}
    return texts | {recipe: updated_header(recipe.read_text(), root) for recipe in sorted(root.glob(RECIPES))}


def updated_page(page: Path, results: Path) -> str:
    """Return the text of a page with current blocks."""

    def block(match: re.Match[str]) -> str:
        return f"{match['start']}\n{_block(match['key'], results, page)}\n\n{match['end']}"

    return BLOCK.sub(block, page.read_text())


def _block(key: str, results: Path, page: Path) -> str:
    if key == "recipes":
        return results_text(json_files([str(results)]), page.parent, measurements=False)
    if key not in TABLES:
        raise UsageError(f"{display_path(page)}: no table is called {key!r}; use recipes, {', '.join(TABLES)}")
    return table_text(TABLES[key], results, page.parent)


def table_text(table: Table, results: Path, home: Path) -> str:
    """Return a table with its source as Markdown.

    Args:
        results: the folder of JSON files.
        home: the folder that links start from.
    """
    files: dict[str, dict[str, Any] | None] = {}

    def text(cell: Cell) -> str:
        if isinstance(cell, str):
            return cell
        if not isinstance(cell, Figure):
            return "".join(map(text, cell))
        path = results / f"{cell.file}.json"
        figures = files.setdefault(cell.file, read_figures(path) if path.exists() else None)
        if figures is None:
            return UNMEASURED
        texts = figure_texts(figures)
        if cell.label not in texts:
            raise UsageError(f"{display_path(path)} has no figure {cell.label!r}; it has {', '.join(texts)}")
        return short(texts[cell.label])

    rows = [[text(cell) for cell in row] for row in table.rows]
    source = _source(table.source, files, results, home)
    return "\n\n".join([markdown(table.columns, rows), *([source] if source else [])])


def _source(template: str, files: Mapping[str, Mapping[str, Any] | None], results: Path, home: Path) -> str:
    """Return machines, dates and one link: to the JSON file, or for several files to the index of `results/`."""
    where = [figures["environment"] for figures in files.values() if figures]
    if not where:
        return ""
    dates = sorted({one["date"] for one in where})
    target = results / (f"{next(iter(files))}.json" if len(files) == 1 else "README.md")
    return textwrap.fill(
        template.format(
            machines=" and ".join(sorted({machine_text(one) for one in where}, key=len, reverse=True)),
            dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
            link=f"[{target.name if len(files) == 1 else 'results/'}]({_link(target, home)})",
        ),
        MARKDOWN_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def updated_header(text: str, root: Path) -> str:
    """Return a recipe with current score, time, hardware and date, if its header names a JSON file."""
    file = re.search(r"^# File: +(\S+)$", text, re.MULTILINE)
    if not file:
        return text
    fields = dict.fromkeys(("Score", "Time", "Hardware", "Date"), UNMEASURED)
    if (root / file[1]).exists():
        name = re.findall(r"\w+", text)[0]
        fields = header_fields(name, read_figures(root / file[1]))
    for field, value in fields.items():
        text = re.sub(rf"^# {field}: .*$", f"# {field}:".ljust(12) + value, text, count=1, flags=re.MULTILINE)
    return text


# ---- from a JSON file to texts


def json_files(paths: Iterable[str]) -> list[Path]:
    """Return the JSON files among and below some paths, sorted; raise UsageError if there are none."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path} does not exist: give JSON files, or folders of them")
        files += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"no results in {' '.join(paths)}: measurements write them with --json")
    return files


def read_figures(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; raise UsageError if it is neither a measurement nor the metrics of a run."""
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError):
        raise UsageError(f"{display_path(file)} is not valid JSON") from None
    if not isinstance(figures, dict) or not ("bench" in figures or "test" in figures):
        raise UsageError(f"{display_path(file)} holds neither a measurement nor the metrics of a run")
    return figures


def short(text: str) -> str:
    """Return a figure without its interval or quartiles: `91.67 ± 0.14 % (n = 20)`."""
    return INTERVAL.sub(r"(\1)", text)


def figure_texts(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return all figures of a file by label. Labels of recipes begin with the name: `laptop: training`."""
    if figures.get("bench") == "recipe":
        entries = {name: texts_of(entry["runs"]) for name, entry in figures["recipes"].items()}
        return {f"{name}: {label}": text for name, texts in entries.items() for label, text in texts.items()}
    if "bench" in figures:
        units = figures["unit"]
        return {label: spread_text(value, units.get(label, "")) for label, value in figures["headline"].items()}
    return _run_texts(figures)


def _run_texts(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a run's metrics.json by label."""
    test, seconds = metrics["test"] or {}, metrics["train_seconds"]
    tta = test.get("tta")
    return {
        "test accuracy": mean_text([test["accuracy"]]) if test else "–",
        "with views": f"{mean_text([tta['accuracy']])}, {tta['views']}" if tta else "–",
        "training": f"{spread_text(seconds, 's')} (n = 1)" if seconds is not None else "–",
    }


def header_fields(name: str, figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a recipe header. `cifar-lit recipes` shows what stands before the semicolons."""
    if figures.get("bench") == "recipe":
        runs, where = figures["recipes"][name]["runs"], figures["environment"]
        texts, first = texts_of(runs), runs[0]
        machine, date = machine_text(where, first["accelerator"]), where["date"]
    else:
        texts, first = _run_texts(figures), figures
        machine, date = f"{figures['devices']} × {figures['accelerator']}", "not recorded"
    texts = {label: short(text) for label, text in texts.items()}
    score = f"{texts['test accuracy']}; {first['dataset']}"
    if texts["with views"] != "–":
        score += f", with TTA {texts['with views']}"
    time = texts["training"]
    if texts.get("start to end", "–") != "–":
        time += f"; {texts['start to end']} from process start to result"
    return {"Score": score, "Time": time, "Hardware": f"{machine}, {first['precision']}", "Date": date}


# ---- all results


def results_text(files: Sequence[Path], home: Path, measurements: bool = True) -> str:
    """Return a table of recipes with its legend, and a table of the other measurements, as Markdown.

    Args:
        files: JSON files of measurements or runs.
        home: the folder that links start from.
        measurements: whether to include the second table.
    """
    runs: list[Row] = []
    others: list[Row] = []
    for file in files:
        figures = read_figures(file)
        link = f"[{file.stem}]({_link(file.absolute(), home)})"
        if figures.get("bench") == "recipe":
            runs += [_recipe_row(name, entry, figures, link) for name, entry in figures["recipes"].items()]
        elif "bench" in figures:
            others += [[*row, link] for row in _measurement_rows(figures)]
        else:
            columns = [_run_texts(figures).get(label, "–") for label in RUN_COLUMNS]
            machine = f"{figures['devices']} × {figures['accelerator']}"
            runs.append([f"`{figures['recipe']}`", figures["dataset"], machine, *columns, link])
    parts: list[str] = []
    if runs:
        legend = [textwrap.fill(line, MARKDOWN_WIDTH, initial_indent="- ", subsequent_indent="  ") for line in LEGEND]
        parts += [markdown(("recipe", "images", "machine", *RUN_COLUMNS.values(), "file"), runs), "\n".join(legend)]
    if others and measurements:
        parts.append(markdown(OTHER_COLUMNS, others))
    return "\n\n".join(parts)


def markdown(columns: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table without its empty columns."""
    rows = list(rows)
    filled = [place for place in range(len(columns)) if any(row[place] not in ("", "–") for row in rows)]
    lines = [[columns[place] for place in filled], ["---"] * len(filled)]
    lines += [[row[place].replace("|", "\\|") for place in filled] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _link(target: Path, home: Path) -> str:
    return os.path.relpath(target, home).replace(os.sep, "/")


def _recipe_row(name: str, entry: Mapping[str, Any], figures: Mapping[str, Any], link: str) -> Row:
    first, texts = entry["runs"][0], texts_of(entry["runs"])
    machine = f"{machine_text(figures['environment'], first['accelerator'])}, {first['precision']}"
    title = f"`{name}`" + _overrides(figures["settings"]["flags"])
    return [title, first["dataset"], machine, *(texts[label] for label in RUN_COLUMNS), link]


def _overrides(flags: Sequence[str]) -> str:
    """Return the flags of a measurement, except those of the data set and the device, which have columns."""
    shown_elsewhere = ("--data.dataset", "--trainer.devices", "--trainer.accelerator")
    pairs = re.findall(r"--\S+(?: (?!--)\S+)?", " ".join(flags))
    changed = [flag for flag in pairs if re.split("[= ]", flag)[0] not in shown_elsewhere]
    return f" with `{' '.join(changed)}`" if changed else ""


def _measurement_rows(figures: Mapping[str, Any]) -> list[Row]:
    """Return one row per figure: measurement with its settings, machine, label, value."""
    machine = machine_text(figures["environment"], figures.get("accelerator"))
    settings = figures.get("settings", {})
    names = ("net", "recipe", "dataset", "batch_size", "precision")
    subject = " · ".join(f"{name} {settings[name]}" for name in names if settings.get(name))
    command = f"bench {figures['bench']}" if figures["bench"] in BENCHES else figures["bench"]
    name = f"`{command}`" + (f" ({subject.replace('_', ' ')})" if subject else "")
    units = figures["unit"]
    return [
        [name, machine, label, spread_text(value, units.get(label, ""))] for label, value in figures["headline"].items()
    ]


if __name__ == "__main__":
    raise SystemExit(run_script())
