"""`sweep`: trials by Optuna in processes of their own, continued by any worker, confirmed on new seeds."""

from __future__ import annotations

import csv
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from contract.command_line import (
    Answer,
    assert_refused,
    checkpoint_of,
    config_of,
    contents_of,
    environment,
    run_command,
)

from cifar_lit.bench.process import started
from cifar_lit.cli.flags import parse
from cifar_lit.cli.sweep import DESCRIPTION
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import open_inside
from cifar_lit.sweep.space import read_sweep

optuna = pytest.importorskip("optuna")
from optuna.pruners import NopPruner  # noqa: E402
from sqlalchemy.engine import make_url  # noqa: E402

from cifar_lit.sweep.database import database_url, open_storage, open_study  # noqa: E402
from cifar_lit.sweep.results import conclusion, ranked  # noqa: E402
from cifar_lit.sweep.trials import Control, Job, Worker, run_in, run_job, value_of  # noqa: E402

FOLDER = Path("lightning_logs/lr")
SPACE = {"model.lr": {"log": [0.01, 0.1]}, "data.augment.crop": {"range": [0, 2]}}

# Stands for a training: accuracy 1 - |lr - 0.05| after three epochs, lowered by seed · lr / 100.
FAKE = """
import json, os, signal, sys, time, yaml
from pathlib import Path
settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
words = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv if word.startswith("--"))
seed = int(words.get("seed_everything", 3))
run = Path(words["logs"]) / "small-1"
run.mkdir()
(run / "config.yaml").write_text("seed_everything: %d" % seed)
signal.signal(signal.SIGTERM, lambda *_: ((run / "stopped").touch(), sys.exit(143)))
lr = settings.get("model", {}).get("lr", 0.04)
if "fail" in os.environ.get("FAKE", "") and (os.environ["FAKE"] == "fail" or lr > 0.05):
    sys.exit("cifar-lit: the loss is not finite")
accuracy = 1 - abs(lr - 0.05) - seed * lr / 100
with (run / "metrics.csv").open("w") as file:
    print("epoch,val/accuracy,val/loss", file=file, flush=True)
    for epoch in range(3):
        print(f"{epoch},{accuracy},{1 - accuracy}", file=file, flush=True)
        time.sleep(float(os.environ.get("EPOCH", "0")))
figures = {"val": {"accuracy": accuracy, "loss": 1 - accuracy}, "train_seconds": 10 * lr}
(run / "metrics.json").write_text(json.dumps(figures))
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace trainings by a program that ends at once. Return the list of their command lines."""
    lines: list[list[str]] = []

    def start(command: list[str], **settings: Any) -> Any:
        lines.append(command)
        return started([sys.executable, "-c", FAKE, *command], **settings)

    monkeypatch.setattr("cifar_lit.sweep.trials.started", start)
    return lines


def write(file: str = "lr.yaml", **more: Any) -> None:
    content = {"recipe": "small.yaml", "search": SPACE, "objective": "val/accuracy", "trials": 4, **more}
    Path(file).write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))


def settings_of(line: list[str]) -> dict[str, Any]:
    """Return the settings of the sweep file that a training gets, besides its flags."""
    return yaml.safe_load(Path(line[line.index("--config") + 1]).read_text())


def sweep(*words: str, **variables: str) -> Answer:
    return run_command("sweep", "lr.yaml", *words, **variables)


def trials(name: str = "lr") -> list[Any]:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{FOLDER}/sweep.db").trials


