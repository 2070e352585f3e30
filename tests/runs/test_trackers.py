"""W&B and MLflow: what they receive, resumed runs, errors, secrets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from contract.command_line import (
    SMALL,
    Answer,
    Fork,
    assert_refused,
    config_of,
    environment,
    metrics_of,
    rows_of,
    run_command,
    run_process,
)

from cifar_lit.runs import trackers

Curves = dict[str, list[tuple[float, float]]]  # (step, value) by name

SECRET = "5ec7e75ec7e75ec7e75ec7e75ec7e75ec7e75ec7"  # has the length of a key of W&B
STEPS = ["--epochs", "3", "--trainer.log_every_n_steps", "1", "--checkpoint-every", "7"]  # five steps per epoch
KILLED = {"AT_STEP": "13", "AT_STEP_SIGNAL": str(int(signal.SIGKILL))}  # the last checkpoint is of step 10
RUN = Path("lightning_logs/small-1")


@pytest.fixture(autouse=True)
def own_settings(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no account and no server of this machine, and keep the caches of the trackers in the working folder."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(working_folder))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "training"))  # has AtStep


def train(*words: object, **variables: str) -> Answer:
    """Run a training in a forked process: a tracker keeps threads and connections."""
    return Fork([*SMALL, *words], Path.cwd(), "train", **variables).answer()


def train_with_a_kill(name: str, **variables: str) -> None:
    """Train in RUN, kill the process in step 14 and resume the run; it keeps the ids of its tracked runs."""
    words = [*STEPS, "--logger", name]
    killed = train(*words, "--trainer.callbacks", "at_step.AtStep", **KILLED, **variables)
    assert killed.code == -signal.SIGKILL, killed.err
    assert int(rows_of(RUN / "metrics.csv")[-1]["step"]) == 13
    ids = (RUN / "trackers.json").read_text()
    answer = train(*words, "--resume", RUN, **variables)
    assert (answer.code, answer.err) == (0, "")
    assert SECRET not in answer.out
    assert (RUN / "trackers.json").read_text() == ids


def id_of(run_dir: Path, tracker: str) -> str:
    return json.loads((run_dir / "trackers.json").read_text())[tracker]


def csv_curves(run_dir: Path) -> Curves:
    """Return the curves in metrics.csv."""
    curves: Curves = {}
    for row in rows_of(run_dir / "metrics.csv"):
        for name in row.keys() - {"step", "epoch"}:
            if row[name]:
                curves.setdefault(name, []).append((int(row["step"]), float(row[name])))
    return curves


def assert_continued(curves: Curves) -> None:
    """Assert that a tracked run has the values of the resumed training, and the first one from before the kill."""
    for name, points in csv_curves(RUN).items():
        assert {point for point in points if point[0] > 10} <= set(curves[name]), name
    assert min(curves["train/loss"]) == min(csv_curves(RUN)["train/loss"])


def assert_no_secret(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


# ---- W&B


@pytest.fixture
def wandb() -> Any:
    return pytest.importorskip("wandb", reason="wandb is not installed: pip install 'cifar-lit[wandb]'")


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """Yield the records that `wandb sync` would upload.

    A .wandb file has a header of 7 bytes and then LevelDB's log format, in blocks of 32 KiB. A kill cuts it short.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]

    for file in sorted(run_dir.glob(f"wandb/offline-run-*-{id_of(run_dir, 'wandb')}/*.wandb")):
        data, place, record = file.read_bytes(), 7, b""
        while place + 7 < len(data):
            place += -place % 32768 if -place % 32768 < 7 else 0
            size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
            record += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                yield Record.FromString(record)
                record = b""


