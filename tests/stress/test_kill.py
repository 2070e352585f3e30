"""`cifar-lit drill kill`: trainings are killed at random moments and resumed; what survives must be as if nothing had been."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from cifar_lit.bench.report import environment, footer, headline, settings_of, show, write_figures
from cifar_lit.drills.forked import Forked, warm
from cifar_lit.drills.phases import PHASES
from cifar_lit.drills.starts import drill_starts
from cifar_lit.drills.survivors import differences, finished, run_in
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Kills small trainings at random moments, in one process and in two, goes on with them by --resume, and compares each that "
    "came to its end with one that nothing befell, bit for bit: weights, optimizer, averages, random state, curves, results; "
    "runs that go on with another number of processes are compared up to rounding."
)
TRAINING = [
    *("train", "--recipe", "quickstart", "--accelerator", "cpu", "--precision", "32-true", "--epochs", "3", "--net", "lenet"),
    *("--data.count", "121", "--data.val_size", "20", "--data.image_size", "16", "--batch-size", "8", "--data.crop", "2"),
    *("--model.ema_decay", "0.9", "--checkpoint-every", "4", "--trainer.log_every_n_steps", "5"),
    "--trainer.callbacks=cifar_lit.drills.phases.Announce",
]


ROUNDING = 1e-5  # of fractions; found 6e-8 in weights under SGD, and losses are written with six digits


class Kind(NamedTuple):
    """A way to train. flags: of its own. processes: how many. then: how many go on with it after a kill, 0 for as many."""

    flags: list[str]
    processes: int = 1
    then: int = 0

    @property
    def tolerance(self) -> float:
        """By how much fractions may differ from those of a run that nothing happened to; 0: in no bit."""
        return ROUNDING if self.then else 0.0


# not the recipe's AdamW where sums are rounded in another way: it brings the least gradient to the size of any other
SGD = ["--data.chunk", "1", "--data.count", "118", "--model.optimizer", "sgd", "--lr", "0.05", "--model.momentum", "0.9"]
KINDS = {
    "one process, a step a call": Kind(["--data.chunk", "1"]),
    "one process, four steps a call": Kind(["--data.chunk", "4"]),
    "one process, images from workers": Kind(["--data.placement", "host", "--data.workers", "1", "--data.chunk", "1"]),
    "two processes": Kind(["--data.chunk", "1"], processes=2),
    "two processes, gone on with in one": Kind(SGD, processes=2, then=1),
    "one process, gone on with in two": Kind(SGD, processes=1, then=2),
}
PATIENCE = 5.0  # seconds that the other of two processes is given to notice
NINE, TERM, ONE_OF_TWO = "kill -9", "SIGTERM", "kill -9 of one of two"


class Kill(NamedTuple):
    """One that hit. phase: where it fell. resumed: whether the run was already one that had been gone on with.

    ended: whether every process that was not killed ended by itself.
    """

    kind: str
    how: str
    phase: str
    resumed: bool
    ended: bool


class Plan(NamedTuple):
    """When to kill: `seconds` after the start, or so long after a phase has begun for the `times`-th time."""

    how: str
    rank: int | None
    seconds: float
    phase: str | None = None
    times: int = 1


def draw_plan(draw: random.Random, seconds: float, processes: int) -> Plan:
    """A random plan for a training that takes `seconds`: half of them by time alone, half in a phase, as some are short."""
    how = draw.choices((NINE, TERM, ONE_OF_TWO), (6, 3, 3 if processes > 1 else 0))[0]
    rank = draw.randrange(processes) if how == ONE_OF_TWO else None
    if draw.random() < 0.5:
        return Plan(how, rank, draw.uniform(0.0, seconds))
    phase = draw.choice(list(PHASES.values()))
    several = phase not in ("start", "after the training", "test", "writing results")
    delay = draw.uniform(0.0, 0.003 if phase.startswith("checkpoint") or phase == "after the training" else 0.02)
    return Plan(how, rank, delay, phase, draw.randint(1, 4) if several else 1)


def killed(attempt: Forked, plan: Plan) -> str | None:
    """Carries a plan out; the phase in which it hit, None when the training was over before."""
    sent = None
    while attempt.listen(0.002):
        if plan.phase is None:
            wait = attempt.started + plan.seconds - time.monotonic()
        else:
            wait = plan.seconds if attempt.count(plan.phase) >= plan.times else 1.0
        if wait <= (0 if plan.phase is None else 0.02):
            time.sleep(max(0.0, wait))
            attempt.send(signal.SIGTERM if plan.how == TERM else signal.SIGKILL, plan.rank)
            sent = attempt.phase
            break
    if plan.how == ONE_OF_TWO and sent is not None:
        deadline = time.monotonic() + PATIENCE
        while attempt.listen(0.005) and time.monotonic() < deadline:
            pass
        attempt.end()  # as torchrun does with the others, which may wait for one that never comes
    else:
        attempt.wait()
    if sent is None or all(code == 0 for code in attempt.codes.values()):
        return None
    return sent if plan.how == TERM else attempt.phase  # of a killed process, what it said last


def drill_one(kind: str, kills: int, seconds: float, draw: random.Random, folder: Path) -> tuple[list[Kill], Path]:
    """A training that is killed up to `kills` times, then left alone; the kills that hit, and the run that came of it.

    Raises Failure when a command ends in another way than killed, stopped or done.
    """
    one = KINDS[kind]
    hits: list[Kill] = []
    for number in range(2 * kills + 1):
        run = run_in(folder / "lightning_logs")
        if run is not None and finished(run):
            return hits, run
        resumed = run is not None and any((run / "checkpoints").glob("*.ckpt"))
        processes = one.then if resumed and one.then else one.processes
        words = ["train", "--resume", "--devices", str(processes)] if resumed else [*TRAINING, *one.flags]
        attempt = Forked(words, folder, folder / "log.txt", processes)
        if len(hits) < kills and number < 2 * kills:
            plan = draw_plan(draw, seconds, processes)
            try:
                phase = killed(attempt, plan)
            except Failure as error:
                raise Failure(f"{kind}, {plan.how} in {attempt.phase}: {error}") from None
            if phase is not None:
                ended = list(attempt.codes.values()).count(-signal.SIGKILL) == (1 if plan.how == ONE_OF_TWO else 0)
                hits.append(Kill(kind, plan.how, phase, resumed, ended))
            _check_codes(attempt, plan.how if phase is not None else None)
        else:
            attempt.wait()
            _check_codes(attempt, None)
    run = run_in(folder / "lightning_logs")
    if run is None or not finished(run):
        raise Failure(f"a run in {folder} did not come to its end: {attempt.log.read_text()[-500:]}")
    return hits, run


def _check_codes(attempt: Forked, how: str | None) -> None:
    """Killed processes have the signal's code, stopped ones 143 or the signal's; the other of two ends with 1."""
    allowed = {None: {0}, NINE: {-9, 0}, TERM: {143, -15, 0, 1}, ONE_OF_TWO: {-9, 1, 0}}[how]
    if not set(attempt.codes.values()) <= allowed:
        raise Failure(f"a command ended with {sorted(attempt.codes.values())}: {attempt.log.read_text()[-800:]}")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this drill."""
    parser.add_argument("--kills", type=int, default=200, help="how many kills must hit")
    parser.add_argument("--each", type=int, default=3, help="up to how many kills a run meets before it is left alone")
    parser.add_argument("--starts", type=int, default=10, help="how many real processes are killed in their first seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")


