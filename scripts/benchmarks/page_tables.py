"""The tables of measured figures on the pages. `table.py --write` fills them in from the JSON files in `results/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

UNMEASURED = "not measured yet"
RUN_COLUMNS = ("test accuracy", "with TTA", "training time", "start to result", "peak memory")  # labels of figures


class Figure(NamedTuple):
    """A measured figure: the JSON file in `results/`, without its ending, and the figure's label in it."""

    file: str
    label: str


Cell = str | Figure | Sequence[str | Figure]  # the parts of a sequence are joined
Row = Sequence[Cell]


class Table(NamedTuple):
    """A table, followed by one line with its source."""

    columns: Sequence[str]
    rows: Sequence[Row]
    source: str = "Measured on {machines}; {dates}. Source: {link}."
    unmeasured: str = UNMEASURED  # figures whose file does not exist
    intervals: bool = False  # whether to show confidence intervals and quartiles


def recipe_figure(recipe: str, label: str, file: str = "") -> Figure:
    """Return a figure of a recipe, from `cpu/recipe-NAME` if no file is given."""
    return Figure(file or f"cpu/recipe-{recipe}", f"{recipe}: {label}")


def file_rows(file: str, labels: Mapping[str, str], *columns: str) -> list[Row]:
    """Return a row per entry of `labels`, all from one file.

    Args:
        file: name in `results/cpu`.
        labels: first cell of a row: label of its figures.
        columns: label of each column's figure, with {} for the label of the row.
    """
    return [
        (text, *(Figure(f"cpu/{file}", column.format(label)) for column in columns)) for text, label in labels.items()
    ]


def rows_of_files(files: Mapping[str, str], *labels: str) -> list[Row]:
    """Return a row per entry of `files`, with the figures of these labels."""
    return [(text, *(Figure(f"cpu/{file}", label) for label in labels)) for text, file in files.items()]


def figures_of_scores(label: str) -> list[Figure]:
    """Return a figure of both measurements with scores.py."""
    return [Figure(f"cpu/scores-{recipe}", label) for recipe in ("laptop90", "finetune")]


def full_row(text: str, images: str, recipe: str, file: str = "") -> Row:
    """Return all figures of a recipe."""
    return text, images, *(recipe_figure(recipe, label, file) for label in RUN_COLUMNS)


def run_row(text: str, images: str, file: str) -> Row:
    """Return the figures of a single run's metrics."""
    return text, images, Figure(file, "test accuracy"), "–", Figure(file, "training time"), "–", "–"


GPU_RECIPES = {  # with their aims
    "fast94": "94 % with TTA",
    "fast95": "95 % with TTA",
    "fast96": "96 % with TTA",
    "fast97": "97 % with TTA",
    "fast100": "75 %",
    "resnet18": "95 %",
    "resnet18_30": "94 %",
    "wrn28_10": "96 %",
}


def gpu_figure(recipe: str, label: str) -> Figure:
    """Return a figure of a recipe on a GPU, as measured by gpu_bench.sh."""
    return recipe_figure(recipe, label, f"gpu/{recipe}")


def readme_rows(descriptions: Mapping[str, str], baseline: str) -> list[Row]:
    """Return accuracy and training time of the most important recipes. baseline: description of `resnet18`."""
    in_float32 = {
        "laptop": recipe_figure("laptop", "training time", "cpu/recipe-laptop-float32"),
        "laptop91": recipe_figure("laptop91", "training time"),
    }
    rows: list[Row] = [
        (
            f"`{name}`",
            description,
            recipe_figure(name, "test accuracy"),
            "–" if name == "laptop91" else recipe_figure(name, "training time"),
            in_float32.get(name, "–"),
            gpu_figure(name, "training time") if name in GPU_RECIPES else "–",
        )
        for name, description in descriptions.items()
    ]
    accuracy, seconds = gpu_figure("resnet18", "test accuracy"), gpu_figure("resnet18", "training time")
    return [*rows, ("`resnet18`", baseline, accuracy, "–", "–", seconds)]


HELD_OUT = ("held-out accuracy", "with TTA")
FLOAT32_FILES = ("budget-float32", "budget-avx2")
PHOTOS, FOLDS = "cpu/finetune-ants-bees", "cpu/finetune-ants-bees-folds"

