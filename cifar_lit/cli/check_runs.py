"""`cifar-lit check RUN…`: test runs of others again, and compare their data, settings and first steps."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from cifar_lit.bench.process import as_error, kill_group, started
from cifar_lit.cli.console import csv_text, for_tables, write_or_say
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.cli.trust import allow_run
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import core_count, processor
from cifar_lit.runs.compare import RunRecord, find_runs, read_run
from cifar_lit.runs.model_file import load_model_file
from cifar_lit.runs.recheck import data_faults, result_faults, retested, setting_faults
from cifar_lit.runs.results import versions
from cifar_lit.runs.run_data import run_image_data
from cifar_lit.runs.run_folder import read_curves
from cifar_lit.text import note

DESCRIPTION = (
    "Check runs that others have made. Test the weights again, compare the results, the data, their split and the "
    "settings with what the run says, and repeat its first steps from the seed. Exit code 1 if a run fails."
)
MAX_LOSS = 0.02  # relative difference of the first training loss on another kind of machine
SECONDS = 600.0  # to repeat the first steps
COLUMNS = ("run", "verdict", "accuracy", "again", "reason")
ANY_MACHINE = ("--accelerator=auto", "--devices=auto", "--nodes=1", "--precision=null", "--threads=null")


def check(words: list[str]) -> int:
    """Print a verdict on each run; return 1 if one fails or cannot be checked."""
    parser = command_parser("check", DESCRIPTION)
    add = parser.add_argument
    add("runs", type=str, nargs="+", help="run folders, patterns such as 'handed-in/*', or a folder of runs")
    add("--data-dir", type=str | None, default=None, help="folder of the data that the runs should have used")
    add("--table", type=str | None, default=None, help="write the verdicts to this CSV file (- for standard output)")
    settings = parsed(parser, words)
    verdicts = []
    for path in find_runs(settings.runs):
        verdicts.append(check_run(path, settings.data_dir, settings.trust))
        note(f"{verdicts[-1].name}: {verdicts[-1].word}")
    if settings.table:
        write_or_say("--table", settings.table, csv_text([COLUMNS, *map(_cells, verdicts)]))
    if settings.table != "-":
        table = Table(*COLUMNS)
        for verdict in verdicts:
            table.add_row(*_cells(verdict))
        for_tables().print(table)
    return int(any(verdict.word != "ok" for verdict in verdicts))


@dataclass
class Verdict:
    """Result of the check of a run."""

    name: str
    claimed: float | None = None  # accuracy in metrics.json
    retested: float | None = None  # accuracy of the weights now
    faults: list[str] = field(default_factory=list)  # contradictions
    gaps: list[str] = field(default_factory=list)  # reasons why a part could not be checked
    notes: list[str] = field(default_factory=list)  # agreements

    @property
    def word(self) -> str:
        """Return fails, unchecked or ok."""
        if self.faults:
            return "fails"
        if self.gaps:
            return "unchecked"
        return "ok"


def check_run(path: Path, data_dir: str | None, trust: bool) -> Verdict:
    """Check a run. Nothing in it is executed unless `trust`; its own code and paths are refused as everywhere.

    data_dir: folder of the data, which a stranger's run must not name itself.
    """
    run = read_run(path)
    verdict = Verdict(run.name, run.test.get("accuracy"))
    if not run.test or not run.settings:
        verdict.faults.append(f"no results to check: {run.note}")
        return verdict
    try:
        allow_run(path / "config.yaml", trust)
        net = load_model_file(path)
        verdict.faults += setting_faults(run, net)
        data = run_image_data(path, net.card, None, data_dir)
        verdict.faults += data_faults(run.metrics, data)
        probabilities = retested(net, data.test_images)
        verdict.retested = float((probabilities.argmax(1) == data.test_images.labels).double().mean())
        verdict.faults += result_faults(run, data, probabilities)
        if not verdict.faults:  # else the first steps would differ too
            repeat_first_steps(run, data_dir, trust, verdict)
    except UsageError as error:
        verdict.gaps.append(str(error))
    except Failure as error:
        verdict.faults.append(str(error))
    return verdict


def repeat_first_steps(run: RunRecord, data_dir: str | None, trust: bool, verdict: Verdict) -> None:
    """Train again from the seed up to the first row of metrics.csv, and compare the loss."""
    row = _first_loss(run.path)
    if row is None and run.settings.get("finetune.unfreeze") is False:
        verdict.notes.append("only the last layer was fitted, without steps to repeat")
        return
    if row is None:
        verdict.gaps.append("metrics.csv has no training loss to repeat")
        return
    step, loss = row
    kind, threads = str(run.metrics.get("accelerator")), run.settings.get("threads")
    recorded = (run.metrics.get("processor"), run.metrics.get("versions"), run.settings.get("trainer.num_nodes"))
    is_same_machine = recorded == (processor(kind), versions(), 1) and threads in range(1, core_count() + 1)
    words = list(ANY_MACHINE)
    if is_same_machine:
        words = [f"--threads={threads}"]
    if data_dir:
        words.append(f"--data-dir={data_dir}")
    if trust:
        words.append("--trust")
    again = _loss_of_training(run.path / "config.yaml", words, step)
    if again is None:
        verdict.gaps.append(f"step {step} was not reached again within {SECONDS:g} s")
    elif again == loss:
        verdict.notes.append(f"the loss of the first {step} steps is repeated exactly")
    elif abs(again - loss) > MAX_LOSS * again or (is_same_machine and _is_exact(run)):
        text = f"the first {step} steps have a loss of {again:.6f} from this seed, not {loss:.6f}"
        verdict.faults.append(f"{text}: another seed, other settings or other images")
    else:
        verdict.notes.append(f"the loss of the first {step} steps is {again:.6f}, and was {loss:.6f} on its machine")


def _is_exact(run: RunRecord) -> bool:
    """Return whether a machine repeats its own training to the bit: some kernels of GPUs do not."""
    return run.metrics.get("accelerator") == "cpu" or run.settings.get("trainer.deterministic") is True


def _first_loss(run: Path) -> tuple[int, float] | None:
    """Return step and loss of the first row of metrics.csv that has a training loss."""
    for row in read_curves(run):
        if "train/loss" in row and "step" in row:
            return int(row["step"]), row["train/loss"]
    return None


def _loss_of_training(config: Path, words: list[str], step: int) -> float | None:
    """Run a training until it has logged its first loss; return it, None if that takes too long.

    Raises:
        UsageError, Failure: the training ended before, with its last line.
    """
    deadline = time.monotonic() + SECONDS
    with TemporaryDirectory() as folder:
        logs, errors = Path(folder, "runs"), Path(folder, "stderr")
        fixed = [f"--config={config}", f"--logs={logs}", "--logger=csv"]
        command = [sys.executable, "-m", "cifar_lit", "fit", *fixed, *words]
        with errors.open("wb") as file, started(command, stdout=subprocess.DEVNULL, stderr=file) as process:
            try:
                while time.monotonic() < deadline:
                    ended = process.poll()
                    for metrics in logs.glob("*/metrics.csv"):
                        row = _first_loss(metrics.parent)
                        if row and row[0] == step:
                            return row[1]
                    if ended == 0:
                        raise Failure(f"the training ends without a loss at step {step}, the first one in metrics.csv")
                    if ended is not None:
                        raise as_error(ended, errors.read_bytes().decode(errors="replace"))
                    time.sleep(0.2)
            finally:
                kill_group(process)
    return None


def _cells(verdict: Verdict) -> list[str]:
    figures = []
    for value in (verdict.claimed, verdict.retested):
        figures.append("" if value is None else f"{value:.4f}")
    return [verdict.name, verdict.word, *figures, "; ".join([*verdict.faults, *verdict.gaps, *verdict.notes])]