SHORT = {"kills": 6, "starts": 1}


def run(settings: Namespace) -> None:
    """Drills and reports; raises Failure when a survivor is not the same."""
    if settings.kills < 1 or settings.each < 1 or settings.starts < 1:
        raise UsageError("a drill takes at least --kills 1, --each 1 and --starts 1")
    warm()
    draw = random.Random(settings.seed)
    with tempfile.TemporaryDirectory(prefix="cifar-lit-drill-") as name:
        undisturbed = cache(lambda kind: _undisturbed(kind, Path(name) / "undisturbed" / kind))
        hits: list[Kill] = []
        survivors: Counter[str] = Counter()
        while len(hits) < settings.kills:
            kind = list(KINDS)[survivors.total() % len(KINDS)]
            folder = Path(name) / f"run-{survivors.total()}"
            wanted = min(draw.randint(1, settings.each), settings.kills - len(hits))
            expected, seconds = undisturbed(kind)
            found, left = drill_one(kind, wanted, seconds, draw, folder)
            if wrong := differences(left, expected, KINDS[kind].tolerance):
                kept = Path(tempfile.mkdtemp(prefix="cifar-lit-differs-"))
                shutil.copytree(folder, kept, dirs_exist_ok=True)
                places = ", ".join(str(hit.phase) for hit in found)
                raise Failure(f"{kind}, killed in {places}: differs in {', '.join(wrong[:5])}. The run is kept in {kept}.")
            survivors[kind] += 1
            hits += found
            shutil.rmtree(folder)
        first = next(iter(KINDS))
        words = [*TRAINING, *KINDS[first].flags]
        starts = drill_starts(words, settings.starts, undisturbed(first)[0], draw, Path(name) / "starts")
    report(settings, hits, survivors, starts)


