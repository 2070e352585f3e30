"""Trainings killed at random moments and gone on with by --resume: what comes to its end must be as if nothing had been."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stress.compare_runs import differences, finished, run_in
from stress.fault_hooks import PHASES
from stress.forked import SMALL_TRAINING, Forked, size

ANNOUNCE = "--trainer.callbacks=stress.fault_hooks.Announce"
TRAINING = [*SMALL_TRAINING, ANNOUNCE]
ROUNDING = 1e-5  # of fractions; found 6e-8 in weights under SGD, and losses are written with six digits
PATIENCE = 5.0  # seconds that the other of two processes is given to notice
NINE, TERM, ONE_OF_TWO = "kill -9", "SIGTERM", "kill -9 of one of two"


class Kind(NamedTuple):
    """A way to train. line: the command. processes: how many. then: how many go on with it after a kill, 0 for as many."""

    line: list[str]
    processes: int = 1
    then: int = 0


def shortened(recipe: str, *flags: str) -> Kind:
    """What people train on CIFAR-10, narrower and on few drawn images: of 10 steps an epoch, with regular checkpoints."""
    images = ("--dataset", "shapes", "--data.image_size", "32", "--data.count", "100", "--batch-size", "8")
    net = ("--model.net_options.widths", "[8, 16, 16]", "--epochs", "3", "--checkpoint-every", "4")
    rates = (
        "--lr",
        "0.05",
        "--model.bias_lr",
        "0.4",
        "--model.head_lr",
        "5",
        "--model.weight_decay",
        "0.0001",
    )  # for 8 images
    return Kind(["train", "--recipe", recipe, "--accelerator", "cpu", *images, *net, *rates, ANNOUNCE, *flags])


# not the recipe's AdamW where sums are rounded in another way: it brings the least gradient to the size of any other
SGD = ["--data.count", "118", "--model.optimizer", "sgd", "--lr", "0.05", "--model.momentum", "0.9"]
SMALL_NET = {
    "one process": Kind(TRAINING),
    "one process, images from workers": Kind([*TRAINING, "--data.placement", "host", "--data.workers", "1"]),
    "two processes": Kind(TRAINING, processes=2),
    "two processes, gone on with in one": Kind([*TRAINING, *SGD], processes=2, then=1),
    "one process, gone on with in two": Kind([*TRAINING, *SGD], processes=1, then=2),
}
FLOAT32, BFLOAT16 = ("--precision", "32-true"), ("--precision", "bf16-mixed")
RECIPES = {  # whitened nets under Muon
    "laptop (growing images, mirrored views), bfloat16": shortened("laptop", *BFLOAT16),
    "laptop, float32, averaged weights, the best of them": shortened(
        "laptop", *FLOAT32, "--model.ema_decay", "0.9", "--data.val_size", "20"
    ),
    "laptop, bfloat16, two processes": shortened("laptop", *BFLOAT16)._replace(processes=2),
    "fast94 (all views), float32": shortened("fast94", *FLOAT32, "--trainer.log_every_n_steps", "5"),
    "fast94, bfloat16, images from workers": shortened(
        "fast94", *BFLOAT16, "--data.placement", "host", "--data.workers", "1"
    ),
}
GROUPS = {"": SMALL_NET, "_recipes": RECIPES}


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


def carry_out(attempt: Forked, plan: Plan) -> str | None:
    """The phase in which the kill hit, None when the training was over before."""
    phase = None
    while attempt.listen(0.002):
        if plan.phase is None:
            wait = attempt.started + plan.seconds - time.monotonic()
        else:
            wait = plan.seconds if attempt.count(plan.phase) >= plan.times else 1.0
        if wait <= (0 if plan.phase is None else 0.02):
            time.sleep(max(0.0, wait))
            attempt.send(signal.SIGTERM if plan.how == TERM else signal.SIGKILL, plan.rank)
            phase = attempt.phase
            break
    if plan.how == ONE_OF_TWO and phase is not None:
        deadline = time.monotonic() + PATIENCE
        while attempt.listen(0.005) and time.monotonic() < deadline:
            pass
        attempt.end()  # as torchrun does with the others, which may wait for one that never comes
    else:
        attempt.wait()
    if phase is None or all(code == 0 for code in attempt.codes.values()):
        return None
    return phase if plan.how == TERM else attempt.phase  # of a killed process, what it said last


def kill_one(
    kind: Kind, kills: int, seconds: float, draw: random.Random, folder: Path
) -> tuple[list[tuple[str, str]], Path]:
    """A training that is killed up to `kills` times, then left alone; (how, phase) of what hit, and the run that came of it."""
    hits: list[tuple[str, str]] = []
    for number in range(2 * kills + 1):
        run = run_in(folder / "lightning_logs")
        if run is not None and finished(run):
            return hits, run
        resumed = run is not None and any((run / "checkpoints").glob("*.ckpt"))
        processes = kind.then if resumed and kind.then else kind.processes
        argv = ["train", "--resume", "--devices", str(processes)] if resumed else kind.line
        attempt = Forked(argv, folder, folder / "log.txt", processes)
        plan = draw_plan(draw, seconds, processes) if len(hits) < kills and number < 2 * kills else None
        phase = carry_out(attempt, plan) if plan else attempt.wait() and None
        if plan and phase:
            hits.append((plan.how, phase))
        # killed processes have the signal's code, stopped ones 143 or the signal's; the other of two ends with 1
        by_kill = {NINE: {-9, 0}, TERM: {143, -15, 0, 1}, ONE_OF_TWO: {-9, 1, 0}}
        allowed = by_kill[plan.how] if plan and phase else {0}
        assert set(attempt.codes.values()) <= allowed, (
            f"{sorted(attempt.codes.values())}: {attempt.log.read_text()[-800:]}"
        )
    run = run_in(folder / "lightning_logs")
    assert run is not None and finished(run), f"it did not come to its end: {attempt.log.read_text()[-500:]}"
    return hits, run


def undisturbed(kind: Kind, folder: Path) -> tuple[Path, float]:
    """A run that nothing happens to, and the seconds that it took."""
    attempt = Forked(kind.line, folder, folder.with_suffix(".txt"), kind.processes)
    attempt.finish()
    run = run_in(folder / "lightning_logs")
    assert run is not None
    return run, time.monotonic() - attempt.started


def kill_trainings(group: str, kills: int, seconds: int, seed: int, folder: str) -> dict[str, Any]:
    """Kills until `kills` have hit or `seconds` have passed, each training up to three times."""
    draw, kinds, began = random.Random(seed), GROUPS[group], time.monotonic()
    whole = cache(lambda name: undisturbed(kinds[name], Path(folder) / "undisturbed" / name))
    hits: list[tuple[str, str]] = []
    survivors: Counter[str] = Counter()
    while len(hits) < kills and time.monotonic() < began + seconds:
        name = list(kinds)[(seed + survivors.total()) % len(kinds)]
        kind, place = kinds[name], Path(folder) / f"run-{survivors.total()}"
        expected, duration = whole(name)
        new, run = kill_one(kind, min(draw.randint(1, 3), kills - len(hits)), duration, draw, place)
        if wrong := differences(run, expected, ROUNDING if kind.then else 0.0):
            kept = shutil.copytree(place, tempfile.mkdtemp(prefix="cifar-lit-differs-"), dirs_exist_ok=True)
            raise AssertionError(f"{name}, killed in {new}: differs in {wrong[:5]}. The run is kept in {kept}.")
        survivors[name] += 1
        hits += new
        shutil.rmtree(place)
    fell = {phase: Counter(how for how, where in hits if where == phase) for phase in PHASES.values()}
    return {"seed": seed, "fell": fell, "survivors": survivors}


@pytest.mark.stress
@pytest.mark.parametrize("group", GROUPS)
def test_killed_and_resumed_trainings_end_as_if_nothing_had_been(
    group: str, forking: Callable[..., Any], write_counts: Callable[..., None], tmp_path: Path
) -> None:
    """With STRESS_SEED others are killed at other moments, so that several calls of some STRESS_SECONDS each add up."""
    sizes = {"kills": size("KILLS", 100), "seconds": size("SECONDS", 720), "seed": size("SEED", 0)}
    counts = forking(kill_trainings, group=group, folder=str(tmp_path), **sizes)
    kills = sum(sum(by.values()) for by in counts["fell"].values())
    assert kills > 0
    label = {
        name: f"equal to {ROUNDING:.0e}" if kind.then else "identical to the last bit"
        for name, kind in GROUPS[group].items()
    }
    headline = {
        "kills that hit": kills,
        **{f"{name}: {label[name]}": number for name, number in counts["survivors"].items()},
    }
    write_counts({**counts, "headline": headline, "unit": {}}, group)