# Kinds of planted label errors, and rankings of labels by their names in the files.
LABEL_ERRORS = ("uniform, 5 %", "confusable, 5 %", "one pair, 20 %")
RANKINGS = {
    "probability of the label": "probability of the label",
    "last loss": "last loss",
    "labels of the 10 nearest neighbours": "labels of neighbours",
    "logit margin of the net": "logit margin",
    "mean margin over the training": "mean margin over the training",
    "both margins": "both margins",
    "both margins and neighbours": "both margins and neighbours",
}
HELD_OUT_RANKINGS = {
    "probability of the label, five folds": "probability of the label, held out",
    "logit margin, five folds": "logit margin, held out",
}
REVIEW_GAIN = {
    "accuracy on held-out folds, planted errors included": "held-out accuracy, planted errors",
    "repaired errors, order of `review`": "repaired, logit margin",
    "repaired errors, order by probability of the label": "repaired, probability of the label",
    "images to review to repair 80 %, order of `review`": "reviewed images for 80 %, logit margin",
    "test accuracy with planted errors": "test accuracy, planted errors",
    "after the review": "test accuracy, review",
    "with the original labels": "test accuracy, original labels",
    "gain of the review": "gain, review",
    "gain of the original labels": "gain, original labels",
}
MARGINS_STEP = ("a step without margins", "a step with margins", "additional time")


def mean_cell(file: str, label: str) -> Cell:
    """Return a mean with its interval, of a file that has both as figures of their own."""
    mean, low, high = (Figure(f"cpu/{file}", f"{label}: {part}") for part in ("mean", "low", "high"))
    return mean, " (", low, " … ", high, ")"


def label_error_rows(file: str, rankings: Mapping[str, str]) -> list[Row]:
    """Return AUROC and precision of each ranking for each kind of planted errors."""
    return [
        (
            text,
            *(
                (Figure(f"cpu/{file}", f"{kind}, {name}: AUROC"), " / ",
                 Figure(f"cpu/{file}", f"{kind}, {name}: precision in the first 5 %"))
                for kind in ("uniform", "confusable", "pair")
            ),
        )
        for text, name in rankings.items()
    ]  # fmt: skip