def _undisturbed(kind: str, folder: Path) -> tuple[Path, float]:
    """A run that nothing happens to, and the seconds that it took."""
    flags, processes, _ = KINDS[kind]
    attempt = Forked([*TRAINING, *flags], folder, folder.with_suffix(".txt"), processes)
    attempt.wait()
    seconds = time.monotonic() - attempt.started
    _check_codes(attempt, None)
    found = run_in(folder / "lightning_logs")
    assert found is not None
    return found, seconds


def report(settings: Namespace, hits: list[Kill], survivors: Counter[str], starts: dict[str, Any]) -> None:
    """Prints where the kills fell, and writes the figures."""
    ways = (NINE, TERM, ONE_OF_TWO)
    fell = {phase: {how: sum((hit.phase, hit.how) == (phase, how) for hit in hits) for how in ways} for phase in PHASES.values()}
    close = [kind for kind in survivors.elements() if KINDS[kind].tolerance]
    same = [kind for kind in survivors.elements() if not KINDS[kind].tolerance]
    label = f"gone on with in another number of processes, equal to {ROUNDING:.0e}"
    rounded = [(label, len(close), f"of {len(close)}")] if close else []
    figures: dict[str, Any] = {
        "bench": "kill",
        "command": "drill kill",
        "settings": settings_of(settings),
        "fell": fell,
        "kinds": {
            kind: {
                "kills": sum(hit.kind == kind for hit in hits),
                "survivors": survivors[kind],
                f"equal to {one.tolerance:.0e}" if one.tolerance else "identical": survivors[kind],
            }
            for kind, one in KINDS.items()
        },
        "starts": starts,
        "in_resumed_runs": sum(hit.resumed for hit in hits),
        "one_of_two_ended_by_itself": sum(hit.ended for hit in hits if hit.how == ONE_OF_TWO),
        **headline(
            ("kills that hit", len(hits), ""),
            ("runs that were killed and resumed, identical to the last bit", len(same), f"of {len(same)}"),
            *rounded,
            ("killed in their first seconds and started again, identical", starts["identical"], f"of {starts['kills']}"),
        ),
        "environment": environment(),
    }
    if settings.json:
        write_figures(Path(settings.json), figures)
    by_phase = [[phase, *map(_shown, by.values()), _shown(sum(by.values()))] for phase, by in fell.items()]
    totals = [sum(hit.how == how for hit in hits) for how in ways]
    show("where the kills fell", ("", *ways, "all"), [*by_phase, ["all", *map(_shown, totals), _shown(len(hits))]])
    by_kind = [
        [kind, _shown(found["kills"]), _shown(found["survivors"]), f"{_shown(list(found.values())[-1])} {list(found)[-1]}"]
        for kind, found in figures["kinds"].items()
    ]
    lines = [f"{figures['in_resumed_runs']} of the kills fell in runs that had been killed and resumed before"]
    if ones := totals[-1]:
        noticed = figures["one_of_two_ended_by_itself"]
        lines.append(f"of {ones} whose other half was killed, {noticed} ended within {PATIENCE:.0f} s, the others were ended")
    lines += [
        f"real processes killed in their first {starts['within_seconds']} s: {starts['kills']}, of these during imports: "
        f"{starts['in_imports']}; started again, each came to the same end",
        f"run folders without a checkpoint that they left: {starts['run_folders_without_a_checkpoint']}; other files: none",
    ]
    show("by the way of training", ("", "kills", "runs", "to one undisturbed"), by_kind, *lines, footer(figures))


def _shown(count: int) -> str:
    return str(count) if count else "–"