def rows() -> list[dict[str, str]]:
    with (FOLDER / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_results_name_the_best_trial_and_a_repeated_command_trains_nothing(fake: list[list[str]]) -> None:
    write(settings={"data.batch_size": 16})
    answer = sweep("--confirm", "2", "--workers", "2", "--epochs", "3")
    assert answer.code == 0, answer.err
    assert len(fake) == 4 + 2 * 2 and answer.out.count("\ntrial ") + answer.out.startswith("trial ") == 4
    accuracies = {int(row["trial"]): float(row["val/accuracy"]) for row in rows()}
    best = max(accuracies, key=lambda number: accuracies[number])
    assert f"Best of 4 trials: {best}, val/accuracy {accuracies[best]:.4g}" in answer.out
    assert "confirming trial" in answer.out and "--confirm 2" in answer.out and "The gain" in answer.out

    recipe = yaml.safe_load((FOLDER / "best.yaml").read_text())
    assert recipe["model"]["lr"] == trials()[best].params["model.lr"] and recipe["model"]["net"] == "lenet"
    assert recipe["data"]["batch_size"] == 16 and recipe["data"]["val_size"] == 40
    assert run_command("fit", "--recipe", str(FOLDER / "best.yaml"), "--print_config").code == 0
    page = (FOLDER / "sweep.html").read_text()
    assert page.count('src="data:image/png;base64,') == 3 and "The gain" in page and "://" not in page
    assert all((FOLDER / f"{name}.png").stat().st_size > 5000 for name in ("history", "importance", "slice"))

    seeds = [word for line in fake for word in line if word.startswith("--seed_everything")]
    assert sorted(seeds) == ["--seed_everything=4"] * 2 + ["--seed_everything=5"] * 2  # the recipe has seed 3
    assert all("--epochs" in line for line in fake)
    answer = sweep("--confirm", "2", "--epochs", "3")
    assert answer.code == 0 and len(fake) == 8 and f"Best of 4 trials: {best}" in answer.out
    write(settings={"data.batch_size": 16}, trials=5)
    assert sweep("--confirm", "0", "--epochs", "3").code == 0 and len(fake) == 9


def test_the_same_seed_gives_the_same_trials_also_if_the_sweep_was_interrupted(fake: list[list[str]]) -> None:
    write(seed=1, sampler="random")
    assert sweep("--confirm", "0").code == 0
    for count in (2, 4):
        write("other.yaml", seed=1, sampler="random", trials=count)
        assert run_command("sweep", "other.yaml", "--confirm", "0").code == 0
    storage = "sqlite:///lightning_logs/other/sweep.db"
    again = optuna.load_study(study_name="other", storage=storage).trials
    assert [trial.params for trial in trials()] == [trial.params for trial in again]
    assert len({trial.params["model.lr"] for trial in again}) == 4


def test_choices_may_be_lists_and_conditions_leave_settings_out(fake: list[list[str]]) -> None:
    search = {
        "model.momentum": {"range": [0.5, 0.9], "step": 0.4, "if": {"model.optimizer": "sgd"}},
        "model.optimizer": {"choice": ["sgd", "adamw"]},
        "data.mean": {"choice": [[0.5, 0.5, 0.5], [0.4, 0.4, 0.4]]},
    }
    write(search=search, sampler="grid", trials=None)
    answer = sweep("--confirm", "0")
    assert answer.code == 0, answer.err
    models = ({"optimizer": "adamw"}, *({"momentum": momentum, "optimizer": "sgd"} for momentum in (0.5, 0.9)))
    expected = [{"data": {"mean": [mean] * 3}, "model": model} for mean in (0.4, 0.5) for model in models]
    assert sorted(str(settings_of(line)) for line in fake) == sorted(map(str, expected))
    best = yaml.safe_load((FOLDER / "best.yaml").read_text())
    assert best["data"]["mean"] in search["data.mean"]["choice"]


def test_two_objectives_give_a_pareto_front(fake: list[list[str]]) -> None:
    write(objective=["val/accuracy", "train_seconds"], trials=5)
    answer = sweep("--confirm", "0")
    assert answer.code == 0, answer.err
    assert (FOLDER / "pareto-front.png").is_file() and not (FOLDER / "slice.png").exists()
    points = [(float(row["val/accuracy"]), float(row["train_seconds"])) for row in rows()]
    front = [p for p in points if not any(q[0] >= p[0] and q[1] <= p[1] and q != p for q in points)]
    assert answer.out.count("\n│") == len(front)


def test_the_front_of_two_objectives_is_that_of_the_trials_that_count() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])
    for accuracy, seconds in ((0.5, 9.0), (0.7, 5.0), (0.6, 3.0), (0.7, 6.0), (0.9, 1.0)):
        trial = optuna.trial.create_trial(values=[accuracy, seconds])
        study.add_trial(trial)
    assert [trial.number for trial in ranked(study, study.trials)] == [4]
    assert [trial.number for trial in ranked(study, study.trials[:4])] == [1, 2]  # trials: 4
    assert [trial.number for trial in ranked(study, study.trials[:1])] == [0]