def wandb_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows that W&B received, in order."""
    history = [record.history.item for record in wandb_records(run_dir) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in history]


def wandb_curves(run_dir: Path) -> Curves:
    curves: Curves = {}
    for row in wandb_rows(run_dir):
        for name, value in row.items():
            if name in csv_curves(run_dir):
                curves.setdefault(name, []).append((row["trainer/global_step"], value))
    return curves


@pytest.mark.slow
def test_wandb_continues_the_run_of_a_killed_and_resumed_training(wandb: Any) -> None:
    train_with_a_kill("wandb", WANDB_MODE="offline", WANDB_API_KEY=SECRET)
    assert len(list(RUN.glob("wandb/offline-run-*/*.wandb"))) == 2
    assert {record.run.run_id for record in wandb_records(RUN) if record.HasField("run")} == {id_of(RUN, "wandb")}
    for name, points in csv_curves(RUN).items():
        assert {point for point in points if point[0] > 10} <= set(wandb_curves(RUN)[name])
    assert_no_secret(RUN)


@pytest.mark.slow
def test_wandb_without_an_account_gets_settings_and_curves_offline(wandb: Any) -> None:
    answer = train("--logger", "wandb", WANDB_PROJECT="mine", WANDB_TAGS="a,b", WANDB_RUN_GROUP="grouped")
    (line,) = [line for line in answer.lines if line.startswith("wandb ")]
    (folder,) = RUN.glob("wandb/offline-run-*")
    command = line.partition("`wandb sync ")[2].rstrip("`")
    assert list(Path().glob(command)) == [folder]
    records = list(wandb_records(RUN))
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.display_name, run.project, run.run_group, [*run.tags]) == ("small-1", "mine", "grouped", ["a", "b"])
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["data"] == config_of(RUN)["data"]
    assert wandb_curves(RUN) == csv_curves(RUN)
    assert not [row for row in wandb_rows(RUN) if "epoch" in row]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    assert not list(RUN.glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_wandb_takes_its_server_from_the_home_folder_and_not_from_the_working_folder(
    wandb: Any, working_folder: Path
) -> None:
    """The key would be sent to that server."""
    for place, host in (("wandb", "stranger.example"), (".wandb", "other.example"), ("home", "own.example")):
        (working_folder / place).mkdir(exist_ok=True)
        (working_folder / place / "settings").write_text(f"[default]\nbase_url = https://{host}\nentity = {host}\n")
    (working_folder / ".netrc").write_text(f"machine own.example login user password {'0' * 40}")
    code = (  # os._exit: wandb's own handlers at exit may wait for its service for minutes
        "import os, wandb; from pathlib import Path; from cifar_lit.runs.trackers import TRACKERS\n"
        "def init(**_):\n"
        "    print(wandb.setup().settings.base_url, wandb.setup().settings.entity, flush=True); os._exit(0)\n"
        "wandb.init = init\nTRACKERS['wandb'](Path('run'), None, {})"
    )
    variables = {
        "WANDB_API_KEY": SECRET,
        "WANDB_CONFIG_DIR": str(working_folder / "home"),
        "HOME": str(working_folder / "elsewhere"),
    }
    answer = run_process([sys.executable, "-c", code], working_folder, **variables)
    assert answer.out == "https://own.example own.example\n", answer.err


# ---- MLflow


@pytest.fixture
def mlflow() -> Any:
    pytest.importorskip("sqlalchemy", reason="MLflow's SQLite store needs sqlalchemy: pip install 'cifar-lit[mlflow]'")
    return pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'cifar-lit[mlflow]'")


def mlflow_curves(client: Any, run_dir: Path) -> Curves:
    run_id = id_of(run_dir, "mlflow")
    histories = {name: client.get_metric_history(run_id, name) for name in client.get_run(run_id).data.metrics}
    return {name: sorted((point.step, point.value) for point in points) for name, points in histories.items()}


def assert_tracked_by_mlflow(client: Any) -> None:
    """Assert that the tracked run of `train_with_a_kill` has the settings, and the values from before and after it."""
    run = client.get_run(id_of(RUN, "mlflow"))
    assert (run.info.run_name, run.info.status) == (RUN.name, "FINISHED")
    assert run.data.params["data/batch_size"] == "32"
    assert_continued(mlflow_curves(client, RUN))


@pytest.mark.slow
def test_mlflow_without_a_server_continues_the_run_of_a_killed_and_resumed_training(mlflow: Any) -> None:
    train_with_a_kill("mlflow,tensorboard")
    assert_tracked_by_mlflow(mlflow.MlflowClient("sqlite:///lightning_logs/mlflow.db"))
    assert {path.name for path in Path().iterdir()} >= {"lightning_logs"}
    assert not Path("mlruns").exists()
    assert list(RUN.glob("events.out.tfevents.*"))


def planted_database(mlflow: Any, place: Path) -> None:
    """Write a stranger's mlflow.db, whose experiment keeps its files at `place`."""
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/lightning_logs/mlflow.db")
    client.create_experiment("cifar-lit", artifact_location=place.as_uri())


