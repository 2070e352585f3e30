"""`sweep`: trials by Optuna in processes of their own, resumed after an interruption, confirmed on new seeds."""

from __future__ import annotations

import csv
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

optuna = pytest.importorskip("optuna")
from sqlalchemy.engine import URL  # noqa: E402

from cifar_lit.extras.sweep.file import SweepFile  # noqa: E402
from cifar_lit.extras.sweep.trials import open_study  # noqa: E402

FOLDER = Path("lightning_logs/lr")
SPACE = {"model.lr": {"log": [0.01, 0.1]}, "data.augment.crop": {"range": [0, 2]}}

# Stands for a training: accuracy 1 - |lr - 0.05| after three epochs.
FAKE = """
import json, os, signal, sys, time, yaml
from pathlib import Path
settings = yaml.safe_load(Path(sys.argv[-1].removeprefix("--config=")).read_text())
words = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv if word.startswith("--"))
run = Path(words["logs"]) / "small-1"
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
(run / "checkpoints/last.ckpt").touch()
(run / "config.yaml").touch()
signal.signal(signal.SIGTERM, lambda *_: ((run / "stopped").touch(), sys.exit(143)))
lr = settings.get("model", {}).get("lr", 0.04)
mode = os.environ.get("FAKE", "")
if mode == "fail" or (mode == "fail above" and lr > 0.05):
    sys.exit("cifar-lit: the loss is not finite")
if mode == "kill once" and "resume" not in words:
    os.kill(os.getpid(), 9)
if mode == "full":
    sys.exit("cifar-lit: the disk is full (last.ckpt): free some space, then start again")
accuracy = 1 - abs(lr - 0.05)
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
    """Replace the trainings of trials by a program that ends at once. Return the list of their command lines."""
    lines: list[list[str]] = []

    def start(command: list[str], **settings: Any) -> Any:
        lines.append(command)
        (config,) = [word for word in command if word.startswith("--config=")]
        return started([sys.executable, "-c", FAKE, *command, config], **settings)

    monkeypatch.setattr("cifar_lit.extras.sweep.trials.started", start)
    return lines


def write(file: str = "lr.yaml", **more: Any) -> None:
    content = {"recipe": "small.yaml", "search": SPACE, "objective": "val/accuracy", "trials": 4, **more}
    Path(file).write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))


def settings_of(line: list[str]) -> dict[str, Any]:
    """Return the settings of the sweep file that a training gets, besides its flags."""
    return yaml.safe_load(Path(next(word for word in line if word.startswith("--config="))[9:]).read_text())


def sweep(*words: str, confirm: int = 0, **variables: str) -> Answer:
    return run_command("sweep", "lr.yaml", "--grace", "2", f"--confirm={confirm}", *words, **variables)


def trials(name: str = "lr") -> list[Any]:
    return optuna.load_study(study_name=name, storage=f"sqlite:///lightning_logs/{name}/sweep.db").trials


def rows() -> list[dict[str, str]]:
    with (FOLDER / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_results_name_the_best_trial_and_a_repeated_command_trains_nothing(fake: list[list[str]]) -> None:
    write(settings={"data.batch_size": 16})
    answer = sweep("--workers", "2", "--epochs", "3", "--batch-size", "8")
    assert answer.code == 0, answer.err
    assert len(fake) == 4 and answer.out.count("→ val/accuracy") == 4
    accuracies = {int(row["trial"]): float(row["val/accuracy"]) for row in rows()}
    best = max(accuracies, key=lambda number: accuracies[number])
    assert f"Best of 4 trials: {best}, val/accuracy {accuracies[best]:.4g}" in answer.out

    recipe = yaml.safe_load((FOLDER / "best.yaml").read_text())
    assert recipe["model"]["lr"] == trials()[best].params["model.lr"] and recipe["model"]["net"] == "lenet"
    assert recipe["data"]["batch_size"] == 16 and recipe["data"]["val_size"] == 40
    assert run_command("fit", "--recipe", str(FOLDER / "best.yaml"), "--print_config").code == 0
    assert all((FOLDER / f"{name}.png").stat().st_size > 5000 for name in ("history", "importance", "slice"))

    typed = [parse("fit", line[4:]) for line in fake]
    assert all(command.value("trainer.max_epochs") == "3" for command in typed)
    assert all(command.value("data.batch_size") == "8" for command in typed)  # overrides the file
    answer = sweep("--epochs", "3", "--batch-size", "8")
    assert answer.code == 0 and len(fake) == 4 and f"Best of 4 trials: {best}" in answer.out
    write(settings={"data.batch_size": 16}, trials=5)
    assert sweep("--epochs", "3", "--batch-size", "8").code == 0 and len(fake) == 5


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trials_and_a_continued_sweep_draws_new_ones(fake: list[list[str]]) -> None:
    write(seed=1, sampler="random", trials=2)
    assert sweep().code == 0
    write("other.yaml", seed=1, sampler="random", trials=2)
    assert run_command("sweep", "other.yaml", "--confirm", "0").code == 0
    assert [trial.params for trial in trials()] == [trial.params for trial in trials("other")]
    write(seed=1, sampler="random", trials=4)
    assert sweep().code == 0
    assert len({trial.params["model.lr"] for trial in trials()}) == 4


@pytest.mark.slow
def test_a_grid_has_all_combinations_and_conditions_leave_settings_out(fake: list[list[str]]) -> None:
    search = {
        "model.optimizer_options.momentum": {"range": [0.5, 0.9], "step": 0.4, "if": {"model.optimizer": "sgd"}},
        "model.optimizer": {"choice": ["sgd", "adamw"]},
        "data.mean": {"choice": [[0.5, 0.5, 0.5], [0.4, 0.4, 0.4]]},
    }
    write(search=search, sampler="grid", trials=2)
    assert sweep().code == 0 and len(fake) == 2
    write(search=search, sampler="grid", trials=None)
    answer = sweep()
    assert answer.code == 0, answer.err
    sgd = ({"optimizer": "sgd", "optimizer_options": {"momentum": momentum}} for momentum in (0.5, 0.9))
    models = ({"optimizer": "adamw"}, *sgd)
    expected = [{"data": {"mean": [mean] * 3}, "model": model} for mean in (0.4, 0.5) for model in models]
    assert sorted(str(settings_of(line)) for line in fake) == sorted(map(str, expected))
    best = yaml.safe_load((FOLDER / "best.yaml").read_text())
    assert best["data"]["mean"] in search["data.mean"]["choice"]


@pytest.mark.slow
def test_two_objectives_give_a_pareto_front(fake: list[list[str]]) -> None:
    write(objective=["val/accuracy", "train_seconds"], trials=5)
    answer = sweep()
    assert answer.code == 0, answer.err
    assert (FOLDER / "pareto-front.png").is_file() and not (FOLDER / "slice.png").exists()
    points = [(float(row["val/accuracy"]), float(row["train_seconds"])) for row in rows()]
    front = [p for p in points if not any(q[0] >= p[0] and q[1] <= p[1] and q != p for q in points)]
    assert answer.out.count("\n│") == len(front)


@pytest.mark.slow
def test_a_bad_trial_is_pruned_and_its_process_ends_in_order(fake: list[list[str]]) -> None:
    space = {"model.lr": {"choice": [0.05, 0.051, 0.052, 0.053, 0.054, 0.09]}}
    for seed in range(99):
        write(search=space, sampler="grid", trials=None, seed=seed)
        if SweepFile(Path("lr.yaml")).grid()[-1] == {"model.lr": 0.09}:
            break
    answer = sweep(EPOCH="0.7")
    assert answer.code == 0, answer.err
    assert [trial.state.name for trial in trials()] == ["COMPLETE"] * 5 + ["PRUNED"]
    assert (FOLDER / "trial-005/small-1/stopped").is_file() and "pruned" in answer.out
    assert not (FOLDER / "trial-005/small-1/metrics.json").exists()


def test_a_failed_trial_is_recorded_with_its_line_and_three_equal_ones_end_the_sweep(fake: list[list[str]]) -> None:
    write(trials=6, sampler="random")
    answer = sweep(FAKE="fail above")
    assert answer.code == 0, answer.err
    assert {trial.state.name for trial in trials()} == {"COMPLETE", "FAIL"} and len(fake) == 6
    assert {row["error"] for row in rows() if row["state"] == "fail"} == {"the loss is not finite"}
    write("broken.yaml", trials=6, sampler="random")
    answer = run_command("sweep", "broken.yaml", "--confirm", "0", FAKE="fail")
    assert answer.code == 1
    assert answer.error_lines == ["cifar-lit: the first 3 trials failed: the loss is not finite"]


def test_a_training_that_is_killed_is_resumed_and_counts_once(fake: list[list[str]]) -> None:
    write(trials=2)
    answer = sweep(FAKE="kill once")
    assert answer.code == 0, answer.err
    assert len(fake) == 4 and sum("--resume=" in word for line in fake for word in line) == 2
    assert [row["state"] for row in rows()] == ["complete"] * 2 and "Best of 2 trials" in answer.out
    assert len([*FOLDER.glob("trial-*/small-*")]) == 2


def test_a_full_disk_ends_the_sweep_and_the_trial_is_continued(fake: list[list[str]]) -> None:
    write(trials=1)
    assert_refused(sweep(FAKE="full"), 1, "the disk is full")
    assert sweep().code == 0 and [row["state"] for row in rows()] == ["complete"]


@pytest.mark.slow
def test_a_recipe_without_validation_images_gets_some(fake: list[list[str]]) -> None:
    write(settings={"data.val_size": 0})
    answer = sweep()
    assert "validation on 10% of the training images" in answer.out
    assert all("--data.val_size=0.1" in line for line in fake)
    assert yaml.safe_load((FOLDER / "best.yaml").read_text())["data"]["val_size"] == 0


def test_ctrl_c_ends_with_the_command_that_continues(fake: list[list[str]]) -> None:
    write(trials=2)
    begun = f"Path('{FOLDER}/trial-000/small-1/metrics.csv').exists()"
    watch = f"import os, time\nfrom pathlib import Path\nwhile not {begun}: time.sleep(0.1)\nos.kill({os.getpid()}, 2)"
    with subprocess.Popen([sys.executable, "-c", watch]):
        answer = sweep(EPOCH="20")
    assert answer.code == 130
    assert answer.err.endswith("Resume with:\n  cifar-lit sweep lr.yaml --grace 2 --confirm=0\n")
    assert [trial.state.name for trial in trials()] == ["FAIL", "WAITING"] and (
        FOLDER / "trial-000/small-1/stopped"
    ).is_file()
    assert sweep().code == 0
    assert [row["state"] for row in rows()] == ["complete"] * 2 and len(fake) == 3
    assert any(word.startswith("--resume=") and word.endswith("trial-000/small-1") for word in fake[1])


@pytest.mark.slow
def test_the_time_budget_ends_a_sweep_and_is_not_spent_twice(fake: list[list[str]]) -> None:
    write(trials=None, time="5s", sampler="random")
    assert sweep(EPOCH="0.2").code == 0 and "complete" in {row["state"] for row in rows()}
    count = len(fake)
    assert sweep().code == 0 and len(fake) == count


def test_a_sweep_of_the_same_name_with_other_settings_is_refused(fake: list[list[str]]) -> None:
    write(trials=1)
    assert sweep().code == 0
    kept = contents_of(FOLDER)
    wider = {"search": {"model.lr": {"log": [0.01, 0.2]}}}
    for more, words in ((wider, []), ({"seed": 2}, []), ({}, ["--epochs", "1"])):
        write(trials=1, **more)
        assert_refused(sweep(*words), 2, "is a sweep with another value of", "name: …")
    assert contents_of(FOLDER).keys() == kept.keys()
    write(trials=1)
    Path("small.yaml").write_text(Path("small.yaml").read_text() + "\nthreads: 1\n")
    assert_refused(sweep(), 2, "is a sweep with another value of recipe file")
    (FOLDER / "sweep.db").unlink()
    assert_refused(sweep(), 2, "is a sweep with another value of")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"trails": 4}, "unknown key 'trails'. Did you mean trials?"),
        ({"search": {"model.lrr": {"log": [0.1, 0.2]}}}, "no setting is called model.lrr. Did you mean model.lr?"),
        ({"settings": {"model.nett": "lenet"}}, "no setting is called model.nett. Did you mean model.net?"),
        ({"search": {"model.lr": {"range": [0.5, 0.1]}}}, "search: model.lr"),
        ({"search": {"model.lr": {"range": [0, 1], "step": 3}}}, "search: model.lr"),
        ({"search": {"model.lr": {"range": [-1, 0.5]}}}, "the learning rate must be above 0"),
        ({"search": {"model.lr": {"choice": []}}}, "search: model.lr: name one space"),
        ({"search": {"model.optimizer": {"choice": ["sgd", "sdg"]}}}, "sdg"),
        ({"search": {"model.lr": {"log": [0.1, 0.2], "if": {"model.net": "lenet"}}}}, "must have these choices"),
        ({"search": {"data.val_size": {"range": [0.1, 0.2]}}}, "the same validation images"),
        ({"settings": {"model.lr": 0.1}}, "it is fixed"),
        ({"objective": "test/accuracy"}, "objective must be one of val/accuracy"),
        ({"objective": ["val/accuracy", "train_seconds"], "pruner": "median"}, "pruner: none"),
        ({"sampler": "grid"}, "sampler grid: use choice, or range with a step"),
        ({"time": "soon"}, "time must be a duration"),
        ({"name": "../up"}, "cannot name a folder"),
        ({"search": {"model.net": {"choice": ["lenet", "os.system"]}}}, "os.system would run code"),
        ({"search": {"data.dataset": {"choice": ["shapes", "os.system"]}}}, "os.system would run code"),
        ({"search": {"trainer.callbacks": {"choice": [[{"class_path": "os.system"}]]}}}, "names os.system, whose code"),
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


@pytest.mark.parametrize("name", ["trial-000", "trial-000/errors.txt", "sweep.db", "best.yaml"])
def test_a_link_in_a_sweeps_folder_is_not_followed(name: str, fake: list[list[str]], tmp_path: Path) -> None:
    write(trials=1)
    (FOLDER / name).parent.mkdir(parents=True)
    target = tmp_path / "outside"
    target.write_text("mine")
    (FOLDER / name).symlink_to(target)
    assert_refused(sweep(), 1, f"{FOLDER / name} is a symlink pointing outside")
    assert target.read_text() == "mine" and not fake


def test_a_sweep_is_not_put_into_a_link(fake: list[list[str]], tmp_path: Path) -> None:
    write(trials=1)
    FOLDER.parent.mkdir()
    FOLDER.symlink_to(tmp_path / "outside")
    assert_refused(sweep(), 2, "is a run or a symlink: give the sweep another name")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW studies AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n",
        "CREATE TRIGGER endless AFTER INSERT ON t BEGIN SELECT 1; END",
        "CREATE INDEX trials ON t (x)",
    ],
)
def test_a_database_that_never_answers_is_refused(statement: str, fake: list[list[str]]) -> None:
    write(trials=1)
    FOLDER.mkdir(parents=True)
    with closing(sqlite3.connect(FOLDER / "sweep.db")) as database:
        database.executescript(f"CREATE TABLE t (x); {statement};")
    assert_refused(sweep(), 1, "sweep.db")
    assert not fake


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trial_params SET distribution_json = '{'",
        "UPDATE trial_params SET param_value = 'many'",
        "UPDATE trial_params SET param_value = 50 WHERE param_name = 'model.lr'",
        "UPDATE trial_values SET value = 9e999",
        "DELETE FROM trial_values",
        "UPDATE study_user_attributes SET value_json = '3' WHERE key = 'sweep'",
        "UPDATE study_user_attributes SET value_json = '\"x\"' WHERE key = 'seconds'",
        "UPDATE study_directions SET direction = 'MINIMIZE'",
        "UPDATE alembic_version SET version_num = 'x'",
        "INSERT INTO trial_system_attributes (trial_id, key, value_json) VALUES (1, 'failed_trial', '\"../../up\"')",
    ],
)
def test_rows_of_a_database_that_no_sweep_writes_are_refused(statement: str, fake: list[list[str]]) -> None:
    write(trials=1)
    assert sweep().code == 0
    best = (FOLDER / "best.yaml").read_text()
    with closing(sqlite3.connect(FOLDER / "sweep.db")) as database, database:
        assert database.execute(statement).rowcount > 0
    write(trials=2)
    assert_refused(sweep(), 1, "lr in the database")
    assert (FOLDER / "best.yaml").read_text() == best and len(fake) == 1


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--workers", "0"), 2, "--workers 0 is not a valid"),
        (("--recipe", "small.yaml"), 2, "takes its recipe from the file"),
        (("--lr", "0.1"), 2, "--model.lr is searched"),
        (("--epoch", "1"), 2, "there is no flag --epoch. Did you mean --epochs?"),
        (("--confirm", "1"), 2, "--confirm needs 2 seeds"),
        (("--storage", "nowhere"), 2, "--storage is not the URL"),
        (("--storage", "sqlite://"), 2, "--storage names a database that workers can share"),
        (("--storage", "sqlite:///a.db?password=secret"), 2, "its password is in ~/.pgpass"),
        (("--storage", "sqlite:////nowhere/a.db"), 1, "/nowhere/a.db: unable to open database file. Fix that"),
        (("--config", "small.yaml"), 2, "takes its recipe from the file"),
    ],
)
def test_wrong_flags_are_one_line(words: tuple[str, ...], code: int, line: str) -> None:
    write()
    assert_refused(run_command("sweep", "lr.yaml", *words), code, line)
    assert not Path("lightning_logs").exists()


def test_workers_that_start_together_open_a_new_database(tmp_path: Path) -> None:
    """Each creates the tables that it has not found, and Optuna leaves the collision to the caller."""
    write()
    url, barrier = URL.create("sqlite", database=str(tmp_path / "sweep.db")), threading.Barrier(3)

    def open_new() -> str:
        barrier.wait()
        return open_study(url, SweepFile(Path("lr.yaml")), 30, []).study_name

    with ThreadPoolExecutor(3) as workers:
        assert [worker.result() for worker in [workers.submit(open_new) for _ in range(3)]] == ["lr"] * 3


def test_an_unreachable_database_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg")
    write()
    answer = sweep("--storage", "postgresql://me:secret@127.0.0.1:1/sweeps")
    assert_refused(answer, 1, "me:***@127.0.0.1")
    assert "secret" not in answer.err


# ---- Real trainings.


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cifar_lit", "sweep", "lr.yaml", "--grace", "3", *words]
    return subprocess.Popen(command, env=environment(folder), stdout=-1, stderr=-2, text=True)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return result


@pytest.mark.slow
def test_the_trial_of_a_killed_command_is_resumed_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    write(trials=1)
    run = FOLDER / "trial-000/small-1"
    words = ("--confirm", "0", "--epochs", "30", "--checkpoint-every", "5")
    with start(tmp_path, *words) as killed:
        wait_for((run / "checkpoints/last.ckpt").is_file)
        killed.send_signal(signal.SIGKILL)
    with start(tmp_path, *words) as second:
        out, _ = second.communicate(timeout=300)
        assert second.returncode == 0, out
    assert "without a heartbeat for 3 s is resumed" in out and "Best of 1 trials: 0" in out
    first, retried = trials()
    assert (first.state.name, retried.state.name) == ("FAIL", "COMPLETE") and first.params == retried.params
    assert [path.name for path in FOLDER.glob("trial-*/small-*")] == ["small-1"]
    assert "resum" in (FOLDER / "trial-000/output.txt").read_text()

    assert run_command("fit", "--config", str(run / "config.yaml"), "--logs", "undisturbed").code == 0
    assert config_of(run)["model"]["lr"] == first.params["model.lr"]
    weights = checkpoint_of(run / "checkpoints/last.ckpt")["state_dict"]
    expected = checkpoint_of(next(Path("undisturbed").glob("*/checkpoints/last.ckpt")))["state_dict"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_best_trial_is_confirmed_by_tests_with_new_seeds_that_are_trained_once(tmp_path: Path) -> None:
    write(trials=1)
    words = ("--confirm", "2", "--epochs", "1", "--seed", "7")
    with start(tmp_path, *words) as stopped:
        wait_for(lambda: [*FOLDER.glob("confirm/start*/*/seeds.json")])
        stopped.send_signal(signal.SIGINT)
        out, _ = stopped.communicate(timeout=300)
    assert stopped.returncode == 130 and "Resume with:" in out, out
    for _ in range(2):
        answer = run_command("sweep", "lr.yaml", *words)
        assert answer.code == 0, answer.err
        assert "minus start" in answer.out and "2 equal seeds" in answer.out
        runs = [config_of(config.parent) for config in FOLDER.glob("confirm/*/*/*/config.yaml")]
        assert sorted(run["seed_everything"] for run in runs) == [8, 8, 9, 9]
