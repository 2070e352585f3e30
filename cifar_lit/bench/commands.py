"""`cifar-lit bench`: ours under the Trainer against plain loops, in turn in one process, as medians and ratios."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import rich
import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table
from torch import nn

from cifar_lit.bench.interleave import Interleave, Rounds
from cifar_lit.bench.plain import bare_loop, tutorial_loop
from cifar_lit.cli.machine import cpu_name, look
from cifar_lit.cli.parser_errors import parsed
from cifar_lit.cli.run import Run, versions
from cifar_lit.data.module import ImageData
from cifar_lit.errors import UsageError, nearest
from cifar_lit.results.run_folder import RunFolder, write_text
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.profiling import NoProfiler

BENCHES = {
    "step": "what the Trainer adds to a step: ours with bar, TensorBoard and metrics on, against a bare loop on the same batches",
    "tutorial": "a tutorial's recipe: ours against its hand-written loop (PIL images, DataLoader without workers, float32)",
}


def bench(words: list[str]) -> None:
    """Runs the measurement that is named first in `words`."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: cifar-lit bench NAME [flags]\n")
        for name, what in BENCHES.items():
            print(f"  {name:<10} {what}")
        return
    name = words[0]
    if name not in BENCHES:
        raise UsageError(f"no measurement is called {name!r}.{nearest(name, BENCHES)} There are {', '.join(BENCHES)}.")
    parser = ArgumentParser(prog=f"cifar-lit bench {name}", description=BENCHES[name], exit_on_error=False, allow_abbrev=False)
    net = "linear" if name == "step" else "tudui"
    parser.add_argument("--net", type=str, default=net, help="a net's name; `linear` is a single layer")
    parser.add_argument("--dataset", type=str, default="shapes")
    parser.add_argument("--data-dir", dest="root", type=str | None, default=None)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--precision", type=str | None, default=None, help="of ours; in `step` of both")
    parser.add_argument("--steps", type=int, default=100 if name == "step" else 50, help="steps of each in a round")
    parser.add_argument("--rounds", type=int, default=20 if name == "step" else 8, help="rounds, after one to warm up")
    parser.add_argument("--threads", type=int | None, default=None, help="of torch; as many as it takes if not given")
    parser.add_argument("--json", type=str | None, default=None, help="write the figures to this file too")
    settings = parsed(parser, words[1:])
    if settings.rounds < 2 or settings.steps < 1:
        raise UsageError("a measurement takes at least --rounds 2 of --steps 1")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    _report(name, settings, _measure(name, settings))


def _measure(name: str, settings: Namespace) -> Rounds:
    precision = settings.precision or ("32-true" if name == "step" else "bf16-mixed" if look().bf16 else "32-true")
    settings.precision = precision
    data = ImageData(
        settings.dataset, root=settings.root, batch_size=settings.batch_size, val_size=0, mean=0.0, std=1.0, count=20_000
    )
    model = _model(settings, data)
    # the tutorials leave a net's memory order as it comes
    other = _model(settings, data, channels_last=name == "step").net
    if name == "step":
        plain = bare_loop(data, other, settings.lr, precision)
    else:
        plain = tutorial_loop(data.train_images, other, settings.batch_size, settings.lr, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(RunFolder(Path(folder), "bench"), {"recipe": "bench"}, "", {}, trains=True)
        interleave = Interleave(plain, settings.steps, settings.rounds)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1000,
            precision=precision,  # type: ignore[arg-type]
            callbacks=[interleave, *run.callbacks(validates=False, bar=True)],
            logger=run.loggers(None),
            num_sanity_val_steps=0,
            limit_val_batches=0,
            enable_model_summary=False,
            profiler=NoProfiler(),
        )
        with _elsewhere():
            trainer.fit(model, datamodule=data)
        run.folder.release()
    return interleave.rounds


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Lets everything be drawn as on a terminal, but where nobody sees it."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        rich.reconfigure(file=nowhere, force_terminal=True)
        try:
            yield
        finally:
            rich.reconfigure()


def _model(settings: Namespace, data: ImageData, channels_last: bool = True) -> ImageClassifier:
    torch.manual_seed(0)
    linear = settings.net == "linear"
    model = ImageClassifier(
        "signs_mlp" if linear else settings.net, data.input_shape, data.class_count, lr=settings.lr, channels_last=channels_last
    )
    if linear:
        channels, height, width = data.input_shape
        model.net = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, data.class_count))
    return model


def _report(name: str, settings: Namespace, rounds: Rounds) -> None:
    ours, plain = rounds.medians()
    low, middle, high = rounds.ratio()
    figures: dict[str, Any] = {
        "bench": name,
        "settings": {key: value for key, value in settings.as_dict().items() if key not in ("json", "root")},
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads()},
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "rounds": len(rounds.ours),
        "ours_ms_per_step": round(ours * 1e3, 4),
        "plain_ms_per_step": round(plain * 1e3, 4),
        "difference_ms": round((ours - plain) * 1e3, 4),
        "speed_ratio": {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]},
    }
    table = Table(title=f"bench {name} · {settings.net} · batch {settings.batch_size}", title_justify="left", title_style="")
    for column in ("", "ms a step", "images/s"):
        table.add_column(column, justify="left" if not column else "right")
    label = "bare loop, same batches" if name == "step" else "the tutorial's loop, float32"
    for what, seconds in ((f"ours under the Trainer, {settings.precision}", ours), (label, plain)):
        table.add_row(what, f"{seconds * 1e3:.3f}", f"{settings.batch_size / seconds:,.0f}")
    console = Console()
    console.print(table)
    console.print(
        f"medians of {len(rounds.ours)} rounds of {settings.steps} steps each, in turn · ours is {middle:.2f} × as fast "
        f"(quartiles {low:.2f} … {high:.2f}) · difference {1e3 * (ours - plain):+.3f} ms a step\n"
        f"{cpu_name()}, {torch.get_num_threads()} threads · " + " · ".join(f"{k} {v}" for k, v in versions().items()),
        highlight=False,
    )
    if settings.json:
        write_text(Path(settings.json), json.dumps(figures, indent=2) + "\n")