@pytest.mark.slow
def test_an_mlflow_database_of_the_working_folder_does_not_choose_where_files_go(mlflow: Any, tmp_path: Path) -> None:
    Path("lightning_logs").mkdir()
    planted_database(mlflow, tmp_path / "outside")
    assert run_command(*SMALL, "--logger", "mlflow").code == 0
    assert not (tmp_path / "outside").exists()
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/lightning_logs/mlflow.db")
    assert mlflow_curves(client, RUN) == csv_curves(RUN)


def test_mlflow_writes_no_database_through_a_link(mlflow: Any, tmp_path: Path) -> None:
    Path("lightning_logs").mkdir()
    Path("lightning_logs/mlflow.db").symlink_to(tmp_path / "own.db")
    assert_refused(run_command(*SMALL, "--logger", "mlflow"), 1, "mlflow.db is not read: it is a symlink")
    assert not (tmp_path / "own.db").exists()


@pytest.mark.slow
def test_an_mlflow_database_has_the_run_with_its_tags_and_the_printed_line_opens_it(
    mlflow: Any, tmp_path: Path
) -> None:
    uri, tags = f"sqlite:///{tmp_path}/own.db", json.dumps({"group": "photos"})
    answer = run_command(*SMALL, "--logger", "mlflow", MLFLOW_TRACKING_URI=uri, MLFLOW_RUN_CONTEXT=tags)
    assert answer.code == 0, answer.err
    assert f"open with `mlflow ui --backend-store-uri {uri}`" in answer.out
    client, run_id = mlflow.MlflowClient(uri), id_of(RUN, "mlflow")
    assert client.get_run(run_id).data.tags["group"] == "photos"
    assert not Path("mlruns").exists()