def test_the_best_trial_of_a_loss_is_the_lowest(fake: list[list[str]]) -> None:
    write(objective="val/loss", search={"model.lr": {"choice": [0.05, 0.09]}}, sampler="grid", trials=None)
    answer = sweep("--confirm", "3")
    assert answer.code == 0, answer.err
    assert yaml.safe_load((FOLDER / "best.yaml").read_text())["model"]["lr"] == 0.05
    assert "The gain holds: val/loss changes by -0.00" in answer.out  # the recipe has 0.04


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ([0.02], "is not confirmed: fewer than two seeds"),
        ([0.02, 0.03], "is not confirmed: x changes by +0.0250 on average, no verdict from fewer than 3 seeds"),
        ([0.02, 0.02, 0.02], "is not confirmed: x changes by +0.0200 on average, no verdict, because all"),
        ([0.02, 0.03, 0.04], "holds: x changes by +0.0300 on average, 95 % interval +0.0052 … +0.0548"),
        ([-0.02, -0.03, -0.04], "is not confirmed: x changes by -0.0300 on average, 95 % interval -0.0548 … -0.0052"),
    ],
)
def test_a_gain_holds_if_it_is_significant_and_in_the_direction_of_the_objective(
    gains: list[float], words: str
) -> None:
    assert conclusion("x", True, gains, 0).startswith(f"The gain {words}")
    losses = conclusion("x", False, [-gain for gain in gains], 2)
    assert losses.startswith(f"The gain {words.partition(':')[0]}") and losses.endswith(" 2 of the trainings failed.")


def test_a_value_of_the_database_out_of_range_is_refused(fake: list[list[str]]) -> None:
    write(trials=1)
    assert sweep("--confirm", "0").code == 0
    best = (FOLDER / "best.yaml").read_text()
    with closing(sqlite3.connect(FOLDER / "sweep.db")) as database, database:
        database.execute("UPDATE trial_params SET param_value = 50 WHERE param_name = 'model.lr'")
    assert_refused(sweep("--confirm", "0"), 1, "the sweep lr in the database is damaged", "The value 50.0 of")
    assert (FOLDER / "best.yaml").read_text() == best


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial_params SET distribution_json = '{'",
        "UPDATE trial_params SET param_value = 'many'",
        "UPDATE trials SET number = number + 5",
        "UPDATE trials SET datetime_start = 'yesterday'",
        "UPDATE trial_values SET value = 9e999",
        "DELETE FROM trial_values",
        "UPDATE trial_intermediate_values SET intermediate_value = 'low'",
        "UPDATE trial_user_attributes SET value_json = '[1, 2]' WHERE key = 'run'",
        "UPDATE trial_user_attributes SET value_json = '\"x\"' WHERE key = 'kills'",
        "UPDATE study_user_attributes SET value_json = '3' WHERE key = 'sweep'",
        "UPDATE study_user_attributes SET value_json = '\"x\"' WHERE key = 'seconds'",
        "UPDATE study_directions SET direction = 'MINIMIZE'",
        "UPDATE alembic_version SET version_num = 'x'",
    ],
)
def test_rows_of_a_database_that_no_sweep_writes_are_refused(statement: str, tmp_path: Path) -> None:
    url = make_url(f"sqlite:///{tmp_path}/sweep.db")

    def opened() -> optuna.Study:
        return open_study(open_storage(url), "lr", ["maximize"], NopPruner())

    study = opened()
    for name, value in {"sweep": {}, "seconds": 1.5}.items():
        study.set_user_attr(name, value)
    trial = study.ask()
    trial.report(trial.suggest_float("model.lr", 0, 1), 1)
    for name, value in {"worker": "", "run": "lr/trial-000/small-1", "error": "", "kills": 0}.items():
        trial.set_user_attr(name, value)
    study.tell(trial, 0.5)
    assert len(opened().trials) == 1
    with closing(sqlite3.connect(tmp_path / "sweep.db")) as database, database:
        assert database.execute(statement).rowcount == 1
    with pytest.raises(Failure, match=r"the sweep lr in the database is damaged|no longer compatible"):
        opened()


def test_results_are_read_from_the_newest_run_and_the_last_row_of_its_curve(tmp_path: Path) -> None:
    for number in (9, 10):
        (tmp_path / f"small-{number}").mkdir()
        (tmp_path / f"small-{number}/config.yaml").touch()
    run = run_in(tmp_path)
    assert run is not None and run.name == "small-10"
    (run / "metrics.csv").write_text("epoch,train/loss\n0,3.0\n1,2.0\n2,\n")
    assert value_of(run, "train/loss") == 2.0 and value_of(run, "val/loss") is None