TABLES: dict[str, Table] = {
    # ---- README
    "readme": Table(
        ("recipe", "trains", "test accuracy", "time, CPU in bfloat16", "time, CPU in float32", "time, GPU"),
        readme_rows(
            {
                "quickstart": "small CNN on drawn shapes",
                "laptop": "whitened CNN with Muon, for CPUs",
                "laptop91": "narrower, for CPUs without bfloat16",
                "laptop100": "CIFAR-100, for CPUs",
                "tudui": "CNN of a tutorial, 10 epochs",
                "lenet": "LeNet of the PyTorch tutorial, 2 epochs",
                "fast94": "wider, for a GPU (accuracy measured on a CPU)",
            },
            "research baseline, for a GPU",
        ),
        "Measured on {machines}; {dates}. ± is the standard deviation over n seeds; times are medians. Source: {link}.",
    ),
    "readme-zh": Table(
        ("配方", "训练内容", "测试准确率", "时间（CPU，bfloat16）", "时间（CPU，float32）", "时间（GPU）"),
        readme_rows(
            {
                "quickstart": "小型 CNN，程序绘制的图形",
                "laptop": "白化（whitening）CNN 和 Muon 优化器，面向 CPU",
                "laptop91": "更窄，面向没有 bfloat16 的 CPU",
                "laptop100": "CIFAR-100，面向 CPU",
                "tudui": "小土堆教程的 CNN，10 个 epoch",
                "lenet": "PyTorch 官方教程的 LeNet，2 个 epoch",
                "fast94": "比 `laptop` 更宽，面向 GPU（准确率在 CPU 上测得）",
            },
            "研究基线，面向 GPU",
        ),
        "测量环境：{machines}。± 是 n 个种子的标准差，时间是中位数。日期和数据文件见 {link}。",
        unmeasured="尚未测量",
    ),
    # ---- docs/results.md
    "recipes": Table(
        ("recipe", "images", *RUN_COLUMNS),
        [
            full_row("`quickstart`", "drawn shapes", "quickstart"),
            full_row("`laptop`", "CIFAR-10", "laptop"),
            full_row("`laptop`, in float32", "CIFAR-10", "laptop", "cpu/recipe-laptop-float32"),
            full_row("`laptop91`, in float32", "CIFAR-10", "laptop91"),
            full_row("`laptop90`", "CIFAR-10", "laptop90"),
            full_row("`laptop100`", "CIFAR-100", "laptop100"),
            full_row("`fast94`, on a CPU", "CIFAR-10", "fast94"),
            full_row("`tudui`", "CIFAR-10", "tudui"),
            full_row("`lenet`", "CIFAR-10", "lenet"),
            full_row("`finetune`, 128 px", "flowers, 5 classes", "finetune"),
            full_row("`folder`, 32 px", "flowers, 5 classes", "folder"),
            run_row("`signs_mlp`", "drawn shapes", "cpu/signs_mlp"),
            run_row("`fashion_cnn`", "drawn shapes, grey", "cpu/fashion_cnn-on-shapes"),
        ],
        intervals=True,
    ),
    "gpu": Table(
        ("recipe", "aim", "test accuracy", "with TTA", "training time"),
        [
            (
                f"`{name}`",
                aim,
                *(gpu_figure(name, label) for label in ("test accuracy", "with TTA", "training time")),
            )
            for name, aim in GPU_RECIPES.items()
        ],
    ),
    "airbench": Table(
        ("training", "test accuracy", "with TTA", "training time"),
        [
            *rows_of_files(
                {"`airbench94_muon.py`, half precision as bfloat16": "airbench"},
                "accuracy",
                "accuracy with views",
                "training",
            ),
            ("`fast94`", *(recipe_figure("fast94", label) for label in ("test accuracy", "with TTA", "training time"))),
        ],
    ),
    "step": Table(
        ("training step, float32", "cifar-lit", "plain PyTorch loop", "relative speed"),
        rows_of_files(
            {
                "`laptop`, batch 500": "bench-step-laptop",
                "`quickstart`, batch 128": "bench-step-quickstart",
                "`tudui`, batch 64": "bench-step-tudui",
                "`lenet`, batch 4": "bench-step-lenet",
                "one linear layer, batch 64": "bench-step",
            },
            "ours, a step",
            "bare loop, a step",
            "ours / bare loop",
        ),
    ),
    "tutorial-speed": Table(
        ("epochs of `tudui`, validation included", "speed"),
        file_rows(
            "bench-tutorial",
            {
                "cifar-lit, bfloat16": "ours",
                "the loop of the tutorial, float32": "the tutorial's loop, float32",
                "ratio": "ours / the tutorial's loop, float32",
            },
            "{}",
        ),
    ),
    "input": Table(
        ("input pipeline, CIFAR-10, batch 500", "speed"),
        file_rows(
            "bench-input",
            {
                "cifar-lit": "ours",
                "torchvision v2 on whole batches": "v2 on whole batches",
                "torchvision v2 on tensors, 2 workers": "v2 on tensors, 2 workers",
                "torchvision on PIL images, 2 workers": "PIL, 2 workers",
            },
            "{}",
        ),
    ),
    "scaling": Table(
        ("`quickstart` on two CPU cores", "training time"),
        file_rows("bench-scaling", {"one process": "1 device", "two processes": "2 devices"}, "{}"),
    ),
    "limit": Table(
        ("two CPU cores with bfloat16", "result"),
        [
            *file_rows(
                "budget",
                {
                    "matrix product": "matrix product, bfloat16",
                    "tutorial loop, one epoch with test": "the tutorial's loop, an epoch with its test",
                },
                "{}",
            ),
            *file_rows(
                "budget-laptop90",
                {"the same on the day of `laptop90`": "the tutorial's loop, an epoch with its test"},
                "{}",
            ),
            ("`laptop`, training time", recipe_figure("laptop", "training time")),
            ("`laptop90`, training time", recipe_figure("laptop90", "training time")),
            ("`fast94`, training time", recipe_figure("fast94", "training time")),
        ],
    ),
    "float32-budget": Table(
        ("in units of the tutorial's ten epochs", "AVX-512", "AVX2"),
        [
            (
                f"`{recipe}`, training",
                *(Figure(f"cpu/{file}", f"{recipe} / ten epochs of the tutorial's loop") for file in FLOAT32_FILES),
            )
            for recipe in ("laptop", "laptop90", "laptop91")
        ],
    ),
    "throughput": Table(
        (
            "training",
            "computation",
            "matrix product",
            "convolutions",
            "training steps",
            "of product",
            "of convolutions",
        ),
        [
            (
                f"`{recipe}`, {text}",
                Figure("cpu/limit", f"{recipe}: computation"),
                *(
                    Figure("cpu/limit", f"{recipe}, {precision}: {label}")
                    for label in (
                        "matrix product",
                        "convolutions",
                        "training steps",
                        "share of the matrix product",
                        "share of the convolutions",
                    )
                ),
            )
            for precision, text in (("bf16-mixed", "bfloat16"), ("32-true", "float32"))
            for recipe in ("laptop", "laptop90", "fast94")
        ],
    ),
    "kills": Table(
        ("run that is killed at random times and resumed", "runs, all with bit-identical weights"),
        [
            *file_rows(
                "stress-kill",
                {
                    "one process": "one process",
                    "one process, images from workers": "one process, images from workers",
                    "two processes": "two processes",
                },
                "{}: identical to the last bit",
            ),
            *file_rows(
                "stress-kill_recipes",
                {
                    "`laptop`, bfloat16": "laptop (growing images, mirrored views), bfloat16",
                    "`laptop`, bfloat16, two processes": "laptop, bfloat16, two processes",
                    "`fast94`, float32": "fast94 (all views), float32",
                },
                "{}: identical to the last bit",
            ),
        ],
    ),
    # ---- other pages of docs/
    "lost-ranks": Table(
        ("run in which a rank is killed, frozen or cut off (`--rank-timeout 15`)", "result"),
        file_rows(
            "stress-lost_ranks",
            {
                "longest time until all processes had ended": "slowest end of a run that lost a rank",
                "processes left running": "processes left behind",
                "resumed runs with bit-identical weights": "runs gone on with, identical to the last bit",
            },
            "{}",
        ),
    ),
    "tutorials": Table(
        ("recipe", "test accuracy", "training time"),
        [
            (f"`{name}`", recipe_figure(name, "test accuracy"), recipe_figure(name, "training time"))
            for name in ("tudui", "lenet", "laptop")
        ],
    ),
    "augment": Table(
        ("operation", "32 px", "× torchvision", "224 px", "× torchvision"),
        file_rows(
            "bench-augment",
            {
                "`scale`": "crop",
                "`scale`, `rotation`, `perspective`": "crop, rotation, perspective",
                "brightness, contrast, saturation, hue": "all four colours",
                "`blur`": "blur",
                "`policy: trivial`": "trivial",
                "`policy: randaugment`": "randaugment",
            },
            "{}, 32 px: ours",
            "{}, 32 px: ours / torchvision",
            "{}, 224 px: ours",
            "{}, 224 px: ours / torchvision",
        ),
    ),
    "memory": Table(
        ("data set", "decoded size", "memory limit", "decoding", "training", "relative to training from memory"),
        rows_of_files(
            {
                "images of 128 px, 10 × the memory limit": "bigger-than-memory",
                "a million thumbnails of 64 px, 6 × the limit": "million-thumbnails",
            },
            "decoded images",
            "limit for all processes, with the pages of files",
            "decoding within the limit",
            "training within the limit",
            "within the limit / in memory",
        ),
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
                "ants and bees, cross-validation",
                "`finetune --folds 5`",
                (
                    Figure(FOLDS, "all images"),
                    " (95 % interval ",
                    Figure(FOLDS, "all images, interval from"),
                    " … ",
                    Figure(FOLDS, "all images, interval to"),
                    ")",
                ),
                (Figure(FOLDS, "a training, all"), ", each fold"),
            ),
            (
                "flowers, 5 classes, 128 px",
                "`finetune`",
                recipe_figure("finetune", "test accuracy"),
                recipe_figure("finetune", "start to result"),
            ),
            (
                "flowers, 5 classes, 32 px",
                "`folder`, from scratch",
                recipe_figure("folder", "test accuracy"),
                recipe_figure("folder", "start to result"),
            ),
        ],
    ),
    "few-labels": Table(
        ("CIFAR-10", "`finetune`", "its last layer alone", "`folder`, from scratch"),
        file_rows(
            "few-labels",
            {"100 labelled images": "100 images", "1,000 labelled images": "1,000 images"},
            "{}, fine-tuned",
            "{}, last layer",
            "{}, from scratch",
        ),
    ),
    "imbalance": Table(
        ("CIFAR-10, classes of 50 to 5,000 images", "balanced accuracy", "macro F1"),
        file_rows(
            "imbalance",
            {
                "no correction": "as it is",
                "`--model.class_weights balanced`": "class weights balanced",
                "`--model.class_weights effective`": "class weights effective",
                "`--data.sampling balanced`": "sampling balanced",
            },
            "{}: balanced accuracy",
            "{}: macro F1",
        ),
    ),
    "label-noise": Table(
        ("ranking of 10,000 labels, 5 epochs", *LABEL_ERRORS),
        label_error_rows("label-noise", {**RANKINGS, **HELD_OUT_RANKINGS}),
    ),
    "label-noise-long": Table(
        ("ranking of 4,000 labels, 30 epochs", *LABEL_ERRORS),
        [
            *label_error_rows("label-noise-long", RANKINGS),
            *((*row[:2], "–", "–") for row in label_error_rows("label-noise-long", HELD_OUT_RANKINGS)),
        ],
    ),
    "review-gain": Table(
        ("mean of 5 seeds, with its 95 % interval", "flowers, 256 px", "CIFAR-10, 128 px", "CIFAR-10, 224 px"),
        [
            (
                text,
                mean_cell("review-gain", f"flowers, {label}"),
                mean_cell("review-gain", f"CIFAR-10, {label}"),
                mean_cell("review-gain-224", f"CIFAR-10, {label}"),
            )
            for text, label in REVIEW_GAIN.items()
        ],
    ),
    "margins-step": Table(
        ("`model.margins`, processor time of a step", "without", "with", "additional"),
        [
            (f"`{name}`", *(Figure(f"cpu/margins-step-{name}", label) for label in MARGINS_STEP))
            for name in ("quickstart", "laptop90")
        ],
        intervals=True,
    ),
    "next-labels": Table(
        ("accuracy with `next`, minus with random choice", "200 labels", "300 labels", "400 labels", "500 labels"),
        [
            (
                text,
                *(
                    Figure("cpu/next-labels", f"{name}, {count} labels, next − random")
                    for count in (200, 300, 400, 500)
                ),
            )
            for name, text in {"CIFAR-10": "CIFAR-10", "flowers": "flowers"}.items()
        ],
        intervals=True,
    ),
    "calibration": Table(
        ("recipe", "temperature", "calibration error", "with temperature", "cross-entropy", "with temperature"),
        [
            *rows_of_files(
                {
                    "`laptop90`, bfloat16": "temperature-laptop90",
                    "`laptop91`, bfloat16": "temperature-laptop91",
                    "`laptop91`, float32": "temperature-laptop91-float32",
                    "`laptop`, bfloat16": "temperature-laptop",
                    "`laptop`, float32": "temperature-laptop-float32",
                    "`fast94`, float32": "temperature-fast94",
                    "`laptop100`, float32": "temperature-laptop100",
                },
                "temperature",
                "calibration error before",
                "calibration error after",
                "cross-entropy before",
                "cross-entropy after",
            ),
            *rows_of_files(
                {"`laptop100`, least error": "temperature-laptop100"},
                "temperature of least error",
                "calibration error before",
                "calibration error at it",
                "cross-entropy before",
                "cross-entropy at it",
            ),
        ],
    ),
    "unknown": Table(
        ("measured", "`laptop90`, `--data.val_size 0.1`", "`finetune` on flowers"),
        [
            *(
                (
                    f"test images rejected at `--reject {rate}`",
                    *figures_of_scores(f"rejected test images at --reject {rate}"),
                )
                for rate in ("0.01", "0.05", "0.2")
            ),
            *(
                (f"{text}: {what}, {score}", *figures_of_scores(f"{label}: {what}, {score}"))
                for text, label in (
                    ("CIFAR-100", "CIFAR-100"),
                    ("textures", "drawn textures"),
                    ("digits", "drawn digits"),
                )
                for what in ("AUROC", "FPR95")
                for score in ("energy", "largest probability", "KNN")
            ),
            *(
                (f"flowers: {what}, {score}", Figure("cpu/scores-laptop90", f"flowers: {what}, {score}"), "–")
                for what in ("AUROC", "FPR95")
                for score in ("energy", "largest probability", "KNN")
            ),
        ],
    ),
    "use": Table(
        ("operation", "speed", "time", "memory"),
        [
            *file_rows(
                "bench-classify",
                {
                    "`classify`, 10,000 files of 32×32": "10,000 files of 32×32",
                    "`classify`, 153 files of 320×240": "153 files of 320×240",
                },
                "{}: classify",
                "{}: from start to end",
                "{}: peak memory",
            ),
            ("start of `serve`", "–", Figure("cpu/bench-serve", "start"), Figure("cpu/bench-serve", "memory")),
            *(
                (
                    f"`serve`, {clients}",
                    Figure("cpu/bench-serve", label),
                    (Figure("cpu/bench-serve", f"{label}, p50"), ", median latency"),
                    "–",
                )
                for clients, label in (("1 client", "1 at a time"), ("32 clients", "32 at a time"))
            ),
            ("imports of `train`", "–", Figure("cpu/bench-cold", "imports alone"), "–"),
            ("`train --recipe quickstart`, whole run", "–", Figure("cpu/bench-cold", "all"), "–"),
        ],
    ),
    # ---- docs/lab-notebook.md
    "novelty": Table(
        ("AUROC of `laptop` against the test images of CIFAR-10", "CIFAR-100", "flowers"),
        file_rows(
            "scores",
            {
                "energy (the score in use)": "energy",
                "entropy": "entropy",
                "largest probability": "largest probability",
                "distance to neighbours": "distance alone",
                "distance × perplexity (removed)": "novelty",
            },
            "CIFAR-100: {}",
            "flowers: {}",
        ),
    ),
    "shared-machine": Table(
        ("OpenMP wait policy", "one training", "two trainings at once"),
        file_rows(
            "shared-machine",
            {
                "libgomp's default": "default",
                "`GOMP_SPINCOUNT=20000`": "GOMP_SPINCOUNT=20000",
                "cifar-lit": "ours",
                "`OMP_WAIT_POLICY=PASSIVE`": "OMP_WAIT_POLICY=PASSIVE",
            },
            "alone, {}",
            "2 at once, {}",
        ),
    ),
    "variants": Table(
        ("net or training", *HELD_OUT),
        file_rows(
            "variants",
            {
                "`laptop`: 3×3 kernels, widths 48/192/192": "48/192/192, 3×3 everywhere",
                "SiLU": "the same with SiLU",
                "2×2 kernels before pooling in groups 2 and 3": "2×2 first in groups 2 and 3",
                "2×2, widths 64/256/256": "the same, 64/256/256",
                "2×2, widths 48/192 and 256 → 512": "the same, 48/192 and 256 → 512",
                "2×2 in all groups, widths 64/256/256": "2×2 first in all groups, 64/256/256",
                "2×2, 24 → 32 px": "2×2, 24 → 32 px",
                "2×2, 16 → 24 → 28 → 32 px": "2×2, 16 → 24 → 28 → 32 px",
                "2×2, batches of 1,000, lr 0.24": "2×2, batches of 1,000 at 0.24",
                "2×2, `skip_easy` 0.3 from 0.4": "2×2, without the 30 % of least loss from 0.4 on",
                "2×2, 925 processor seconds": "2×2 first in groups 2 and 3, for 925 s",
                "2×2, widths 64/256/256, 925 processor seconds": "the same, 64/256/256, for 925 s",
            },
            "{}",
            "{}: mirrored views",
        ),
    ),
    "variants-tested": Table(
        ("trained on all 50,000 images", "test accuracy", "with TTA"),
        file_rows(
            "variants",
            {
                "`laptop`: 3×3 kernels": "3×3 everywhere, all 50,000 images, tested",
                "2×2 kernels before pooling": "2×2 first, all 50,000 images, tested",
                "2×2, 13 epochs": "2×2 first, the Trainer, 13 epochs in 400.7 s of two threads, tested",
            },
            "{}",
            "{}: mirrored views",
        ),
    ),
    "skip-easy": Table(
        ("short training", *HELD_OUT),
        [
            *file_rows(
                "variants-short",
                {
                    "`laptop`": "laptop",
                    "2×2 kernels before pooling": "2×2 first",
                    "`skip_easy` 0.3 from 0.4 of the time": "without the 30 % of least loss",
                },
                "{}",
                "{}, mirrored views",
            ),
            *file_rows(
                "variants-skip-best",
                {
                    "`skip_easy` 0.5 from 0.6": "without the 50 % of least loss, from 60 % of the time on",
                    "`skip_easy` 0.5 from 0.2, widths 32/192/256, lr 0.16": (
                        "32/192/256, lr 0.16, without the 50 % of least loss, from 20 % on"
                    ),
                },
                "{}",
                "{}, mirrored views",
            ),
        ],
        intervals=True,
    ),
    "skip-easy-scan": Table(
        ("`skip_easy`, and further changes", *HELD_OUT),
        file_rows(
            "variants-skip",
            {
                "0.3 from 0.4": "skip 30 from 0.4",
                "0.3 from 0.2": "skip 30 from 0.2",
                "0.5 from 0.4": "skip 50 from 0.4",
                "0.5 from 0.6": "skip 50 from 0.6",
                "0.3 from 0.4, 20 → 24 → 28 px": "skip, 20 24 28",
                "0.3 from 0.4, 20 px for longer": "skip, 20 long",
                "0.3 from 0.4, batches of 250": "skip, batch 250",
                "0.3 from 0.4, widths 32/192/256": "skip, 32/192/256",
                "0.3 from 0.4, label smoothing 0.1": "skip, smoothing 0.1",
                "0.3 from 0.4, lr 0.28": "skip, lr 0.28",
                "0.3 from 0.4, lr 0.15": "skip, lr 0.15",
                "0.3 from 0.4, SiLU": "skip, SiLU",
                "0.5 from 0.4, widths 32/192/256": "32/192/256, skip 50 from 0.4",
                "0.6 from 0.5, widths 32/192/256": "32/192/256, skip 60 from 0.5",
                "0.5 from 0.4, widths 24/192/320": "24/192/320, skip 50 from 0.4",
                "0.5 from 0.4, widths 32/160/320": "32/160/320, skip 50 from 0.4",
                "0.5 from 0.2, widths 32/192/256, lr 0.16": "32/192/256, lr 0.16, skip 50 from 0.2",
                "0.5 from 0.4, widths 32/192/256, lr 0.16, 20 → 24 → 28 px": (
                    "32/192/256, lr 0.16, 20 → 24 → 28 px, skip 50 from 0.4"
                ),
            },
            "{}",
            "{}, mirrored views",
        ),
    ),
    "hard-rounds": Table(
        ("stages; widths; images left out from", *HELD_OUT),
        [
            (text, *(recipe_figure(name, label, "cpu/hard-rounds") for label in ("test accuracy", "with TTA")))
            for text, name in {
                "4 × 24, 1 × 28, 1 × 32 px; 48/192/192; never": "w411",
                "6 × 24, 1 × 28, 1 × 32 px; 32/192/192; never": "n611",
                "5 × 24, 1 × 28, 1 × 32 px; 32/192/192; 0.86": "n521h",
                "7 × 24, 1 × 32 px; 32/192/192; 0.88": "n71h",
                "6 × 24, 2 × 32 px; 32/192/192; 0.75": "n62h",
                "6 × 24, 2 × 32 px; 32/192/192; 0.5": "n53h",
                "6 × 24, 2 × 32 px; 32/192/192; 0.25": "h1",
                "6 × 24, 1 × 28, 1 × 32 px; 32/192/192; 0.5": "h4",
                "4 × 24, 2 × 32 px; 48/192/192; 0.5": "h3",
                "3 × 20, 4 × 24, 1 × 28, 1 × 32 px; 32/192/192; never": "s2",
                "the same; 0.89": "s2h",
                "4 × 20, 3 × 24, 1 × 28, 1 × 32 px; 32/192/192; 0.78": "s3h",
                "3 × 20, 2 × 24, 1 × 28, 1 × 32 px; 48/192/192; 0.86": "ws",
                "3 × 20, 5 × 24, 1 × 32 px; 32/192/192; 0.89": "n351h",
            }.items()
        ],
    ),
    "hard-rounds-test": Table(
        ("trained on all images", "test accuracy", "with TTA"),
        [
            (text, *(recipe_figure(name, label, "cpu/hard-rounds-test") for label in ("test accuracy", "with TTA")))
            for text, name in {
                "6 × 24, 2 × 32 px; 32/192/192; 0.25": "h1",
                "4 × 24, 1 × 32 px; 32/192/192; 0.2": "k1",
            }.items()
        ],
    ),
    "skip-easy-whole": Table(
        ("training as long as `laptop`", *HELD_OUT),
        [
            *file_rows(
                "variants-whole",
                {
                    "`laptop`": "laptop",
                    "`skip_easy` 0.3 from 0.4 of the time": "without the 30 % of least loss",
                },
                "{}",
                "{}, mirrored views",
            ),
            *file_rows(
                "variants-whole-half",
                {"`skip_easy` 0.5 from 0.68": "without the 50 % of least loss, from 70 % of the time on"},
                "{}",
                "{}, mirrored views",
            ),
        ],
        intervals=True,
    ),
}