def wait_for_server(server: subprocess.Popen[bytes], address: str) -> None:
    """Return when `address` answers; fail when the server has ended, or after two minutes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server has ended: see server.txt"
        with suppress(OSError), urllib.request.urlopen(address):
            return
        time.sleep(0.2)
    raise AssertionError(f"{address} did not answer within two minutes")


@pytest.mark.slow
def test_mlflow_server_continues_the_run_of_a_killed_training_and_no_file_has_its_password(
    mlflow: Any, tmp_path: Path
) -> None:
    pytest.importorskip("huey", reason="the server needs the whole of mlflow: pip install 'cifar-lit[mlflow]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", tmp_path / "files"]
    command = [sys.executable, "-m", "mlflow", "server", *words, "--port", port, "--workers", "1"]
    with (tmp_path / "server.txt").open("w") as log:
        server = subprocess.Popen([*map(str, command)], env=environment(tmp_path), stdout=log, stderr=log)
    try:
        wait_for_server(server, f"http://127.0.0.1:{port}/health")
        train_with_a_kill("mlflow", MLFLOW_TRACKING_URI=f"http://user:{SECRET}@127.0.0.1:{port}")
        assert_tracked_by_mlflow(mlflow.MlflowClient(f"http://127.0.0.1:{port}"))
        assert_no_secret(Path("lightning_logs"))
    finally:
        server.terminate()
        server.wait()


def test_an_unreachable_mlflow_server_is_one_line_without_the_password(mlflow: Any) -> None:
    answer = run_command(*SMALL, "--logger", "mlflow", MLFLOW_TRACKING_URI=f"http://user:{SECRET}@127.0.0.1:9")
    assert_refused(answer, 1, "mlflow cannot start", "127.0.0.1", "refused", "leave it out of --logger")
    assert SECRET not in answer.err


# ---- errors


class Recorder:
    """A tracker that keeps what it receives in `log.jsonl`, and raises an error from call `fails` on."""

    version, place = "0" * 16, "here"
    calls, fails = 0, 1000

    def __init__(self, run: Path, run_id: str | None, settings: dict[str, Any]) -> None:
        self._record("start", run_id)

    def _record(self, *values: Any) -> None:
        self.calls += 1
        if self.calls >= self.fails:
            raise ConnectionError(f"no answer from http://user:{SECRET}@host")
        with Path("log.jsonl").open("a") as file:
            print(json.dumps([*map(str, values)]), file=file)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._record("row", step, sorted(metrics))

    def finalize(self, status: str) -> None:
        self._record("close", status)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorder)
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    return Recorder


def records() -> list[list[str]]:
    return [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]


def test_a_tracker_that_fails_does_not_end_the_training(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "fails", 4)
    answer = run_command(*SMALL, *STEPS, "--logger", "wandb")
    assert answer.code == 0
    (line,) = answer.err.splitlines()
    assert line.startswith("wandb failed (no answer from http://host): the training continues without it")
    assert len(rows_of(RUN / "metrics.csv")) == 19
    assert metrics_of(RUN)["test"]
    assert [record[0] for record in records()] == ["start", "row", "row"]


@pytest.mark.parametrize(
    ("written", "continued"),
    [('{"wandb": "0123456789abcdef"}', "0123456789abcdef"), ('{"wandb": "../../../elsewhere"}', "None"), ("[", "None")],
)
def test_a_resumed_run_continues_only_an_id_in_plain_letters_and_digits(
    recorder: type[Recorder], written: str, continued: str
) -> None:
    """Anyone may have written trackers.json."""
    variables = {"AT_STEP": "3", "AT_STEP_SIGNAL": str(int(signal.SIGTERM))}
    train("--logger", "csv", "--trainer.callbacks", "at_step.AtStep", **variables)
    (RUN / "trackers.json").write_text(written)
    assert run_command(*SMALL, "--logger", "wandb", "--resume", RUN).code == 0
    assert records()[0] == ["start", continued]
    assert records()[-1] == ["close", "finished"]
    assert id_of(RUN, "wandb") == recorder.version


def test_an_interrupted_run_is_closed_as_failed(recorder: type[Recorder]) -> None:
    variables = {"AT_STEP": "3", "AT_STEP_SIGNAL": str(int(signal.SIGTERM))}
    answer = train("--logger", "wandb", "--trainer.callbacks", "at_step.AtStep", **variables)
    assert answer.code == 128 + signal.SIGTERM
    assert records()[-1] == ["close", "failed"]


def test_only_the_first_process_has_a_tracker(recorder: type[Recorder]) -> None:
    """Two processes train as one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"TORCHELASTIC_RUN_ID": "pair", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [*SMALL, "--devices", "2", "--logger", "wandb"]
    pair = [Fork(words, Path.cwd(), f"rank{rank}", RANK=rank, LOCAL_RANK=rank, **common) for rank in "01"]
    assert [process.answer().code for process in pair] == [0, 0]
    assert [record[0] for record in records()].count("start") == 1
    assert records()[-1] == ["close", "finished"]


def test_an_unknown_logger_and_a_missing_package_are_refused_before_data_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert_refused(run_command(*SMALL, "--logger", "wandbb"), 2, "Did you mean wandb?", "tensorboard, csv")
    answer = run_command(*SMALL, "--dataset", "folder", "--logger", "tensorboard, wandb")
    assert_refused(answer, 2, 'pip install "cifar-lit[wandb]"')
    assert not RUN.exists()


def test_a_checkpoint_is_tested_without_the_packages_of_the_trackers_of_its_run(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(*SMALL, "--logger", "wandb").code == 0
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    before = records()
    assert run_command("test", "--ckpt_path", RUN / "checkpoints/last.ckpt").code == 0
    assert records() == before


def test_a_run_that_names_no_logger_writes_metrics_csv_only() -> None:
    assert run_command(*SMALL, "--logger", "csv").code == 0
    assert not list(RUN.glob("events.out.tfevents.*"))
    assert rows_of(RUN / "metrics.csv")


@pytest.mark.slow
def test_the_command_line_imports_no_tracker(tmp_path: Path) -> None:
    modules = "{name.partition('.')[0] for name in sys.modules}"
    code = f"import sys, cifar_lit.cli.fit; print(sorted({modules} & {{'wandb', 'mlflow'}}))"
    assert run_process([sys.executable, "-c", code], tmp_path).out == "[]\n"