def test_a_bad_trial_is_pruned_and_its_process_ends_in_order(fake: list[list[str]]) -> None:
    space = {"model.lr": {"choice": [0.05, 0.051, 0.052, 0.053, 0.054, 0.09]}}
    for seed in range(99):
        write(search=space, sampler="grid", trials=None, seed=seed)
        if read_sweep(Path("lr.yaml")).grid()[-1] == {"model.lr": 0.09}:
            break
    answer = sweep("--confirm", "0", EPOCH="0.7")
    assert answer.code == 0, answer.err
    assert [trial.state.name for trial in trials()] == ["COMPLETE"] * 5 + ["PRUNED"]
    assert (FOLDER / "trial-005/small-1/stopped").is_file() and "pruned" in answer.out
    assert not (FOLDER / "trial-005/small-1/metrics.json").exists()


def test_a_failed_trial_is_recorded_with_its_line_and_three_equal_ones_end_the_sweep(fake: list[list[str]]) -> None:
    write(trials=6, sampler="random")
    answer = sweep("--confirm", "0", FAKE="fail above")
    assert answer.code == 0, answer.err
    states = [trial.state.name for trial in trials()]
    assert {*states} == {"COMPLETE", "FAIL"}
    assert {row["error"] for row in rows() if row["state"] == "fail"} == {"the loss is not finite"}
    write("broken.yaml", trials=6, sampler="random")
    answer = run_command("sweep", "broken.yaml", "--confirm", "0", FAKE="fail")
    assert answer.code == 1
    assert answer.error_lines == ["cifar-lit: the first 3 trials failed: the loss is not finite"]


def test_a_training_that_is_killed_is_continued_at_most_twice(fake: list[list[str]]) -> None:
    write(trials=1)
    fake_kill = FAKE.replace("seed = int", "os.kill(os.getpid(), 9)\nseed = int")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cifar_lit.sweep.trials.started",
            lambda command, **settings: started([sys.executable, "-c", fake_kill, *command], **settings),
        )
        answer = sweep("--confirm", "0")
    assert answer.code == 1 and "killed 3 times (exit code -9)" in answer.out and len(trials()) == 1


def test_a_recipe_without_validation_images_gets_some(fake: list[list[str]]) -> None:
    write(settings={"data.val_size": 0})
    answer = sweep("--confirm", "0")
    assert "validation on 10% of the training images" in answer.out
    assert all("--data.val_size=0.1" in line for line in fake)
    assert yaml.safe_load((FOLDER / "best.yaml").read_text())["data"]["val_size"] == 0


def test_ctrl_c_ends_with_the_command_that_continues(fake: list[list[str]], tmp_path: Path) -> None:
    write(trials=2)
    begun = f"Path('{FOLDER}/trial-000/small-1/metrics.csv').exists()"
    watch = f"import os, time\nfrom pathlib import Path\nwhile not {begun}: time.sleep(0.1)\nos.kill({os.getpid()}, 2)"
    with subprocess.Popen([sys.executable, "-c", watch]):
        answer = sweep("--confirm", "0", EPOCH="20")
    assert answer.code == 130
    assert answer.err.endswith("Resume with:\n  cifar-lit sweep lr.yaml --confirm 0\n")
    assert [trial.state.name for trial in trials()] == ["WAITING"]
    assert (FOLDER / "trial-000/small-1/stopped").is_file()


def test_ctrl_c_while_the_best_trial_is_confirmed_leaves_no_conclusion(fake: list[list[str]]) -> None:
    write(trials=1)
    begun = f"Path('{FOLDER}/confirm-000-001/small-1/metrics.csv').exists()"
    watch = f"import os, time\nfrom pathlib import Path\nwhile not {begun}: time.sleep(0.1)\nos.kill({os.getpid()}, 2)"
    with subprocess.Popen([sys.executable, "-c", watch]):
        answer = sweep("--confirm", "2", EPOCH="0.7")
    assert answer.code == 130
    assert "The gain" not in answer.out + (FOLDER / "sweep.html").read_text() + (FOLDER / "best.yaml").read_text()


