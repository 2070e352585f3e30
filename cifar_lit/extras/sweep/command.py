"""`cifar-lit sweep FILE.yaml`: search settings with trials on validation images, and confirm the best one."""

from __future__ import annotations

import argparse
from pathlib import Path

from cifar_lit.bench.commands import BenchParser
from cifar_lit.cli.flags import LOGS
from cifar_lit.errors import UsageError, check_packages

DESCRIPTION = """Search settings with Optuna. FILE.yaml names the recipe, the settings to search and the objective:

  recipe: tudui
  search:
    model.lr: {log: [0.005, 0.3]}
    data.augment.crop: {range: [0, 4]}
    model.optimizer: {choice: [sgd, adamw]}
    model.optimizer_options.momentum: {range: [0.5, 0.95], if: {model.optimizer: sgd}}
  objective: val/accuracy
  trials: 40

Each trial trains in a process and is scored on validation images. The same command continues a sweep, on this machine
or, with --storage, on others. All other flags, such as --dataset or --accelerator, are those of `fit` for every trial.
"""


def sweep(argv: list[str]) -> None:
    """Run a sweep, or what is left of it."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = BenchParser(prog="cifar-lit sweep", description=DESCRIPTION, allow_abbrev=False, formatter_class=plain)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE.yaml", help="recipe, search space, objective and budget")
    add("--workers", default="1", help="trainings at a time, or a GPU for each of them: 0,1,2,3 (default: 1)")
    add("--storage", metavar="URL", help="database of the sweep (default: SQLite in its folder)")
    add("--logs", type=Path, default=Path(LOGS), help="folder for the sweep's folder (default: lightning_logs)")
    add("--confirm", type=int, default=4, help="new seeds to compare the best trial with the recipe (default: 4)")
    add("--grace", type=int, default=30, help="seconds without a heartbeat until a trial is resumed (default: 30)")
    add("--trust", action="store_true", help="let the files name any class and any path: their code can run")
    options, words = parser.parse_known_args(argv)
    if options.confirm < 0 or options.confirm == 1 or options.grace < 1:
        raise UsageError("--confirm needs 2 seeds or more, or 0 for no confirmation; --grace needs 1 second or more")
    check_packages("sweep", ("optuna",), "sweep")
    from cifar_lit.cli.quiet import quieten

    quieten()
    from cifar_lit.extras.sweep.run import run_sweep

    run_sweep(options, words, argv)