def test_trainings_that_confirm_are_not_pruned(fake: list[list[str]]) -> None:
    write(trials=1, search={"model.lr": {"log": [0.045, 0.05]}})  # better than the recipe's 0.04
    answer = sweep("--confirm", "4", "--workers", "2", EPOCH="0.7")
    assert answer.code == 0, answer.err
    assert [trial.state.name for trial in trials("lr confirm 0")] == ["COMPLETE"] * 8
    assert "The gain holds" in answer.out and "4 new seeds" in answer.out


def test_typed_flags_override_the_settings_of_the_file(fake: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    environments = []

    def start(command: list[str], **settings: Any) -> Any:
        environments.append(settings["env"])
        return started([sys.executable, "-c", FAKE, *command], **settings)

    write(trials=1, settings={"data.batch_size": 16}, time="1h")
    assert sweep("--confirm", "2", "--batch-size", "8", "--seed", "7").code == 0
    for line in fake:
        command = parse("fit", line[4:])
        assert command.value("data.batch_size") == "8"
    assert [parse("fit", line[4:]).value("seed_everything") for line in fake] == ["7", "8", "8", "9", "9"]
    study = optuna.load_study(study_name="lr", storage=f"sqlite:///{FOLDER}/sweep.db")
    assert 0 < study.user_attrs["seconds"] < 60

    monkeypatch.setattr("cifar_lit.sweep.trials.started", start)
    write("other.yaml", trials=1)
    assert run_command("sweep", "other.yaml", "--confirm", "0", PYTHONPATH="elsewhere").code == 0
    assert environments[0]["PYTHONPATH"].endswith(f"{os.pathsep}elsewhere")


def test_a_training_without_results_is_a_failed_trial(fake: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar_lit.sweep.trials.started", lambda command, **settings: started(["true"], **settings))
    write(trials=2)
    answer = sweep("--confirm", "0")
    assert answer.code == 1 and answer.out.count("failed: the run has no val/accuracy") == 2
    assert "no trial of lightning_logs/lr is complete" in answer.err


def test_a_full_disk_ends_the_sweep_and_the_trial_is_continued(
    fake: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "import sys; sys.exit('cifar-lit: the disk is full (last.ckpt): free some space, then start again')"
    with monkeypatch.context() as patch:
        patch.setattr(
            "cifar_lit.sweep.trials.started",
            lambda command, **settings: started([sys.executable, "-c", full], **settings),
        )
        write(trials=1)
        line = f"cifar-lit: the disk of {FOLDER}/trial-000 is full: free some space, then repeat the command"
        answer = sweep("--confirm", "0")
    assert answer.code == 1 and answer.error_lines == [line]
    assert sweep("--confirm", "0").code == 0 and [trial.state.name for trial in trials()] == ["COMPLETE"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a job of one trial without a command."""
    storage = open_storage(database_url(None, tmp_path))
    study = optuna.create_study(storage=storage)
    return Job(
        study, storage, tmp_path / "trial", 1, lambda trial: {}, lambda trial: [], ["val/accuracy"], print, [[]],
        Control(60, 0),
    )  # fmt: skip


def test_a_trial_beyond_the_number_of_trials_is_left_for_a_longer_sweep(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.control.start = time.monotonic()
    job.study.tell(job.study.ask(), 0.5)
    views: list[list[Any]] = [[], job.study.trials]  # the first is that before another worker has asked
    monkeypatch.setattr(job, "trials", lambda: views.pop(0))
    monkeypatch.setattr(Worker, "_take_over", lambda worker: None)
    Worker(job, [], {}).work()
    assert [trial.state.name for trial in job.study.trials] == ["COMPLETE", "WAITING"]


def test_a_trial_that_was_given_back_belongs_to_the_worker_that_asks_for_it_next(job: Job) -> None:
    workers = [Worker(job, [], {}) for _ in range(2)]
    trial = workers[0].study.ask()
    job.folder_of(0).mkdir()
    (job.folder_of(0) / ".worker").touch()
    trial.set_user_attr("worker", f"{socket.gethostname()} killed")
    workers[0]._take_over()
    assert job.study.trials[0].state.name == "WAITING"
    workers[0].study.ask()  # and now begins to lock its folder
    workers[1]._take_over()
    assert job.study.trials[0].state.name == "RUNNING"


def test_the_time_budget_ends_a_sweep_and_is_not_spent_twice(fake: list[list[str]]) -> None:
    write(trials=None, time="5s", sampler="random")
    answer = sweep("--confirm", "0", EPOCH="0.2")
    assert answer.code == 0 and "complete" in {row["state"] for row in rows()}
    count = len(fake)
    assert sweep("--confirm", "0").code == 0 and len(fake) == count
    study = optuna.load_study(study_name="lr", storage=f"sqlite:///{FOLDER}/sweep.db")
    assert study.user_attrs["seconds"] >= 5


def test_a_second_command_that_began_later_does_not_lower_the_used_time(job: Job) -> None:
    job.study.set_user_attr("seconds", 40.0)
    job.control.start = time.monotonic()
    job.study.tell(job.study.ask(), 0.5)
    run_job(job)
    assert job.study.user_attrs["seconds"] == 40.0


def test_a_sweep_of_the_same_name_with_other_settings_is_refused(fake: list[list[str]]) -> None:
    write(trials=1)
    assert sweep("--confirm", "0").code == 0
    kept = contents_of(FOLDER)
    wider = {"search": {"model.lr": {"log": [0.01, 0.2]}}}
    for more, words in ((wider, []), ({"seed": 2}, []), ({}, ["--epochs", "1"])):
        write(trials=1, **more)
        assert_refused(sweep("--confirm", "0", *words), 2, "is a sweep with another value of", "name: …")
    assert contents_of(FOLDER).keys() == kept.keys()
    write(trials=1)
    Path("small.yaml").write_text(Path("small.yaml").read_text() + "\n# edited\n")
    assert_refused(sweep("--confirm", "0"), 2, "is a sweep with another value of recipe file")
    (FOLDER / "sweep.db").unlink()
    assert_refused(sweep("--confirm", "0"), 2, "has trials of another lr: give this sweep a name")


def test_the_example_of_the_help_is_valid(fake: list[list[str]]) -> None:
    example = DESCRIPTION.partition("objective:\n\n")[2].partition("\n\n")[0]
    content = yaml.safe_load(example)
    write(**content | {"trials": 1})
    answer = sweep("--confirm", "0")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"trails": 4}, "unknown key 'trails'. Did you mean trials?"),
        ({"search": {"model.lrr": {"log": [0.1, 0.2]}}}, "no setting is called model.lrr. Did you mean model.lr?"),
        ({"settings": {"model.nett": "lenet"}}, "no setting is called model.nett. Did you mean model.net?"),
        ({"search": {"model.lr": {"range": [0.5, 0.1]}}}, "search: model.lr"),
        ({"search": {"model.lr": {"log": [0, 0.1]}}}, "search: model.lr"),
        ({"search": {"model.lr": {"range": [0, 1], "step": 3}}}, "search: model.lr"),
        ({"search": {"model.lr": {"range": [-1, 0.5]}}}, "the learning rate must be above 0"),
        ({"search": {"model.lr": {"choice": []}}}, "search: model.lr needs one space"),
        ({"search": {"model.optimizer": {"choice": ["sgd", "sdg"]}}}, "sdg"),
        ({"search": {"model.lr": {"log": [0.1, 0.2], "if": {"model.net": "lenet"}}}}, "model.net is not searched"),
        (
            {
                "search": {
                    "model.lr": {"choice": [0.1, -1], "if": {"model.optimizer": "adamw"}},
                    "model.optimizer": {"choice": ["sgd", "adamw"]},
                }
            },
            "the learning rate must be above 0, not -1",
        ),
        ({"search": {"data.val_size": {"range": [0.1, 0.2]}}}, "the same validation images"),
        ({"settings": {"model.lr": 0.1}}, "settings fixes it"),
        ({"objective": "test/accuracy"}, "objective must be one of val/accuracy"),
        ({"objective": ["val/accuracy", "train_seconds"], "pruner": "median"}, "pruner: none"),
        ({"sampler": "grid"}, "sampler grid: use choice, or range with a step"),
        ({"time": "soon"}, "time must be a duration"),
        ({"trials": 0}, "trials must be a whole number"),
        ({"seed": float("inf")}, "seed must be a whole number"),
        ({"recipe": "small"}, "no recipe is called 'small'"),
        ({"name": "../up"}, "cannot name a folder"),
        ({"search": {"model.net": {"choice": ["lenet", "os.system"]}}}, "names os.system, whose code would run"),
        ({"name": ".."}, "cannot name a folder"),
        ({"settings": {"data.cache_dir": "/"}}, "sets data.cache_dir to '/', which no file may choose"),
        (
            {"search": {"data.cache_dir": {"choice": ["x", "/"]}}},
            "sets data.cache_dir to '/', which no file may choose",
        ),
        *(
            ({key: {"trainer.callbacks": value}}, "a text that would be read as a list or as settings")
            for key, value in (
                ("settings", "[{class_path: evil.Evil}]"),
                ("search", {"choice": ["- class_path: evil.Evil"]}),
                ("search", {"choice": [1], "if": {"model.net": "{a: b}"}}),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_file_is_one_line_before_any_trial(more: dict[str, Any], line: str, fake: list[list[str]]) -> None:
    write(**more)
    assert_refused(sweep(), 2, line)
    assert not fake and not Path("lightning_logs").exists()


def test_a_grid_is_all_allowed_combinations_in_an_order_of_the_seed_and_has_a_limit() -> None:
    search = {
        "model.optimizer": {"choice": ["sgd", "adamw"]},
        "model.momentum": {"range": [0.1, 0.3], "step": 0.1, "if": {"model.optimizer": "sgd"}},
        "data.augment.crop": {"range": [1, 5], "step": 2},
    }

    def grid(**more: Any) -> list[dict[str, Any]]:
        write(search=search, sampler="grid", trials=None, **more)
        return read_sweep(Path("lr.yaml")).grid()

    sgd = [{"data.augment.crop": crop, "model.momentum": value} for crop in (1, 3, 5) for value in (0.1, 0.2, 0.3)]
    expected = [{"model.optimizer": "sgd", **each} for each in sgd]
    expected += [{"model.optimizer": "adamw", "data.augment.crop": crop} for crop in (1, 3, 5)]
    in_order = [sorted(each.items()) for each in grid()]
    assert sorted(map(str, in_order)) == sorted(str(sorted(each.items())) for each in expected)
    assert grid() == grid() != grid(seed=1)
    search["data.seed"] = {"range": [0, 60_000_000]}
    with pytest.raises(UsageError, match="at most 10,000 combinations"):
        grid()


@pytest.mark.parametrize("name", ["trial-000", "trial-000/errors.txt", "trial-000/.worker", "sweep.db", "best.yaml"])
def test_a_link_in_a_sweeps_folder_is_not_followed(name: str, fake: list[list[str]], tmp_path: Path) -> None:
    write(trials=1)
    (FOLDER / name).parent.mkdir(parents=True)
    target = tmp_path / "outside"
    target.write_text("mine")
    (FOLDER / name).symlink_to(target)
    assert_refused(sweep("--confirm", "0"), 1, f"{FOLDER / name} is a symlink pointing outside")
    assert target.read_text() == "mine" and not fake


def test_a_sweep_is_not_put_into_a_link_or_a_pipe(fake: list[list[str]], tmp_path: Path) -> None:
    write(trials=1)
    FOLDER.parent.mkdir()
    FOLDER.symlink_to(tmp_path / "outside")
    assert_refused(sweep("--confirm", "0"), 2, "is a run or a symlink: give the sweep another name")
    FOLDER.unlink()
    (FOLDER / "trial-000").mkdir(parents=True)
    os.mkfifo(FOLDER / "sweep.db")
    assert_refused(sweep("--confirm", "0"), 1, "it is a symlink or no regular file")
    (FOLDER / "sweep.db").unlink()
    (FOLDER / "trial-000").rmdir()
    inside = FOLDER / "trial-000/errors.txt"
    inside.parent.mkdir()
    inside.symlink_to("../../lr/notes.txt")
    with pytest.raises(OSError, match="it is a symlink"):
        open_inside(inside, "w")


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("CREATE VIEW studies AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n", "views"),
        ("CREATE TRIGGER endless AFTER INSERT ON t BEGIN SELECT 1; END", "views, triggers or functions"),
        ("CREATE TABLE studies (study_id INTEGER, x AS (hex(zeroblob(400000000))))", "views, triggers or functions"),
        ("CREATE INDEX trials ON t (x)", "already an index named trials"),
    ],
)
def test_a_database_that_never_answers_is_refused(
    statement: str, line: str, fake: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cifar_lit.sweep.database.time.sleep", lambda seconds: None)
    write(trials=1)
    FOLDER.mkdir(parents=True)
    with closing(sqlite3.connect(FOLDER / "sweep.db")) as database:
        database.executescript(f"CREATE TABLE t (x); {statement};")
    assert_refused(sweep("--confirm", "0"), 1, "sweep.db", line)
    assert not fake


def test_the_page_shows_no_characters_that_change_its_text(fake: list[list[str]]) -> None:
    write(trials=2, sampler="grid", search={"data.cache_dir": {"choice": ["a\x1b[2J", "$\\frac\u202e"]}})
    answer = sweep("--confirm", "0")
    assert answer.code == 0, answer.err
    page = (FOLDER / "sweep.html").read_text()
    assert "\\x1b" in page and "\\u202e" in page
    assert not {"\x1b", "\u202e"} & {*page}


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--workers", "0"), 2, "--workers 0 is not a valid"),
        (("--workers", "0,1"), 2, "--workers 0,1"),
        (("--recipe", "small.yaml"), 2, "takes its recipe from the file"),
        (("--lr", "0.1"), 2, "--model.lr is searched"),
        (("--epoch", "1"), 2, "there is no flag --epoch. Did you mean --epochs?"),
        (("--confirm", "1"), 2, "--confirm needs 2 seeds"),
        (("--storage", "nowhere"), 2, "--storage is not the URL"),
        (("--storage", "sqlite://"), 2, "--storage is not the URL"),
        (("--storage", "sqlite:///a.db?password=secret"), 2, "--storage: put the password into ~/.pgpass"),
        (("--storage", "sqlite:////nowhere/a.db"), 1, "/nowhere/a.db: unable to open database file. Fix that"),
        (("--config", "small.yaml"), 2, "takes its recipe from the file"),
    ],
)
def test_wrong_flags_are_one_line(words: tuple[str, ...], code: int, line: str) -> None:
    write()
    assert_refused(sweep(*words), code, line)
    assert not Path("lightning_logs").exists()


def test_an_unreachable_database_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg")
    write()
    answer = sweep("--storage", "postgresql://me:secret@127.0.0.1:1/sweeps")
    assert_refused(answer, 1, "the database at 127.0.0.1")
    assert "secret" not in answer.err


ORPHAN = """
import sys
from cifar_lit.bench.process import started
from cifar_lit.cli import main
import cifar_lit.sweep.trials as trials
trials.started = lambda command, **settings: started([sys.executable, "-c", sys.argv.pop(1), *command], **settings)
main(["sweep", "lr.yaml", "--confirm", "0"])
"""


def test_a_trial_is_not_begun_again_while_the_training_of_a_killed_worker_runs(
    fake: list[list[str]], tmp_path: Path
) -> None:
    write(trials=1)
    variables = {**environment(tmp_path), "EPOCH": "2"}
    with subprocess.Popen([sys.executable, "-c", ORPHAN, FAKE], env=variables) as killed:
        wait_for((FOLDER / "trial-000/small-1/metrics.csv").is_file)
        killed.kill()
    answer = sweep("--confirm", "0")
    assert answer.code == 0, answer.err
    assert not fake and [trial.state.name for trial in trials()] == ["COMPLETE"]


# ---- Real trainings.

LONG = ("--confirm", "0", "--epochs", "30", "--checkpoint-every", "5")


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cifar_lit", "sweep", "lr.yaml", *LONG]
    return subprocess.Popen(command, env=environment(folder), stdout=-1, stderr=-2, text=True)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return result


def test_the_trial_of_a_killed_worker_is_resumed_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    write(trials=1)
    run = FOLDER / "trial-000/small-1"
    with start(tmp_path) as killed:
        wait_for((run / "checkpoints/last.ckpt").is_file)
        killed.send_signal(signal.SIGKILL)
    (parameters,) = [trial.params for trial in trials()]
    with start(tmp_path) as second:
        out, _ = second.communicate(timeout=300)
        assert second.returncode == 0, out
    assert [trial.state.name for trial in trials()] == ["COMPLETE"]
    assert trials()[0].params == parameters and config_of(run)["model"]["lr"] == parameters["model.lr"]
    assert [path.name for path in (FOLDER / "trial-000").glob("small-*")] == ["small-1"]
    assert "resum" in (FOLDER / "trial-000/output.txt").read_text()

    assert run_command("fit", "--config", str(run / "config.yaml"), "--logs", "undisturbed").code == 0
    weights = checkpoint_of(run / "checkpoints/last.ckpt")["state_dict"]
    expected = checkpoint_of(next(Path("undisturbed").glob("*/checkpoints/last.ckpt")))["state_dict"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
